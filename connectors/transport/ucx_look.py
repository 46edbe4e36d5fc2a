"""Who looks at which peer's rows, and what may be looked at here. native_look moves the bytes.

Owns the memory of native_look. One per transport; all its methods belong to the transport's thread.
"""

from __future__ import annotations

import collections
import dataclasses
from ctypes import byref, c_void_p

import numpy as np

from blockferry.connectors.base import ByteArray, Int64Array, TransportError
from blockferry.connectors.transport import native_look as native
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.pool_secret import TOKEN_WORDS

_NUM_QUESTIONS_KEPT = 1024  # UCX may read a question after the send has returned, until the endpoint is up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Who looks at whose rows."""

    endpoint: c_void_p
    number: int  # the asker's secret, not 0
    token: tuple[int, int]  # of the peer


class UcxLooks:
    """Questions about rows, asked and answered."""

    def __init__(self, ucp: api.Ucp, worker: c_void_p, *, caller: int, rows: ByteArray, token: tuple[int, int]) -> None:
        """`rows` may be looked at by who shows the token; `caller` is native_messages'.

        Raises TransportError when UCX refuses a handler.
        """
        self._ucp = ucp
        self._answers = np.empty(native.NUM_ANSWERS * (native.HEAD_BYTES + rows.nbytes), np.uint8)
        self._state = np.zeros(native.STATE_WORDS, np.int64)
        self._state[native.CALLER] = caller
        self._state[native.ROWS], self._state[native.ROWS_BYTES] = rows.ctypes.data, rows.nbytes
        self._state[native.ANSWERS] = self._answers.ctypes.data
        self._state[native.TOKEN : native.TOKEN + TOKEN_WORDS] = token
        self._askers = self._state[native.ASKERS :].reshape(-1, 4)
        self._places: dict[int, int] = {}  # in _askers, by number
        self._questions: collections.deque[Int64Array] = collections.deque(maxlen=_NUM_QUESTIONS_KEPT)
        self._param = api.RequestParam(
            op_attr_mask=api.OP_ATTR_FIELD_FLAGS, flags=api.AM_SEND_FLAG_EAGER | api.AM_SEND_FLAG_REPLY
        )
        for number, handler in native.handlers().items():
            ucp.handle_messages(worker, number, handler.address, self._state.ctypes.data)

    def ask(self, look: Look, *, offset: int, num_bytes: int, target: Int64Array) -> None:
        """Copy a peer's rows from offset on to the same place in `target`; one question at a time for each number.

        Raises TransportError.
        """
        number = look.number
        place = self._places.get(number)
        if place is None:
            place = self._places[number] = self._free_place()
        self._askers[place] = number, target.ctypes.data, target.nbytes, 0
        question = np.array([number, offset, num_bytes, *look.token], np.int64)
        self._questions.append(question)
        pointer = self._ucp.ucp_am_send_nbx(
            look.endpoint.value, native.LOOK_ID, None, 0, question.ctypes.data, question.nbytes, byref(self._param)
        )
        status = api.pointer_status(pointer)
        if status == api.IN_PROGRESS:
            self._ucp.ucp_request_free(pointer)  # it still goes out
        self._ucp.check(status, "looking at the row")

    def has_seen(self, number: int) -> bool:
        """Whether the answer to the last question has come."""
        place = self._places.get(number)
        return place is not None and bool(self._askers[place, native.HAS_SEEN])

    def forget(self, number: int) -> None:
        """Land no answer any more: the target may go."""
        place = self._places.pop(number, None)
        if place is not None:
            self._askers[place] = 0

    def _free_place(self) -> int:
        free = np.flatnonzero(self._askers[:, native.NUMBER] == 0)
        if not len(free):
            raise TransportError(f"more than {native.NUM_ASKERS} connections look at their peers; open fewer")
        return int(free[0])
