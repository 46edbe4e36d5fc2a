"""Loopback transports that fail where they are told to, and whose peers may be reached as if over a network."""

from __future__ import annotations

import collections
import enum

from blockferry.connectors.base import TransportError
from blockferry.connectors.transport.loopback import LoopbackTransport


class Point(enum.Enum):
    """Where an operation may fail."""

    CONNECT = "connect"
    BEFORE_POST = "before post"
    AFTER_POST = "after post"
    FLUSH = "flush"
    LANDING = "landing"


class Faults:
    """How often each point is still to fail, after how many times that it works. Shared by the transports of a test."""

    def __init__(self, *, is_direct=True):
        self.is_direct = is_direct
        self._left = collections.Counter()
        self._spared = collections.Counter()
        self.num_failures = 0

    def fail(self, point, times=1, *, after=0):
        self._left[point], self._spared[point] = times, after

    def meet(self, point):
        if not self._left[point]:
            return
        if self._spared[point]:
            self._spared[point] -= 1
            return
        self._left[point] -= 1
        self.num_failures += 1
        raise TransportError(f"{point.value}: told to fail")


class FaultyFlush:
    def __init__(self, flush, faults):
        self._flush = flush
        self._faults = faults

    def poll(self):
        has_landed = self._flush.poll()
        self._faults.meet(Point.LANDING)
        return has_landed


class FaultyPeer:
    """A loopback peer that meets the points."""

    def __init__(self, peer, faults):
        self._peer = peer
        self._faults = faults
        self.is_direct = faults.is_direct

    def write(self, *runs):
        self._move(self._peer.write, runs)

    def read(self, *runs):
        self._move(self._peer.read, runs)

    def _move(self, verb, runs):
        self._faults.meet(Point.BEFORE_POST)
        verb(*runs)
        self._faults.meet(Point.AFTER_POST)

    def flush(self):
        self._faults.meet(Point.FLUSH)
        return FaultyFlush(self._peer.flush(), self._faults)

    def close(self):
        self._peer.close()


class FaultyTransport(LoopbackTransport):
    """A member of a fabric whose connections meet the points."""

    def __init__(self, fabric, faults):
        super().__init__(fabric)
        self._faults = faults

    def connect(self, address, *, local, remote_key):
        self._faults.meet(Point.CONNECT)
        return FaultyPeer(super().connect(address, local=local, remote_key=remote_key), self._faults)
