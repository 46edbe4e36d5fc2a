"""Plain TCP sockets as fast as Python makes them: what any transfer over TCP is held against.

    pieces       one blocking send per piece, in the order of the pool
    contiguous   as much as the kernel takes, both ends spin

Owns one listener per receipt. Every wait ends after TIMEOUT_S.
"""

from __future__ import annotations

import dataclasses
import enum
import socket
import time
from collections.abc import Sequence

from blockferry.connectors.base import ByteArray, TransportError

TIMEOUT_S = 60.0
_BUFFER_BYTES = 4 << 20  # as large as what the UCX transport asks for


class Sending(enum.StrEnum):
    """How bytes are put into a socket."""

    PIECES = "pieces"
    CONTIGUOUS = "contiguous"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one rank moved, when (time.monotonic() of its host) and for how much processor time."""

    num_bytes: int
    started_s: float
    ended_s: float
    cpu_s: float = 0.0


def wait_until(at_s: float) -> float:
    """Sleep until time.monotonic() reaches at_s, so that ranks of one host start together; returns the time."""
    time.sleep(max(0.0, at_s - time.monotonic()))
    return time.monotonic()


class Receipt:
    """One expected stream: listens from the start, receives once."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._listener.settimeout(TIMEOUT_S)

    @property
    def address(self) -> tuple[str, int]:
        """Where send() connects."""
        host, port = self._listener.getsockname()
        return host, port

    def receive(self, into: ByteArray, sending: Sending) -> None:
        """Fill `into` from one sender and tell it so. Raises TransportError."""
        view = into.data
        try:
            with self._listener:
                connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(0.0 if sending is Sending.CONTIGUOUS else TIMEOUT_S)
                _fill(connection, view)
                connection.settimeout(TIMEOUT_S)
                connection.sendall(b"!")
        except OSError as error:
            raise TransportError(f"receiving {len(view)} bytes on a plain socket: {error}") from error


def send(address: tuple[str, int], pieces: Sequence[ByteArray], sending: Sending, *, at_s: float) -> Timed:
    """Send bytes at `at_s` and wait for the receiver's word. Raises TransportError."""
    try:
        with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            views = [piece.data for piece in pieces]
            started_s = wait_until(at_s)
            if sending is Sending.PIECES:
                for view in views:
                    connection.sendall(view)
            else:
                connection.settimeout(0.0)
                for view in views:
                    _drain(connection, view)
                connection.settimeout(TIMEOUT_S)
            connection.recv(1)
            ended_s = time.monotonic()
    except OSError as error:
        raise TransportError(f"sending on a plain socket to {address[0]}: {error}") from error
    return Timed(num_bytes=sum(map(len, views)), started_s=started_s, ended_s=ended_s)


def _fill(connection: socket.socket, view: memoryview) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    received = 0
    while received < len(view):
        try:
            count = connection.recv_into(view[received : received + _BUFFER_BYTES])
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{received} of {len(view)} bytes came within {TIMEOUT_S:g} s") from None
            continue
        if not count:
            raise ConnectionResetError(f"the sender closed after {received} of {len(view)} bytes")
        received += count


def _drain(connection: socket.socket, view: memoryview) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    sent = 0
    while sent < len(view):
        try:
            sent += connection.send(view[sent:])
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{sent} of {len(view)} bytes went within {TIMEOUT_S:g} s") from None
