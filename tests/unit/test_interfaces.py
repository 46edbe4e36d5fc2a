"""Which network UCX may use on a host with several."""

import socket

import pytest

from blockferry.cluster.interfaces import address_of, ucx_devices
from blockferry.connectors.transport import open_ucx
from blockferry.connectors.transport.hosts import Hosts

NAMES = [name for _, name in socket.if_nameindex()]


def test_every_interface_but_that_of_the_address_is_excluded() -> None:
    for own in NAMES:
        if own != "lo" and address_of(own):
            excluded = set(ucx_devices(address_of(own)).removeprefix("^").split(",")) - {""}
            assert excluded == {*NAMES} - {own, "lo"}


@pytest.mark.parametrize("address", ["203.0.113.9", "127.0.0.1"])
def test_ucx_chooses_where_no_other_host_reaches_the_address(address: str) -> None:
    assert ucx_devices(address) == ""


def test_ucx_takes_a_list_of_what_to_leave_out() -> None:
    open_ucx(hosts=Hosts.MANY, net_device="^" + ",".join({*NAMES, "docker0"} - {"lo"})).close()
