"""Which connections the scheduler's sockets refused: counted, and logged once for each source.

Owns the monitors of bound sockets. Used by the thread that owns the sockets. ZeroMQ refuses by itself whoever does not
know the secret; this only watches:

    ACCEPTED fd -> pending -- HANDSHAKE_SUCCEEDED --> known: not watched any more
                           -- DISCONNECTED fd ------> refused

A success does not say whose it is. It is taken to be the newest connection's, as a handshake takes a moment; where
strangers connect in that moment the count may be off by them, never the refusal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import struct
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

MAX_SOURCES = 256  # named in the log; others are counted only
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_UNKNOWN = "an address that left at once"


class Refusals:
    """Watches bound sockets for connections that end before they have proved that they know the secret."""

    def __init__(self, bound: Sequence[zmq.Socket[bytes]]) -> None:
        """Begin to watch; before anybody connects. The sockets' context closes the monitors."""
        self.monitors = [socket.get_monitor_socket(_EVENTS) for socket in bound]
        self.num_refused = 0
        self._pending: dict[zmq.Socket[bytes], dict[int, str]] = {monitor: {} for monitor in self.monitors}
        self._sources: set[str] = set()

    def read(self) -> None:
        """Take in what happened since the last call; never waits."""
        for monitor, pending in self._pending.items():
            with contextlib.suppress(zmq.Again):
                while True:
                    event = recv_monitor_message(monitor, zmq.NOBLOCK)
                    self._note(pending, event["event"], int(event["value"]))

    def _note(self, pending: dict[int, str], event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            pending[descriptor] = _peer_of(descriptor)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and pending:
            pending.popitem()
        elif event == zmq.EVENT_DISCONNECTED and descriptor in pending:
            self._refuse(pending.pop(descriptor))

    def _refuse(self, source: str) -> None:
        self.num_refused += 1
        if source not in self._sources and len(self._sources) < MAX_SOURCES:
            self._sources.add(source)
            logger.warning(
                "refused a connection from %s: it does not know the deployment's secret; more are only counted",
                source,
            )


def _peer_of(descriptor: int) -> str:
    """Who is at the other end, if he still is: it is ZeroMQ's descriptor, which may be closed already."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as peer:
            if peer.family == sockets.AF_UNIX:
                credentials = peer.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
                return "user {1} of this host".format(*struct.unpack("3i", credentials))
            return str(peer.getpeername()[0])
    except (OSError, IndexError):
        return _UNKNOWN
