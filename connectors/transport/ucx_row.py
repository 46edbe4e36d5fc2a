"""A connection's row at a peer's service: greeting it, sending it messages, looking at what it has done.

Owns the staging ring of messages and the local copy of the row. Belongs to the transport's thread; nothing waits.

    CLOSED -- open() --> GREETING -- the peer has a row for us --> READY -- refresh() after a long idle --> GREETING
                                  -- it has none ---------------> REFUSED

The peer answers no message: it counts in our row, a copy of which is asked for behind the messages it is about.
"""

from __future__ import annotations

import enum
import secrets
import time
from ctypes import c_void_p

import numpy as np

from blockferry.connectors.base import ByteArray, Int64Array, TransportError
from blockferry.connectors.transport import native_messages as messages
from blockferry.connectors.transport import native_packing as native
from blockferry.connectors.transport import native_service as service
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.pool_secret import TOKEN_WORDS
from blockferry.connectors.transport.ucx_look import Look
from blockferry.connectors.transport.ucx_service import PoolKey, UcxService

_MAX_GREETINGS = 8  # looks for our row before we do without
ANSWER_S = 0.5  # who waits longer for an answer looks whether the peer refused the question
_REFRESH_S = service.STALE_S / 2


class Phase(enum.Enum):
    """Whether the peer takes messages."""

    CLOSED = enum.auto()
    GREETING = enum.auto()
    READY = enum.auto()
    REFUSED = enum.auto()


class UcxRow:
    """Our row at one peer. `link` is the address of what native_packing's loops work on."""

    def __init__(self, ucp: api.Ucp, own: UcxService, *, endpoint: c_void_p, local_base: int, key: PoolKey) -> None:
        self.words: Int64Array = np.zeros(native.LINK_WORDS, np.int64)
        self.link: int = self.words.ctypes.data
        self.phase = Phase.CLOSED
        self._ucp = ucp
        self._own_service = own
        self._endpoint = endpoint
        self._key = key
        self._token = key.pool_secret.token
        self._staging: ByteArray = np.empty(0, np.uint8)
        self._rows: Int64Array = np.zeros((key.num_rows, service.ROW_BYTES // messages.WORD), np.int64)
        self._is_looking = False
        self._num_greetings = 0
        self._used_s = 0.0
        self.num_done = 0  # messages the peer had done at the last look
        self.words[native.CALLER] = own.caller
        self.words[native.ENDPOINT] = endpoint.value or 0
        self.words[native.LOCAL_BASE] = local_base
        self.words[native.PEER_REGION] = key.region

    # --- life

    def open(self) -> None:
        """Make staging and ask for a row. Raises TransportError."""
        record = self._own_service.add_record(self.words)
        if record is None:
            self.phase = Phase.REFUSED
            return
        self._staging = np.empty(messages.NUM_SLOTS * messages.SLOT_BYTES, np.uint8)
        self.words[native.STAGING] = self._staging.ctypes.data
        self.words[native.OWN_RECORD] = record
        self.words[native.OWN_CONNECTION] = secrets.randbits(62) | 1
        self._greet()

    def refresh(self) -> None:
        """Greet again before first use after a long idle, lest the peer has given our row away."""
        is_late = self.idle_s > _REFRESH_S and not self._is_looking
        if is_late and native.free_slot(self.link) == 0:
            self._greet()

    def touch(self) -> None:
        """Note that the row was used."""
        self._used_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since it was used."""
        return time.monotonic() - self._used_s

    def advance(self) -> bool:
        """Carry a greeting or a look on; True when it moved.

        Raises TransportError when the peer refused a message or gave our row away.
        """
        if not self._has_looked():
            return False
        if self.phase is Phase.GREETING:
            self._settle()
            return True
        if self._own[service.ROW_CONNECTION] != self.words[native.OWN_CONNECTION]:
            raise TransportError("the peer gave our row to another connection")
        if self._own[service.ROW_REFUSED]:
            raise TransportError("the peer refused a message of this connection; its log says why")
        before, self.num_done = self.num_done, int(self._own[service.ROW_DONE])
        return self.num_done > before

    def _settle(self) -> None:
        """Find the row that the peer gave us, or look again."""
        found = np.flatnonzero(self._rows[:, service.ROW_CONNECTION] == self.words[native.OWN_CONNECTION])
        if len(found):
            self._enter(int(found[0]))
        elif self._num_greetings < _MAX_GREETINGS:
            self._num_greetings += 1
            self._begin_look(0, self._key.num_rows)
        else:
            self.phase = Phase.REFUSED

    def say_goodbye(self) -> None:
        """Take no answers any more; give the row back if the peer can still hear it."""
        self._own_service.remove_record(self.words)
        if self.phase is Phase.READY and native.free_slot(self.link) == 0:
            native.send(self.link, messages.BYE, messages.HEADER_BYTES, 0)

    def release(self) -> None:
        """Free what the endpoint used, once it is gone."""
        self._own_service.remove_record(self.words)
        self._own_service.looks.forget(int(self.words[native.OWN_CONNECTION]))
        for request in self.words[native.REQUESTS : native.READS].tolist():
            if request:
                self._ucp.ucp_request_free(request)
        self.phase = Phase.CLOSED

    # --- looking

    def begin_look(self) -> None:
        """Read the row, behind every message sent so far. Raises TransportError."""
        if not self._is_looking:
            self._begin_look(int(self.words[native.OWN_ROW]), 1)

    @property
    def _own(self) -> Int64Array:
        own: Int64Array = self._rows[int(self.words[native.OWN_ROW])]
        return own

    def _greet(self) -> None:
        self.phase = Phase.GREETING
        self._num_greetings = 0
        slot = int(self.words[native.NUM_SENT]) % messages.NUM_SLOTS
        begin = slot * messages.SLOT_BYTES + messages.PIECES_BYTES + messages.HEADER_BYTES
        self._staging[begin:].view(np.int64)[:TOKEN_WORDS] = self._token
        self._ucp.check(native.send(self.link, messages.HELLO, messages.HELLO_BYTES, 0), "hello")
        self._begin_look(0, self._key.num_rows)

    def _enter(self, row: int) -> None:
        is_first = self._used_s == 0
        if not is_first and (row != self.words[native.OWN_ROW] or self._rows[row, service.ROW_DONE] == 0):
            raise TransportError("the peer gave our row to another connection while this one was idle")
        self.words[native.OWN_ROW] = row
        self.phase = Phase.READY
        self.touch()

    def _begin_look(self, row: int, num_rows: int) -> None:
        connection = int(self.words[native.OWN_CONNECTION])
        self._own_service.looks.ask(
            Look(endpoint=self._endpoint, number=connection, token=self._token),
            offset=row * service.ROW_BYTES,
            num_bytes=num_rows * service.ROW_BYTES,
            target=self._rows,
        )
        self._is_looking = True

    def _has_looked(self) -> bool:
        if not self._is_looking or not self._own_service.looks.has_seen(int(self.words[native.OWN_CONNECTION])):
            return False
        self._is_looking = False
        return True
