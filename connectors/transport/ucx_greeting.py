"""Greetings over UCX: proof that the process behind an endpoint is the one that a memory key is of.

UCX reaches whoever listens at an address. Where a process has died and another one has its port, UCX connects, flushes
without complaint, and a write over TCP goes to whatever lies at that virtual address of the other process. So every
new connection first exchanges one active message, and nothing is posted before the answer:

    connect:  HELLO nonce of the key, number  ->  is it my nonce?
              number, yes or no               <-

Owns the process's nonce and the active message handler. Belongs to the transport's thread: answers are handled inside
ucp_worker_progress.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import logging
import os
import struct
import weakref
from ctypes import byref, c_void_p

from blockferry.connectors.base import TransportError
from blockferry.connectors.transport import ucx_api as api

logger = logging.getLogger(__name__)

NONCE_BYTES = 16
_AM_ID = 0x42
_HELLO, _YES, _NO = b"h", b"y", b"n"
_FORMAT = f"<cQ{NONCE_BYTES}s"
_NUM_HEADERS_KEPT = 1024  # UCX may read a header after the send has returned, until the endpoint is up


class Greeting:
    """One connection's question. Mutated by the greeter only."""

    def __init__(self) -> None:
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

    def __init__(self, ucp: api.Ucp, worker: c_void_p) -> None:
        """Register the handler. Raises TransportError."""
        self.nonce = os.urandom(NONCE_BYTES)
        self._ucp = ucp
        self._numbers = itertools.count(1)
        self._asked: weakref.WeakValueDictionary[int, Greeting] = weakref.WeakValueDictionary()
        self._headers: collections.deque[ctypes.Array[ctypes.c_char]] = collections.deque(maxlen=_NUM_HEADERS_KEPT)
        self._handler = api.AmCallback(self._receive)  # UCX holds it as long as the worker lives
        param = api.AmHandlerParam(
            field_mask=api.AM_HANDLER_FIELD_ID | api.AM_HANDLER_FIELD_CB, id=_AM_ID, cb=self._handler
        )
        status = ucp.ucp_worker_set_am_recv_handler(worker, byref(param))
        ucp.check(status, "ucp_worker_set_am_recv_handler")

    def greet(self, endpoint: c_void_p, nonce: bytes) -> Greeting:
        """Ask the process behind a new endpoint whether it has `nonce`. Raises TransportError."""
        number, greeting = next(self._numbers), Greeting()
        self._asked[number] = greeting
        self._ucp.check(self._send(endpoint.value, _HELLO, number, nonce), "greeting")
        return greeting

    def _receive(
        self, _arg: int | None, header: int, header_length: int, _data: int | None, _length: int, param: int
    ) -> int:
        """An active message has come; called by UCX. Anything but a greeting is dropped."""
        if header_length != struct.calcsize(_FORMAT):
            logger.warning("dropped a UCX message of %d bytes, which is no greeting", header_length)
            return api.OK
        kind, number, nonce = struct.unpack(_FORMAT, ctypes.string_at(header, header_length))
        if kind != _HELLO:
            greeting = self._asked.get(number)
            if greeting is not None:
                greeting.answer(kind)
            return api.OK
        asker = api.AmRecvParam.from_address(param)
        if asker.recv_attr & api.AM_RECV_ATTR_FIELD_REPLY_EP:
            # whoever cannot be answered asks in vain, and notices that himself
            self._send(asker.reply_ep, _YES if nonce == self.nonce else _NO, number, nonce)
        return api.OK

    def _send(self, endpoint: int | None, kind: bytes, number: int, nonce: bytes) -> int:
        """Post one message; UCX's status."""
        header = ctypes.create_string_buffer(struct.pack(_FORMAT, kind, number, nonce), struct.calcsize(_FORMAT))
        self._headers.append(header)
        param = api.RequestParam(op_attr_mask=api.OP_ATTR_FIELD_FLAGS, flags=api.AM_SEND_FLAG_REPLY)
        pointer = self._ucp.ucp_am_send_nbx(endpoint, _AM_ID, header, len(header), None, 0, byref(param))
        status = api.pointer_status(pointer)
        if status == api.IN_PROGRESS:
            self._ucp.ucp_request_free(pointer)  # it still goes out
        return status
