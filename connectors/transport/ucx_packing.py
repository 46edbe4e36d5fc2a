"""Runs towards one peer, packed into messages instead of posted one by one.

Owns the runs that wait for staging and the marks that wait for them. Belongs to the transport's thread; nothing
waits: advance() carries on where staging was full.

    writes    a message carries as many runs as fit; the peer's handler scatters them and counts it in our row
    reads     a message asks the peer for runs; its handler sends their bytes in another, which our handler scatters

In flight are at most the slots of native_messages, whatever was queued.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from blockferry.connectors.base import Int64Array
from blockferry.connectors.transport import native_packing as native
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.ucx_row import ANSWER_S, Phase, UcxRow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs between the local and the remote region."""

    local: Int64Array
    remote: Int64Array
    lengths: Int64Array


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Mark:
    """A point in the stream of queued runs."""

    num_writes: int  # items of the stream before it
    num_reads: int
    num_messages: int | None = None  # that the peer must have done; None: writes before it are not all sent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Reads whose answers are on their way; the link uses the arrays until they have landed."""

    runs: Runs
    num_answers: int  # of the connection, when these have landed


class UcxPacking:
    """One connection's packed runs."""

    def __init__(self, ucp: api.Ucp, row: UcxRow) -> None:
        self._ucp = ucp
        self._row = row
        self._writes: collections.deque[Runs] = collections.deque()
        self._reads: collections.deque[Runs] = collections.deque()
        self._asked: collections.deque[_Asked] = collections.deque()  # of which nothing is left to ask for
        self._num_written = self._num_read = 0  # items sent, items landed
        self._num_messages = 0  # up to the last one with writes
        self._marks: collections.deque[Mark] = collections.deque()

    @property
    def is_settling(self) -> bool:
        """Whether it is not known yet if the peer takes packed runs."""
        return self._row.phase is Phase.GREETING

    def write(self, runs: Runs) -> None:
        """Queue writes and send what staging has room for. Raises TransportError."""
        self._prepare()
        self._writes.append(runs)
        self.advance()

    def read(self, runs: Runs) -> None:
        """Queue reads and ask for what slots have room for. Raises TransportError."""
        self._prepare()
        self._reads.append(runs)
        self.advance()

    def mark(self) -> Mark:
        """The point behind everything queued so far."""
        num_reads = self._num_read + len(self._asked) + len(self._reads)
        mark = Mark(num_writes=self._num_written + len(self._writes), num_reads=num_reads)
        self._marks.append(mark)
        self._stamp_marks()
        return mark

    def has_landed(self, mark: Mark) -> bool:
        """Whether everything before the mark has."""
        return self._is_done(mark) and mark.num_reads <= self._num_read

    def advance(self) -> bool:
        """Carry on; True when something moved. Raises TransportError."""
        if self._row.phase is not Phase.READY:
            return False
        words = self._row.words
        before = (words[native.NUM_SENT], words[native.NUM_LANDED])
        self._send_writes()
        self._move_reads()
        self._look()
        has_moved = before != (words[native.NUM_SENT], words[native.NUM_LANDED])
        if has_moved:
            self._row.touch()
        return has_moved

    def give_up(self, write: Callable[[Runs], None], read: Callable[[Runs], None]) -> None:
        """Hand what is queued to others: the peer takes no packed runs."""
        while self._writes:
            write(self._writes.popleft())
            self._num_written += 1
        while self._reads:
            read(self._reads.popleft())
            self._num_read += 1
        self._stamp_marks()

    def _prepare(self) -> None:
        if self._row.phase is Phase.CLOSED:
            self._row.open()
        elif self._row.phase is Phase.READY and not (self._writes or self._reads or self._asked or self._marks):
            self._row.refresh()

    def _send_writes(self) -> None:
        while self._writes:
            runs = self._writes[0]
            status = native.pump_writes(self._row.link, runs.local, runs.remote, runs.lengths)
            self._ucp.check(status, "sending packed writes")
            self._num_messages = int(self._row.words[native.NUM_PACKED])
            if status == api.IN_PROGRESS:
                break
            self._writes.popleft()
            self._row.words[native.WRITE_RUN] = 0
            self._num_written += 1
        self._stamp_marks()

    def _move_reads(self) -> None:
        words = self._row.words
        while self._reads:
            runs = self._reads[0]
            words[native.READ_LOCAL] = runs.local.ctypes.data
            words[native.READ_LENGTHS] = runs.lengths.ctypes.data
            status = native.pump_reads(self._row.link, runs.remote, runs.lengths)
            self._ucp.check(status, "asking for packed reads")
            if status == api.IN_PROGRESS:
                break
            self._asked.append(_Asked(runs=self._reads.popleft(), num_answers=int(words[native.NUM_ASKED])))
            words[native.READ_RUN] = 0
        while self._asked and self._asked[0].num_answers <= words[native.NUM_LANDED]:
            self._asked.popleft()
            self._num_read += 1

    def _look(self) -> None:
        """Have the row looked at where a mark waits for what the peer has done, or reads wait long."""
        while self._marks and self.has_landed(self._marks[0]):
            self._marks.popleft()
        is_late = bool(self._reads or self._asked) and self._row.idle_s > ANSWER_S
        if is_late or any(mark.num_messages is not None and not self._is_done(mark) for mark in self._marks):
            self._row.begin_look()

    def _is_done(self, mark: Mark) -> bool:
        return mark.num_messages is not None and mark.num_messages <= self._row.num_done

    def _stamp_marks(self) -> None:
        """Say of marks whose writes are all sent what the peer must have done."""
        for mark in self._marks:
            if mark.num_messages is None and mark.num_writes <= self._num_written:
                mark.num_messages = self._num_messages
