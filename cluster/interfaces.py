"""Network interfaces and their IPv4 addresses, as the kernel of this machine knows them. Linux only."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """IPv4 address of an interface; empty where it has none, or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str:
    """Network interface that carries an IPv4 address; empty when none does."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), "")


def ucx_devices(address: str) -> str:
    """UCX's NET_DEVICES where other hosts reach this one at `address`: none of the other interfaces.

    UCX takes any, also one that leads nowhere for its peers, such as docker0 with the same address on every host. Only
    interfaces are excluded, so that RDMA devices stay. Empty, UCX's own choice, where no interface has the address,
    and for 127.0.0.1, at which no other host reaches anybody.
    """
    own = interface_of(address)
    others = [name for _, name in socket.if_nameindex() if name not in (own, "lo")]
    return "^" + ",".join(others) if own not in ("", "lo") and others else ""
