"""Which ways UCX takes: none over a network where all peers are on one host, none that would crash it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

from blockferry.cluster.actor_calls import LaunchError
from blockferry.cluster.actors import Place
from blockferry.cluster.bring_up import check_places
from blockferry.cluster.deployment import load_deployment
from blockferry.cluster.running import InstanceRun, Running
from blockferry.connectors.base import TransportError
from blockferry.connectors.transport.hosts import UCX_ROOM_BYTES, Hosts, ucx_transports


def test_one_host_opens_no_network() -> None:
    assert ucx_transports(Hosts.ONE, free_bytes=UCX_ROOM_BYTES) == ("posix", "self")


def test_many_hosts_share_memory_where_they_can_and_a_network_where_not() -> None:
    assert ucx_transports(Hosts.MANY, free_bytes=UCX_ROOM_BYTES) == ("posix", "tcp", "self")


def test_too_little_shared_memory_on_one_host_is_refused_with_the_remedy() -> None:
    with pytest.raises(TransportError, match=r"/dev/shm has 1\.0 MiB free, UCX needs 20 .* --shm-size"):
        ucx_transports(Hosts.ONE, free_bytes=1 << 20)


def test_too_little_shared_memory_with_many_hosts_leaves_the_network() -> None:
    assert ucx_transports(Hosts.MANY, free_bytes=UCX_ROOM_BYTES - 1) == ("tcp", "self")


def placed_on(running: Running, *addresses: str) -> list[InstanceRun]:
    """One instance on each."""
    instances = []
    for index, address in enumerate(addresses):
        instance = running.name_next(index % 2)
        instance.places = [Place(node_id=address, address=address, pid=1)]
        instances.append(instance)
    return instances


@pytest.fixture
def running(tmp_path: Path) -> Running:
    path = make_checkpoint(tmp_path / "tiny", "llama")
    file = tmp_path / "deployment.yaml"
    file.write_text(f"model: {{path: {path}}}\ninstances: [{{role: prefill}}, {{role: decode}}]\n")
    return Running(deployment=load_deployment(file), hosts=Hosts.ONE)


def test_a_newcomer_on_another_host_is_refused_where_no_network_was_opened(running: Running) -> None:
    with pytest.raises(LaunchError, match=r"prefill-0 on 10\.0\.0\.1, decode-0 on 10\.0\.0\.2: .* give --address"):
        check_places(running, placed_on(running, "10.0.0.1", "10.0.0.2"))


def test_newcomers_on_the_same_host_are_welcome(running: Running) -> None:
    check_places(running, placed_on(running, "10.0.0.1", "10.0.0.1"))


def test_newcomers_on_other_hosts_are_welcome_in_a_cluster(running: Running) -> None:
    cluster = dataclasses.replace(running, hosts=Hosts.MANY)
    check_places(cluster, placed_on(cluster, "10.0.0.1", "10.0.0.2"))
