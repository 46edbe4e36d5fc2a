"""A remote region behind a UCX endpoint: posting, flushing, failing.

Owns one endpoint and its memory key, from creation by UcxTransport to end_close(). Belongs to the transport's
thread. Where the peer's pool is mapped into this process (ucp_rkey_ptr), bytes are copied at once by a compiled
loop; else a compiled loop posts one operation per run.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from ctypes import byref, c_void_p

import msgpack
import numpy as np

from blockferry.connectors.base import ByteArray, Int64Array, Region, TransportError
from blockferry.connectors.transport import native_loops as loops
from blockferry.connectors.transport import ucx_api as api


class UcxRegion:
    """Memory registered with UCX. Dies with its transport: its view must not be used after close()."""

    def __init__(self, *, handle: c_void_p, view: ByteArray, remote_key: bytes) -> None:
        self.handle = handle
        self.base = view.ctypes.data
        self._view = view
        self._key: bytes = msgpack.packb([self.base, view.nbytes, remote_key])

    @property
    def view(self) -> ByteArray:
        """The whole region as bytes."""
        return self._view

    @property
    def key(self) -> bytes:
        """Base address, size and UCX's packed key."""
        return self._key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UcxAccess:
    """What a peer needs of its transport."""

    ucp: api.Ucp
    worker: c_void_p
    close: Callable[[UcxPeer], None]


class UcxFlush:
    """A flush in progress; owned by its peer, which frees it when it closes."""

    def __init__(self, peer: UcxPeer, request: int | None) -> None:
        self._peer = peer
        self.request = request  # None: complete

    def poll(self) -> bool:
        """True when every operation has landed. Raises TransportError."""
        self._peer.check_alive("flush")
        if self.request is None:
            return True
        status = self._peer.request_status(self.request)
        if status == api.IN_PROGRESS:
            return False
        self._peer.forget(self)
        self._peer.check(status, "flush")
        return True


class UcxPeer:
    """A remote region behind an endpoint."""

    def __init__(self, access: UcxAccess, *, endpoint: c_void_p, local: Region, remote_key: bytes) -> None:
        self._ucp = access.ucp
        self._close = access.close
        self._endpoint = endpoint
        self._flushes: set[UcxFlush] = set()
        self._failure = ""
        self._is_closed = False
        self._local_base, self._local_bytes = local.view.ctypes.data, local.view.nbytes
        self._remote_base, self._remote_bytes, packed = _unpack_key(remote_key)
        self._rkey = c_void_p()
        self.check(self._ucp.ucp_ep_rkey_unpack(endpoint, packed, byref(self._rkey)), "unpacking the memory key")
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

    @property
    def is_direct(self) -> bool:
        """True when the peer's pool is mapped into this process."""
        return self._mapped_base is not None

    def write(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post writes; copies at once where the peer is direct. Raises TransportError, ValueError."""
        local_offsets, remote_offsets, lengths = self._checked(local_offsets, remote_offsets, lengths)
        if self._mapped_base is not None:
            loops.copy_runs(self._mapped_base, self._local_base, remote_offsets, local_offsets, lengths)
        else:
            self._post("ucp_put_nbx", local_offsets, remote_offsets, lengths)

    def read(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post reads; copies at once where the peer is direct. Raises TransportError, ValueError."""
        local_offsets, remote_offsets, lengths = self._checked(local_offsets, remote_offsets, lengths)
        if self._mapped_base is not None:
            loops.copy_runs(self._local_base, self._mapped_base, local_offsets, remote_offsets, lengths)
        else:
            self._post("ucp_get_nbx", local_offsets, remote_offsets, lengths)

    def flush(self) -> UcxFlush:
        """Begin a flush; also what brings the connection up. Raises TransportError."""
        self.check_alive("flush")
        pointer = self._ucp.ucp_ep_flush_nbx(self._endpoint, byref(self._param))
        status = api.pointer_status(pointer)
        self.check(status, "flush")
        flush = UcxFlush(self, pointer if status == api.IN_PROGRESS else None)
        if flush.request is not None:
            self._flushes.add(flush)
        return flush

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
        param = api.RequestParam(op_attr_mask=api.OP_ATTR_FIELD_FLAGS, flags=api.EP_CLOSE_FLAG_FORCE)
        pointer: int | None = self._ucp.ucp_ep_close_nbx(self._endpoint, byref(param))
        return pointer if api.pointer_status(pointer) == api.IN_PROGRESS else None

    def end_close(self) -> None:
        """Release what the endpoint used, once it is gone."""
        for flush in list(self._flushes):
            self.forget(flush)
        self._ucp.ucp_rkey_destroy(self._rkey)
        self._mapped_base = None

    def _checked(
        self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        self.check_alive("post")
        _check_bounds("local", local_offsets, lengths, self._local_bytes)
        _check_bounds("remote", remote_offsets, lengths, self._remote_bytes)
        local_offsets, remote_offsets, lengths = map(np.ascontiguousarray, (local_offsets, remote_offsets, lengths))
        return local_offsets, remote_offsets, lengths

    def _post(self, function: str, local: Int64Array, remote: Int64Array, lengths: Int64Array) -> None:
        self._handles[loops.FUNCTION] = self._ucp.address_of(function)
        self.check(loops.post_runs(self._handles, local, remote, lengths), function)


def _unpack_key(remote_key: bytes) -> tuple[int, int, bytes]:
    try:
        base, num_bytes, packed = msgpack.unpackb(remote_key)
    except (ValueError, TypeError) as error:
        raise TransportError(f"a memory key of {len(remote_key)} bytes is not one of UCX pools: {error}") from error
    return base, num_bytes, packed


def _check_bounds(side: str, offsets: Int64Array, lengths: Int64Array, num_bytes: int) -> None:
    if len(offsets) != len(lengths):
        raise ValueError(f"{len(offsets)} {side} offsets for {len(lengths)} lengths; pass one each")
    if len(lengths) and (
        int(offsets.min()) < 0 or int(lengths.min()) < 0 or int((offsets + lengths).max()) > num_bytes
    ):
        raise ValueError(
            f"{side} runs reach from {int(offsets.min())} to {int((offsets + lengths).max())}, outside the region's "
            f"{num_bytes} bytes; the block ids do not belong to this pool"
        )
