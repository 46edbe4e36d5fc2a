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
