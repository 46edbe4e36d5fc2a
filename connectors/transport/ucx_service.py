"""Where peers' messages arrive: rows and slots of all connections, and the pools that messages may touch.

Owns the memory of native_service, whose compiled handler UCX calls while the transfer thread makes progress, and
reports what it refused. One per transport; all its methods belong to the transport's thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import time
from ctypes import c_void_p

import msgpack
import numpy as np

from blockferry.connectors.base import ByteArray, Int64Array, TransportError
from blockferry.connectors.transport import native_messages as messages
from blockferry.connectors.transport import native_service as native
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.pool_secret import TOKEN_WORDS, PoolSecret
from blockferry.connectors.transport.ucx_look import UcxLooks

logger = logging.getLogger(__name__)

NUM_ROWS = 64  # connections that may send messages at once; others post their runs one by one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolKey:
    """What a peer knows of a pool and of the service beside it."""

    base: int
    num_bytes: int
    memory_key: bytes
    secret: bytes = dataclasses.field(repr=False)  # of the process, see pool_secret
    region: int  # index among the owner's regions
    num_rows: int

    @property
    def pool_secret(self) -> PoolSecret:
        """What to prove to the process that owns the pool."""
        return PoolSecret(key=self.secret)

    def pack(self) -> bytes:
        """As bytes for unpack()."""
        packed: bytes = msgpack.packb(list(dataclasses.astuple(self)))
        return packed

    @classmethod
    def unpack(cls, key: bytes) -> PoolKey:
        """Raises TransportError for bytes that are no such key."""
        try:
            values = msgpack.unpackb(key)
            made = cls(**dict(zip((field.name for field in dataclasses.fields(cls)), values, strict=True)))
        except (ValueError, TypeError) as error:
            raise TransportError(f"a memory key of {len(key)} bytes is not one of UCX pools: {error}") from error
        numbers = (made.base, made.num_bytes, made.region, made.num_rows)
        keys = (made.memory_key, made.secret)
        if not all(type(number) is int for number in numbers) or not all(type(one) is bytes for one in keys):
            raise TransportError(f"a memory key of {len(key)} bytes has fields of the wrong type")
        return made


def make_rows() -> ByteArray:
    """Memory for a service's rows."""
    return np.zeros(NUM_ROWS * native.ROW_BYTES, np.uint8)


class UcxService:
    """Serves peers' messages, and looks at `rows`; keep both as long as the worker lives."""

    def __init__(self, ucp: api.Ucp, worker: c_void_p, rows: ByteArray, secret: PoolSecret) -> None:
        """Only who shows the token of `secret` gets a row. Raises TransportError when UCX refuses the handler."""
        self._params = _request_params()
        self._caller = np.zeros(messages.CALLER_WORDS, np.int64)
        self._caller[messages.SEND] = ucp.address_of("ucp_am_send_nbx")
        self._caller[messages.CHECK] = ucp.address_of("ucp_request_check_status")
        self._caller[messages.FREE] = ucp.address_of("ucp_request_free")
        self._caller[messages.PROGRESS] = ucp.address_of("ucp_worker_progress")
        self._caller[messages.WORKER] = worker.value or 0
        for place, request_param in self._params.items():
            self._caller[place] = ctypes.addressof(request_param)
        self._slots = np.empty(NUM_ROWS * native.SLOTS_PER_ROW * messages.SLOT_BYTES, np.uint8)  # no page until used
        self._state = np.zeros(native.STATE_WORDS, np.int64)
        self._state[native.CALLER] = self.caller
        self._state[native.ROWS] = rows.ctypes.data
        self._state[native.NUM_ROWS] = NUM_ROWS
        self._state[native.SLOTS] = self._slots.ctypes.data
        self._state[native.TOKEN : native.TOKEN + TOKEN_WORDS] = secret.token
        self.looks = UcxLooks(ucp, worker, caller=self.caller, rows=rows, token=secret.token)
        self._has_reported = False
        ucp.handle_messages(worker, messages.AM_ID, native.handler().address, self._state.ctypes.data)

    @property
    def caller(self) -> int:
        """Address of a native_messages caller."""
        address: int = self._caller.ctypes.data
        return address

    def add_region(self, view: ByteArray) -> int:
        """Let messages touch a region; its index. Raises TransportError for one too many."""
        index = int(self._state[native.NUM_REGIONS])
        if index == native.MAX_REGIONS:
            raise TransportError(f"a transport has at most {native.MAX_REGIONS} regions; open another one")
        entry = native.REGIONS + 2 * index
        self._state[entry], self._state[entry + 1] = view.ctypes.data, view.nbytes
        self._state[native.NUM_REGIONS] = index + 1
        return index

    def add_record(self, link: Int64Array) -> int | None:
        """Let answers reach a link's reads; the record's index, or None where all are taken."""
        free = np.flatnonzero(self._records == 0)
        if not len(free):
            return None
        self._records[free[0]] = link.ctypes.data
        return int(free[0])

    def remove_record(self, link: Int64Array) -> None:
        """Let no answer reach a link any more."""
        self._records[self._records == link.ctypes.data] = 0

    def tick(self) -> None:
        """Tell the handler the time, and the log the first message that it refused."""
        self._state[native.NOW_S] = int(time.monotonic())
        if not self._has_reported and self.num_refused:
            self._has_reported = True
            reason = native.REASONS[int(self._state[native.LAST_REASON])]
            logger.warning("a peer's message was refused: %s; further ones are only counted", reason)

    @property
    def num_refused(self) -> int:
        """Messages that were refused so far."""
        return int(self._state[native.NUM_REFUSED])

    @property
    def _records(self) -> Int64Array:
        return self._state[native.RECORDS :]


def _request_params() -> dict[int, api.RequestParam]:
    """How messages are sent: from one buffer, from pieces, or asking for an answer. By their place in the caller."""
    attributes, eager = api.OP_ATTR_FIELD_FLAGS, api.AM_SEND_FLAG_EAGER
    return {
        messages.WHOLE_PARAM: api.RequestParam(op_attr_mask=attributes, flags=eager),
        messages.PIECES_PARAM: api.RequestParam(
            op_attr_mask=attributes | api.OP_ATTR_FIELD_DATATYPE, flags=eager, datatype=api.DATATYPE_IOV
        ),
        messages.REPLY_PARAM: api.RequestParam(op_attr_mask=attributes, flags=eager | api.AM_SEND_FLAG_REPLY),
    }
