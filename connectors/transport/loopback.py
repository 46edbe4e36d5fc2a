"""Transport within one process: the same contract as UCX, moved by NumPy.

For deployments whose instances share a process, and for tests: a fabric can sever or stall one of its members
to show what a dead or frozen peer does. Operations move when the poster calls progress(), never at once, so
that callers meet the same states as on a network.
"""

from __future__ import annotations

import collections
import dataclasses
import threading

import numpy as np

from blockferry.connectors.base import ByteArray, Int64Array, Region, TransportError
from blockferry.connectors.transport.native_checksum import sum_runs

_STALL_POLL_S = 0.005


class LoopbackFabric:
    """What joins the transports of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[bytes, ByteArray] = {}  # by region key
        self._addresses: set[bytes] = set()
        self._stalled: set[bytes] = set()
        self._num_keys = 0

    def sever(self, address: bytes) -> None:
        """Let a member die: its peers' operations fail from now on."""
        with self._lock:
            self._addresses.discard(address)

    def stall(self, address: bytes) -> None:
        """Freeze a member: operations towards it stay outstanding."""
        with self._lock:
            self._stalled.add(address)

    def resume(self, address: bytes) -> None:
        """Undo stall()."""
        with self._lock:
            self._stalled.discard(address)

    def join(self) -> bytes:
        """Address of a new member."""
        with self._lock:
            address = self._next_key()
            self._addresses.add(address)
            return address

    def add_region(self, view: ByteArray) -> bytes:
        """Key under which peers find a region."""
        with self._lock:
            key = self._next_key()
            self._views[key] = view
            return key

    def remove_region(self, key: bytes) -> None:
        """Forget a region."""
        with self._lock:
            self._views.pop(key, None)

    def find_region(self, key: bytes) -> ByteArray:
        """The region of a key. Raises TransportError."""
        with self._lock:
            if key not in self._views:
                raise TransportError(f"connect: no region has the key {key!r}")
            return self._views[key]

    def check_alive(self, address: bytes, operation: str) -> None:
        """Raises TransportError when the member is gone."""
        with self._lock:
            if address not in self._addresses:
                raise TransportError(f"{operation}: peer {address!r} is gone")

    def is_stalled(self, address: bytes) -> bool:
        """Whether operations towards the member stay outstanding."""
        with self._lock:
            return address in self._stalled

    def _next_key(self) -> bytes:
        self._num_keys += 1
        return b"loopback-%d" % self._num_keys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackRegion:
    """Memory known to the fabric."""

    view: ByteArray
    key: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One posted write() or read()."""

    src: ByteArray
    dst: ByteArray
    src_offsets: Int64Array
    dst_offsets: Int64Array
    lengths: Int64Array

    def run(self) -> None:
        runs = zip(self.src_offsets.tolist(), self.dst_offsets.tolist(), self.lengths.tolist(), strict=True)
        for src_offset, dst_offset, length in runs:
            self.dst[dst_offset : dst_offset + length] = self.src[src_offset : src_offset + length]


class LoopbackFlush:
    """Waits until as many operations have landed as were posted when it began."""

    def __init__(self, peer: LoopbackPeer, num_posted: int) -> None:
        self._peer = peer
        self._num_posted = num_posted

    def poll(self) -> bool:
        """True when they have. Raises TransportError."""
        return self._peer.has_landed(self._num_posted)


class LoopbackChecksum:
    """Sums when it is asked, unless the peer is stalled."""

    def __init__(self, peer: LoopbackPeer, offsets: Int64Array, lengths: Int64Array) -> None:
        self._peer = peer
        self._offsets = offsets
        self._lengths = lengths

    def poll(self) -> int | None:
        """The sum. Raises TransportError."""
        return self._peer.sum_now(self._offsets, self._lengths)


class LoopbackPeer:
    """Another region of this process."""

    is_direct = True

    def __init__(self, fabric: LoopbackFabric, address: bytes, *, local: ByteArray, remote: ByteArray) -> None:
        self._fabric = fabric
        self._address = address
        self._local = local
        self._remote = remote
        self._queue: collections.deque[_Copy] = collections.deque()
        self._num_posted = 0
        self._num_landed = 0
        self._is_closed = False

    def write(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post writes. Raises TransportError, ValueError."""
        self._post(
            _Copy(
                src=self._local,
                dst=self._remote,
                src_offsets=local_offsets,
                dst_offsets=remote_offsets,
                lengths=lengths,
            )
        )

    def read(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post reads. Raises TransportError, ValueError."""
        self._post(
            _Copy(
                src=self._remote,
                dst=self._local,
                src_offsets=remote_offsets,
                dst_offsets=local_offsets,
                lengths=lengths,
            )
        )

    def flush(self) -> LoopbackFlush:
        """Begin a flush of all posted operations."""
        self._check_open("flush")
        return LoopbackFlush(self, self._num_posted)

    def has_landed(self, num_posted: int) -> bool:
        """Whether the first num_posted operations have landed. Raises TransportError."""
        self._check_open("flush")
        return self._num_landed >= num_posted

    def checksum(self, remote_offsets: Int64Array, lengths: Int64Array) -> LoopbackChecksum:
        """Begin a checksum. Raises TransportError, ValueError."""
        self._check_open("checksum")
        _check_bounds("remote", self._remote, remote_offsets, lengths)
        return LoopbackChecksum(self, *(np.ascontiguousarray(one, np.int64) for one in (remote_offsets, lengths)))

    def sum_now(self, offsets: Int64Array, lengths: Int64Array) -> int | None:
        """The sum of runs of the remote region; None while the peer is stalled. Raises TransportError."""
        self._check_open("checksum")
        if self._fabric.is_stalled(self._address):
            return None
        return int(sum_runs(self._remote.ctypes.data, offsets, lengths))

    def close(self) -> None:
        """Drop what has not moved yet. Idempotent."""
        self._is_closed = True
        self._queue.clear()

    @property
    def is_busy(self) -> bool:
        """Whether posted operations have not moved yet."""
        return bool(self._queue)

    @property
    def num_bytes_queued(self) -> int:
        """Bytes that were posted and have not moved."""
        return sum(int(copy.lengths.sum()) for copy in self._queue)

    def advance(self) -> bool:
        """Move one posted operation; True when there was one."""
        if not self._queue or self._fabric.is_stalled(self._address):
            return False
        self._queue.popleft().run()
        self._num_landed += 1
        return True

    def _post(self, copy: _Copy) -> None:
        self._check_open("post")
        for side, view, offsets in (("source", copy.src, copy.src_offsets), ("target", copy.dst, copy.dst_offsets)):
            _check_bounds(side, view, offsets, copy.lengths)
        self._queue.append(copy)
        self._num_posted += 1

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise TransportError(f"{operation}: the connection is closed")
        self._fabric.check_alive(self._address, operation)


def _check_bounds(side: str, view: ByteArray, offsets: Int64Array, lengths: Int64Array) -> None:
    if len(offsets) != len(lengths):
        raise ValueError(f"{len(offsets)} {side} offsets for {len(lengths)} lengths; pass one each")
    if len(offsets) and (int(offsets.min()) < 0 or int((offsets + lengths).max()) > view.nbytes):
        raise ValueError(f"{side} runs lie outside the region's {view.nbytes} bytes")


class LoopbackTransport:
    """One member of a LoopbackFabric."""

    name = "loopback"

    def __init__(self, fabric: LoopbackFabric) -> None:
        self._fabric = fabric
        self._address = fabric.join()
        self._peers: list[LoopbackPeer] = []
        self._keys: list[bytes] = []
        self._woken = threading.Event()

    def allocate(self, num_bytes: int) -> LoopbackRegion:
        """Zeroed memory."""
        return self.adopt(np.zeros(num_bytes, np.uint8))

    def adopt(self, view: ByteArray) -> LoopbackRegion:
        """Memory of the caller."""
        key = self._fabric.add_region(view)
        self._keys.append(key)
        return LoopbackRegion(view=view, key=key)

    @property
    def address(self) -> bytes:
        """This member's address."""
        return self._address

    def connect(self, address: bytes, *, local: Region, remote_key: bytes) -> LoopbackPeer:
        """Find a peer's region. Raises TransportError."""
        self._fabric.check_alive(address, "connect")
        remote = self._fabric.find_region(remote_key)
        peer = LoopbackPeer(self._fabric, address, local=local.view, remote=remote)
        self._peers.append(peer)
        return peer

    @property
    def num_bytes_queued(self) -> int:
        """Bytes that were posted to all peers and have not moved."""
        return sum(peer.num_bytes_queued for peer in self._peers)

    def progress(self) -> bool:
        """Move one operation of every peer."""
        return sum(peer.advance() for peer in self._peers) > 0

    def wait(self, timeout_s: float) -> None:
        """Sleep until wake() or the timeout, or a moment where a stalled member may resume."""
        has_work = any(peer.is_busy for peer in self._peers)
        self._woken.wait(max(0.0, min(timeout_s, _STALL_POLL_S) if has_work else timeout_s))
        self._woken.clear()

    def wake(self) -> None:
        """End a wait(), or the next one. Thread-safe."""
        self._woken.set()

    def close(self) -> None:
        """Leave the fabric. Idempotent."""
        for peer in self._peers:
            peer.close()
        for key in self._keys:
            self._fabric.remove_region(key)
        self._fabric.sever(self._address)
