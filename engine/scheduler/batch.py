"""The rows of one instance as the scheduler sees them: phases, limits, steps in flight, and when a row is reusable.

Owns every per-row scheduling array (structure of arrays, indexed by row) and the row free list. Tokens and
computed counts are RowTable's, blocks are the ledger's; nothing here touches either.

    Life of a row (one sequence's stay on one instance):

                     admit                     last chunk planned
            FREE ------------> PREFILL ---------------------------> DECODE
             |                     | |                               | |
             | reserve             | | preempted                     | | preempted, samples in flight
             v                     | +----------+     +--------------+ |
          INCOMING                 |            v     v                |
             |                     |           DRAINING                | last sample planned
             | bytes arrived       |              |                    v
             +------> DECODE       +-----------------------------> PARKED   waits for results, then perhaps
                      last chunk planned, nothing left to sample       |    for its transfer; keeps its blocks
            FREE -- admit, blocks come from a tier --> LOADING -- they are there --> PREFILL
                                                  |                    |
            FREE <---- last step that names the row retired ---- ENDED <---- stop, limit, abort, drained,
                                                                             handed over (from any phase)

A row that speculates stays in DECODE while drafts in flight may bring its last token, or not.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.request import BoolArray, Int32Array, Int64Array
from blockferry.engine.scheduler.sequence import Sequence

NO_STOP = -1  # pads stop_ids; no token has this id


class Phase(enum.IntEnum):
    """What a row is doing; see the module's drawing."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    PARKED = 3
    INCOMING = 4
    DRAINING = 5
    ENDED = 6
    LOADING = 7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """The constants of some rows, gathered once; arrays of one length [R]."""

    rows: Int32Array
    handles: Int64Array
    limits: Int32Array
    min_tokens: Int32Array
    stop_ids: tuple[Int32Array, ...]  # one array per place in the rows' lists, NO_STOP where a list is shorter

    def keep(self, chosen: BoolArray) -> RowView:
        """The view of the chosen rows."""
        return RowView(
            rows=self.rows[chosen],
            handles=self.handles[chosen],
            limits=self.limits[chosen],
            min_tokens=self.min_tokens[chosen],
            stop_ids=tuple(stop_ids[chosen] for stop_ids in self.stop_ids),
        )

    def find_stops(self, token_ids: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Which rows' new token is one of their stop ids, with min_tokens reached. All arrays [R]."""
        is_stop = np.zeros(len(token_ids), np.bool_)
        for stop_ids in self.stop_ids:
            is_stop |= stop_ids == token_ids
        if is_stop.any():
            is_stop &= num_tokens >= self.min_tokens
        return is_stop

    def find_stop_ids(self, token_ids: Int32Array, index: NDArray[np.intp]) -> NDArray[np.intp]:
        """Which of token_ids [T] are stop ids of their rows, those at index [T], however early."""
        is_stop = np.zeros(len(token_ids), np.bool_)
        for stop_ids in self.stop_ids:
            is_stop |= stop_ids.take(index) == token_ids
        return is_stop.nonzero()[0]


class Batch:
    """Row arrays of one instance. Mutated by that instance's Scheduler only."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.phase: NDArray[np.int8] = np.zeros(max_rows, np.int8)
        self.handle: Int64Array = np.zeros(max_rows, np.int64)
        self.limit: Int32Array = np.zeros(max_rows, np.int32)  # num_tokens at which the row has all it may have
        self.min_tokens: Int32Array = np.zeros(max_rows, np.int32)  # num_tokens below which stop ids do not count
        self.num_stop_ids: Int32Array = np.zeros(max_rows, np.int32)
        self.stop_ids: NDArray[np.int32] = np.full((0, max_rows), NO_STOP, np.int32)  # [max num_stop_ids, rows]
        self.num_ended = 0  # rows ended since the start; unchanged means that no row ended
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.freed_rows: list[int] = []  # rows that the workers must forget with the next plan
        self._rank_order: Int64Array = np.zeros(max_rows, np.int64)
        self._rank_arrival: NDArray[np.float64] = np.zeros(max_rows, np.float64)
        self._rank_priority: Int64Array = np.zeros(max_rows, np.int64)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._quarantine: collections.deque[tuple[int, int]] = collections.deque()  # (last step, row)
        self._prefill_rows: list[int] = []  # by rank
        self._decode_rows: Int32Array = np.empty(0, np.int32)  # by rank
        self._decode_view: RowView | None = None
        self._num_draining = 0

    # rows: taking, ending, reusing

    @property
    def num_occupied(self) -> int:
        """Rows that hold a sequence."""
        return self.max_rows - len(self._free_rows) - len(self._quarantine)

    @property
    def num_free_rows(self) -> int:
        """Rows that start() could give away now."""
        return len(self._free_rows)

    @property
    def num_holding(self) -> int:
        """Rows that hold blocks."""
        return self.num_occupied - self._num_draining

    @property
    def num_running(self) -> int:
        """Rows that may be planned or preempted."""
        return len(self._prefill_rows) + len(self._decode_rows)

    @property
    def num_prefilling(self) -> int:
        """Rows in PREFILL."""
        return len(self._prefill_rows)

    @property
    def num_draining(self) -> int:
        """Preempted rows that still wait for samples in flight."""
        return self._num_draining

    def peek_free_row(self) -> int | None:
        """The row that start() would be given next, or None while all are in use or in quarantine."""
        return self._free_rows[-1] if self._free_rows else None

    def start(self, row: int, sequence: Sequence, phase: Phase) -> None:
        """Give peek_free_row()'s row to a sequence."""
        assert self._free_rows[-1] == row, (row, self._free_rows[-1:])
        self._free_rows.pop()
        ticket = sequence.ticket
        sequence.row = row
        self.sequences[row] = sequence
        self.handle[row] = ticket.handle
        self.limit[row] = sequence.limit
        self.min_tokens[row] = ticket.num_prompt_tokens + ticket.sampling.min_tokens
        self._set_stop_ids(row, ticket.sampling.stop_token_ids)
        self._rank_order[row] = ticket.rank.order
        self._rank_arrival[row] = ticket.rank.arrival_s
        self._rank_priority[row] = ticket.rank.priority
        self.set_phase(row, phase)

    def end(self, row: int, *, last_step: int, retired_step: int) -> None:
        """Take the row from its sequence; it is reusable once last_step, the last one planned, has retired."""
        sequence = self.sequences[row]
        assert sequence is not None, row
        self.set_phase(row, Phase.ENDED)
        sequence.row = None
        self.sequences[row] = None
        self.num_ended += 1
        self._quarantine.append((last_step, row))
        self.retire(retired_step)

    def retire(self, step_id: int) -> None:
        """Make rows reusable that ended when step_id, or an earlier one, was the last one planned."""
        while self._quarantine and self._quarantine[0][0] <= step_id:
            _, row = self._quarantine.popleft()
            self.phase[row] = Phase.FREE
            self._free_rows.append(row)

    # phases and order

    def set_phase(self, row: int, phase: Phase) -> None:
        """Move a row to another phase, keeping the orders of prefill and decode rows."""
        before = int(self.phase[row])
        self.phase[row] = phase
        self._num_draining += (phase == Phase.DRAINING) - (before == Phase.DRAINING)
        if before == Phase.PREFILL:
            self._prefill_rows.remove(row)
        elif before == Phase.DECODE:
            self._decode_rows = self._decode_rows[self._decode_rows != row]
        if phase == Phase.PREFILL:
            bisect.insort(self._prefill_rows, row, key=self.rank)
        elif phase == Phase.DECODE:
            self._insert_decode_row(row)

    def park(self, rows: Int32Array) -> None:
        """Move decode rows to PARKED: all their samples are planned."""
        self.phase[rows] = Phase.PARKED
        self._decode_rows = self._decode_rows[self.phase[self._decode_rows] == Phase.DECODE]

    def rank(self, row: int) -> tuple[int, float, int]:
        """Sort key of a row; smaller is older and wins."""
        return int(self._rank_priority[row]), float(self._rank_arrival[row]), int(self._rank_order[row])

    def decode_rows(self) -> Int32Array:
        """Rows in DECODE, oldest first, int32 [num decode rows]. Not to be written."""
        return self._decode_rows

    def prefill_rows(self) -> list[int]:
        """Rows in PREFILL, oldest first."""
        return list(self._prefill_rows)

    def rows_in(self, phase: Phase) -> list[int]:
        """Rows in a phase, by row number."""
        return [int(row) for row in np.flatnonzero(self.phase == phase)]

    def youngest_running(self) -> int | None:
        """The row that preemption takes first, or None."""
        last_rows = self._prefill_rows[-1:] + [int(row) for row in self._decode_rows[-1:]]
        return max(last_rows, key=self.rank, default=None)

    # constants of rows

    def view(self, rows: Int32Array) -> RowView:
        """What is constant of rows [R] as long as they last; kept while decode_rows() does not change."""
        if rows is not self._decode_rows:
            return self._make_view(rows)
        if self._decode_view is None or self._decode_view.rows is not rows:
            self._decode_view = self._make_view(rows)
        return self._decode_view

    def _make_view(self, rows: Int32Array) -> RowView:
        num_stop_ids = self.num_stop_ids.take(rows).max(initial=0)
        return RowView(
            rows=rows,
            handles=self.handle.take(rows),
            limits=self.limit.take(rows),
            min_tokens=self.min_tokens.take(rows),
            stop_ids=tuple(stop_ids.take(rows) for stop_ids in self.stop_ids[:num_stop_ids]),
        )

    def _set_stop_ids(self, row: int, stop_token_ids: tuple[int, ...]) -> None:
        num_missing = len(stop_token_ids) - len(self.stop_ids)
        if num_missing > 0:
            padding = np.full((num_missing, self.max_rows), NO_STOP, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, padding])
        self.stop_ids[:, row] = NO_STOP
        self.stop_ids[: len(stop_token_ids), row] = stop_token_ids
        self.num_stop_ids[row] = len(stop_token_ids)

    def _insert_decode_row(self, row: int) -> None:
        rows = self._decode_rows
        rank = self.rank(row)
        low, high = 0, len(rows)
        while low < high:
            middle = (low + high) // 2
            if self.rank(int(rows[middle])) < rank:
                low = middle + 1
            else:
                high = middle
        self._decode_rows = np.concatenate([rows[:low], np.array([row], np.int32), rows[low:]])
