"""Greetings over UCX: proof that the process behind an endpoint is the one that a memory key is of.

UCX reaches whoever listens at an address. Where a process has died and another one has its port, UCX connects, flushes
without complaint, and a write over TCP goes to whatever lies at that virtual address of the other process. So every
new connection first exchanges one active message, and nothing is posted before the answer:

    connect:  HELLO number, tag of it  ->  was it made with my secret?
              YES number, tag of it    <-  (or NO, without one)

The tags are made with the secret that the memory key carries, so both ends prove that they have it and neither shows
it. Numbers are random: an answer that nobody asked for is dropped. A stranger is told NO, for that is what a peer must
hear that was left over from this process's predecessor, but only _MAX_REFUSALS times in all: who does not read what he
is told would fill our memory with it.

Owns the active message handler. Belongs to the transport's thread: answers are handled inside ucp_worker_progress.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import secrets
import struct
import weakref
from ctypes import byref, c_void_p

from blockferry.connectors.base import TransportError
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.pool_secret import TAG_BYTES, PoolSecret

logger = logging.getLogger(__name__)

_AM_ID = 0x42
_HELLO, _YES, _NO = b"h", b"y", b"n"
_FORMAT = f"<cQ{TAG_BYTES}s"
_NUM_HEADERS_KEPT = 1024  # UCX may read a header after the send has returned, until the endpoint is up
_MAX_REFUSALS = 1024


_Headers = collections.deque[ctypes.Array[ctypes.c_char]]


class Greeting:
    """One connection's question. Mutated by the greeter only."""

    def __init__(self, secret: PoolSecret) -> None:
        self.secret = secret
        self._answer = b""

    def is_answered(self) -> bool:
        """Whether the right process has answered. Raises TransportError when another one has."""
        if self._answer == _NO:
            raise TransportError(
                "greeting: another process listens at the peer's address, so the peer was replaced; connect to it "
                "anew, with the endpoint that the new process tells"
            )
        return self._answer == _YES

    def answer(self, kind: bytes) -> None:
        """Take the peer's word."""
        self._answer = kind


class Greeter:
    """Asks and answers greetings of one UCX worker, which must outlive it."""

    def __init__(self, ucp: api.Ucp, worker: c_void_p, secret: PoolSecret) -> None:
        """Register the handler; `secret` is this process's. Raises TransportError."""
        self.num_refused = 0
        self._secret = secret
        self._ucp = ucp
        self._asked: weakref.WeakValueDictionary[int, Greeting] = weakref.WeakValueDictionary()
        # apart, so that no number of answers takes the memory of a question away
        self._questions = _Headers(maxlen=_NUM_HEADERS_KEPT)
        self._answers = _Headers(maxlen=_NUM_HEADERS_KEPT)
        self._handler = api.AmCallback(self._receive)  # UCX holds it as long as the worker lives
        param = api.AmHandlerParam(
            field_mask=api.AM_HANDLER_FIELD_ID | api.AM_HANDLER_FIELD_CB, id=_AM_ID, cb=self._handler
        )
        status = ucp.ucp_worker_set_am_recv_handler(worker, byref(param))
        ucp.check(status, "ucp_worker_set_am_recv_handler")

    def greet(self, endpoint: c_void_p, secret: PoolSecret) -> Greeting:
        """Ask the process behind a new endpoint whether it has `secret`. Raises TransportError."""
        number, greeting = secrets.randbits(64), Greeting(secret)
        self._asked[number] = greeting
        message = struct.pack(_FORMAT, _HELLO, number, secret.tag(_HELLO, number))
        self._ucp.check(self._send(endpoint.value, message, self._questions), "greeting")
        return greeting

    def _receive(
        self, _arg: int | None, header: int, header_length: int, _data: int | None, _length: int, param: int
    ) -> int:
        """An active message has come; called by UCX. Anything but a greeting is dropped."""
        if header_length != struct.calcsize(_FORMAT):
            self._refuse("it is no greeting")
            return api.OK
        kind, number, tag = struct.unpack(_FORMAT, ctypes.string_at(header, header_length))
        if kind == _HELLO:
            self._answer(param, number, tag)
        else:
            self._take_answer(kind, number, tag)
        return api.OK

    def _answer(self, param: int, number: int, tag: bytes) -> None:
        is_known = self._secret.is_tag(tag, _HELLO, number)
        if not is_known:
            self._refuse("it does not know the secret of this process's pools")
            if self.num_refused > _MAX_REFUSALS:
                return
        asker = api.AmRecvParam.from_address(param)
        if asker.recv_attr & api.AM_RECV_ATTR_FIELD_REPLY_EP:
            # whoever cannot be answered asks in vain, and notices that himself
            kind, shown = (_YES, self._secret.tag(_YES, number)) if is_known else (_NO, b"")
            self._send(asker.reply_ep, struct.pack(_FORMAT, kind, number, shown), self._answers)

    def _take_answer(self, kind: bytes, number: int, tag: bytes) -> None:
        greeting = self._asked.get(number)
        if greeting is None:
            return
        if kind == _YES and not greeting.secret.is_tag(tag, _YES, number):
            self._refuse("it says yes without knowing the secret")
            kind = _NO
        greeting.answer(kind)

    def _refuse(self, reason: str) -> None:
        self.num_refused += 1
        if self.num_refused == 1:
            logger.warning("a greeting over UCX was refused: %s; further ones are only counted", reason)

    def _send(self, endpoint: int | None, message: bytes, kept: _Headers) -> int:
        """Post one message; UCX's status."""
        header = ctypes.create_string_buffer(message, len(message))
        kept.append(header)
        param = api.RequestParam(op_attr_mask=api.OP_ATTR_FIELD_FLAGS, flags=api.AM_SEND_FLAG_REPLY)
        pointer = self._ucp.ucp_am_send_nbx(endpoint, _AM_ID, header, len(header), None, 0, byref(param))
        status = api.pointer_status(pointer)
        if status == api.IN_PROGRESS:
            self._ucp.ucp_request_free(pointer)  # it still goes out
        return status
