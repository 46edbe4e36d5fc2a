"""What strangers do to a deployment's ports, and which it has: as the kernel knows them, not our own notes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import psutil

SILENCE_S = 0.05  # how long a stranger listens
ACTOR = re.compile(r"ray::(\w+Actor)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Where a process of a deployment listens: a TCP address or an abstract Unix socket."""

    actor: str
    pid: int
    address: tuple[str, int] | str

    def connect(self) -> socket.socket:
        """A plain connection."""
        if isinstance(self.address, tuple):
            return socket.create_connection(self.address, timeout=5)
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(5)
        plain.connect(self.address)
        return plain


def actors() -> dict[int, str]:
    """Actor classes of all our processes by pid."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            match = ACTOR.match(" ".join(process.cmdline()))
            if match is not None:
                found[process.pid] = match[1]
    return found


def ports() -> list[Port]:
    """Every port on which an actor listens."""
    found = []
    for pid, actor in actors().items():
        tcp = {tuple(one.laddr) for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN"}
        addresses: list[tuple[str, int] | str] = [*sorted(tcp), *_abstract_sockets(pid)]
        found += [Port(actor=actor, pid=pid, address=address) for address in addresses]
    return found


def _abstract_sockets(pid: int) -> list[str]:
    """Abstract Unix sockets on which a process listens: flag 00010000 is __SO_ACCEPTCON."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [
        "\0" + row[7][1:]
        for row in rows
        if len(row) > 7 and row[3] == "00010000" and row[6] in inodes and row[7][0] == "@"
    ]


def _greeting(mechanism: bytes) -> bytes:
    """ZMTP 3.1: signature, version, mechanism, as-server, filler (rfc.zeromq.org/spec/37)."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def attacks(seed: int) -> Iterator[bytes]:
    """Bytes that no friend would send: noise, other protocols, ZeroMQ without the secret, sizes beyond all limits."""
    noise = random.Random(seed).randbytes
    yield b""
    yield noise(1)
    yield noise(100_000)
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + noise(1000)
    yield b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n"
    yield _greeting(b"NULL") + b"\x04\x26\x05READY" + noise(32)
    yield _greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 40) + noise(1000)
    yield _greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + noise(194)
    yield b"\x01" * 200
    yield b"\xff" * 4096


def attack(port: Port, data: bytes) -> socket.socket:
    """Say it, listen a moment; the connection stays half-open until it is closed."""
    stranger = port.connect()
    with contextlib.suppress(OSError):
        stranger.sendall(data)
        stranger.settimeout(SILENCE_S)
        stranger.recv(1000)
    return stranger
