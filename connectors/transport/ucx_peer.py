"""A remote region behind a UCX endpoint: posting, flushing, failing.

Owns one endpoint and its memory key, from creation by UcxTransport to end_close(). Belongs to the transport's
thread. Nothing is posted before the process behind the endpoint has proved to be the key's (ucx_greeting.py). Where
the peer's pool is mapped into this process (ucp_rkey_ptr), bytes are copied at once by a compiled loop; else runs
shorter than pack_below_bytes travel in messages (ucx_packing.py), and a compiled loop posts one operation per other.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from ctypes import byref, c_void_p

import numpy as np
from numpy.typing import NDArray

from blockferry.connectors.base import ByteArray, Int64Array, Region, TransportError
from blockferry.connectors.transport import native_loops as loops
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.native_messages import MAX_SUMMED_BYTES
from blockferry.connectors.transport.ucx_greeting import Greeter
from blockferry.connectors.transport.ucx_packing import Mark, Runs, UcxPacking
from blockferry.connectors.transport.ucx_row import Phase, UcxRow
from blockferry.connectors.transport.ucx_service import PoolKey, UcxService
from blockferry.connectors.transport.ucx_sums import UcxSum, UcxSums


class UcxRegion:
    """Memory registered with UCX. Dies with its transport: its view must not be used after close()."""

    def __init__(self, *, view: ByteArray, key: bytes) -> None:
        self._view = view
        self._key = key

    @property
    def view(self) -> ByteArray:
        """The whole region as bytes."""
        return self._view

    @property
    def key(self) -> bytes:
        """A packed PoolKey."""
        return self._key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UcxAccess:
    """What a peer needs of its transport."""

    ucp: api.Ucp
    worker: c_void_p
    greeter: Greeter
    service: UcxService  # this process's own
    pack_below_bytes: float
    close: Callable[[UcxPeer], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """One write() or read(), checked."""

    is_write: bool
    runs: Runs


class UcxFlush:
    """A flush in progress; owned by its peer, which frees it when it closes."""

    def __init__(self, peer: UcxPeer) -> None:
        self._peer = peer
        self._mark: Mark | None = None  # None: nothing was ever packed
        self._has_begun = False
        self.request: int | None = None  # of UCX, once it has begun; None then: complete

    def poll(self) -> bool:
        """True when every operation has landed. Raises TransportError."""
        self._peer.check_alive("flush")
        if not self._has_begun and not self.begin():
            return False
        if self.request is not None:
            status = self._peer.request_status(self.request)
            if status == api.IN_PROGRESS:
                return False
            self._peer.forget(self)
            self._peer.check(status, "flush")
        return self._mark is None or self._peer.has_landed(self._mark)

    def begin(self) -> bool:
        """Hand the flush to UCX if all before it is posted or packed; whether it has begun. Raises TransportError."""
        if not self._peer.is_up():
            return False
        if self._mark is None:
            self._mark = self._peer.mark()
        if not self._peer.is_settling:
            self.request = self._peer.post_flush()
            self._has_begun = True
            self._peer.keep(self)
        return self._has_begun


class UcxChecksum:
    """A checksum in progress."""

    def __init__(self, peer: UcxPeer, runs: Runs) -> None:
        self._peer = peer
        self._runs = runs
        self._sum: UcxSum | None = None

    def poll(self) -> int | None:
        """The sum, once the peer has told it. Raises TransportError."""
        self._peer.check_alive("checksum")
        if self._sum is None:
            self._sum = self._peer.begin_sum(self._runs)
        return None if self._sum is None else self._sum.value


class UcxPeer:
    """A remote region behind an endpoint."""

    def __init__(self, access: UcxAccess, *, endpoint: c_void_p, local: Region, remote_key: bytes) -> None:
        self._ucp = access.ucp
        self._close = access.close
        self._endpoint = endpoint
        self._flushes: set[UcxFlush] = set()
        self._failure = ""
        self._is_closed = False
        self._is_dirty = True  # whether operations were posted since the last flush; the first brings the endpoint up
        key = PoolKey.unpack(remote_key)
        self._local_base, self._local_bytes = local.view.ctypes.data, local.view.nbytes
        self._remote_base, self._remote_bytes = key.base, key.num_bytes
        self._pack_below_bytes = access.pack_below_bytes
        self._row = UcxRow(access.ucp, access.service, endpoint=endpoint, local_base=self._local_base, key=key)
        self._packing = UcxPacking(access.ucp, self._row)
        self._sums = UcxSums(access.ucp, self._row)
        self._rkey = c_void_p()
        self.check(
            self._ucp.ucp_ep_rkey_unpack(endpoint, key.memory_key, byref(self._rkey)), "unpacking the memory key"
        )
        mapped = c_void_p()
        status = self._ucp.ucp_rkey_ptr(self._rkey, self._remote_base, byref(mapped))
        self._mapped_base = mapped.value if status == api.OK else None
        self._param = api.RequestParam()
        self._handles = np.zeros(loops.NUM_HANDLES, np.int64)
        self._handles[loops.ENDPOINT] = endpoint.value or 0
        self._handles[loops.LOCAL] = self._local_base
        self._handles[loops.REMOTE] = self._remote_base
        self._handles[loops.REMOTE_KEY] = self._rkey.value or 0
        self._handles[loops.PARAM] = ctypes.addressof(self._param)
        self._handles[loops.PROGRESS] = self._ucp.address_of("ucp_worker_progress")
        self._handles[loops.WORKER] = access.worker.value or 0
        self._handles[loops.FREE] = self._ucp.address_of("ucp_request_free")
        self._waiting: list[_Move] = []  # for the connection to be up
        self._greeting = access.greeter.greet(endpoint, key.pool_secret)

    @property
    def is_direct(self) -> bool:
        """True when the peer's pool is mapped into this process."""
        return self._mapped_base is not None

    @property
    def is_refused(self) -> bool:
        """True when the peer has no room for packed runs, which are then posted one by one."""
        return self._row.phase is Phase.REFUSED

    @property
    def is_settling(self) -> bool:
        """Whether it is not known yet if the peer takes packed runs."""
        return self._packing.is_settling

    def write(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post writes; copies at once where the peer is direct. Raises TransportError, ValueError."""
        self._post(_Move(is_write=True, runs=self._checked(local_offsets, remote_offsets, lengths)))

    def read(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post reads; copies at once where the peer is direct. Raises TransportError, ValueError."""
        self._post(_Move(is_write=False, runs=self._checked(local_offsets, remote_offsets, lengths)))

    def flush(self) -> UcxFlush:
        """Begin a flush; also what brings the connection up. Raises TransportError."""
        self.check_alive("flush")
        flush = UcxFlush(self)
        flush.begin()
        return flush

    def checksum(self, remote_offsets: Int64Array, lengths: Int64Array) -> UcxChecksum:
        """Have the peer sum what lies in its runs. Raises TransportError, ValueError."""
        runs = self._checked(np.zeros_like(lengths), remote_offsets, lengths)
        if len(lengths) and int(lengths.max()) > MAX_SUMMED_BYTES:
            raise ValueError(f"a run of {int(lengths.max())} bytes; a checksum takes at most {MAX_SUMMED_BYTES} in one")
        return UcxChecksum(self, runs)

    def begin_sum(self, runs: Runs) -> UcxSum | None:
        """Ask for a sum if the connection is up. Raises TransportError."""
        return self._sums.begin(runs) if self.is_up() else None

    def is_up(self) -> bool:
        """Whether the peer has proved to be itself; then all that waited for it is posted. Raises TransportError."""
        if not self._greeting.is_answered():
            return False
        waiting, self._waiting = self._waiting, []
        for move in waiting:
            self._run(move)
        return True

    def advance(self) -> bool:
        """Carry packed runs on; True when something moved. A failure is told to who polls next."""
        if self._is_closed or self._failure or self._row.phase is Phase.CLOSED:
            return False
        try:
            has_moved = self._row.advance()
            if self.is_refused:
                self._packing.give_up(self._post_writes, self._post_reads)
            return self._packing.advance() | self._sums.advance() | has_moved
        except TransportError as error:
            self.fail(str(error))
            return True

    def close(self) -> None:
        """Drop the connection within the transport's close_timeout_s. Idempotent."""
        self._close(self)

    def check(self, status: int, operation: str) -> None:
        """Raises TransportError for an error status."""
        if status < 0:
            raise TransportError(f"{operation}: {self._failure or self._ucp.describe(status)}")

    def check_alive(self, operation: str) -> None:
        """Raises TransportError when the connection is closed or UCX has reported it broken."""
        if self._is_closed or self._failure:
            raise TransportError(f"{operation}: {self._failure or 'the connection is closed'}")

    def fail(self, reason: str) -> None:
        """Note that UCX reported the connection broken."""
        self._failure = reason

    def has_landed(self, mark: Mark) -> bool:
        """Whether packed runs before the mark have landed."""
        return self._packing.has_landed(mark)

    def mark(self) -> Mark | None:
        """The point behind all packed runs so far; None where there never were any."""
        return None if self._row.phase is Phase.CLOSED else self._packing.mark()

    def post_flush(self) -> int | None:
        """UCX's request for a flush of what was posted; None: there is nothing to wait for. Raises TransportError."""
        if not self._is_dirty:
            return None
        self._is_dirty = False
        pointer: int | None = self._ucp.ucp_ep_flush_nbx(self._endpoint, byref(self._param))
        status = api.pointer_status(pointer)
        self.check(status, "flush")
        return pointer if status == api.IN_PROGRESS else None

    def keep(self, flush: UcxFlush) -> None:
        """Own a flush that is under way."""
        if flush.request is not None:
            self._flushes.add(flush)

    def request_status(self, request: int) -> int:
        """Status of a request of this peer."""
        status: int = self._ucp.ucp_request_check_status(request)
        return status

    def forget(self, flush: UcxFlush) -> None:
        """Free a completed flush."""
        self._ucp.ucp_request_free(flush.request)
        flush.request = None
        self._flushes.discard(flush)

    def begin_close(self) -> int | None:
        """Start to tear the endpoint down; the request to wait for, or None. Call once."""
        if self._is_closed:
            return None
        self._is_closed = True
        self._row.say_goodbye()
        param = api.RequestParam(op_attr_mask=api.OP_ATTR_FIELD_FLAGS, flags=api.EP_CLOSE_FLAG_FORCE)
        pointer: int | None = self._ucp.ucp_ep_close_nbx(self._endpoint, byref(param))
        return pointer if api.pointer_status(pointer) == api.IN_PROGRESS else None

    def end_close(self) -> None:
        """Release what the endpoint used, once it is gone."""
        for flush in list(self._flushes):
            self.forget(flush)
        self._waiting.clear()
        self._row.release()
        self._ucp.ucp_rkey_destroy(self._rkey)
        self._mapped_base = None

    @property
    def _packable_bytes(self) -> float:
        """Runs shorter than this are packed."""
        return 0 if self.is_refused else self._pack_below_bytes

    def _checked(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> Runs:
        self.check_alive("post")
        local, remote, lengths = (
            np.ascontiguousarray(array, np.int64) for array in (local_offsets, remote_offsets, lengths)
        )
        _check_bounds("local", local, lengths, self._local_bytes)
        _check_bounds("remote", remote, lengths, self._remote_bytes)
        return Runs(local=local, remote=remote, lengths=lengths)

    def _post(self, move: _Move) -> None:
        if self.is_up():
            self._run(move)
        else:
            self._waiting.append(move)

    def _run(self, move: _Move) -> None:
        runs = move.runs
        if self._mapped_base is None:
            is_small = runs.lengths < self._packable_bytes
            pack, post = (
                (self._packing.write, self._post_writes) if move.is_write else (self._packing.read, self._post_reads)
            )
            if is_small.any():
                pack(_select(runs, is_small))
            if not is_small.all():
                post(_select(runs, ~is_small))
        elif move.is_write:
            loops.stream_runs(self._mapped_base, self._local_base, runs.remote, runs.local, runs.lengths)
        else:
            loops.stream_runs(self._local_base, self._mapped_base, runs.local, runs.remote, runs.lengths)

    def _post_writes(self, runs: Runs) -> None:
        self._post_each("ucp_put_nbx", runs)

    def _post_reads(self, runs: Runs) -> None:
        self._post_each("ucp_get_nbx", runs)

    def _post_each(self, function: str, runs: Runs) -> None:
        self._is_dirty = True
        self._handles[loops.FUNCTION] = self._ucp.address_of(function)
        self.check(loops.post_runs(self._handles, runs.local, runs.remote, runs.lengths), function)


def _select(runs: Runs, is_chosen: NDArray[np.bool_]) -> Runs:
    if is_chosen.all():
        return runs
    return Runs(local=runs.local[is_chosen], remote=runs.remote[is_chosen], lengths=runs.lengths[is_chosen])


def _check_bounds(side: str, offsets: Int64Array, lengths: Int64Array, num_bytes: int) -> None:
    if len(offsets) != len(lengths):
        raise ValueError(f"{len(offsets)} {side} offsets for {len(lengths)} lengths; pass one each")
    if not loops.reach_within(offsets, lengths, num_bytes):
        raise ValueError(
            f"{side} runs reach from {int(offsets.min())} to {int((offsets + lengths).max())}, outside the region's "
            f"{num_bytes} bytes; the block ids do not belong to this pool"
        )
