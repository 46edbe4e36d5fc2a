"""The rows of one instance as the scheduler sees them: phases, limits, steps in flight, and when a row is reusable.

Owns every per-row scheduling array (structure of arrays, indexed by row) and the row free list. Tokens and
computed counts are RowTable's, blocks are the ledger's; nothing here touches either.

    Life of a row (one sequence's stay on one instance):

                     admit                     last chunk planned
            FREE ------------> PREFILL ---------------------------> DECODE
             |                  ^  | |                               | |
             | reserve          |  | | preempted                     | | preempted, samples in flight
             v        recompute |  | +----------+     +--------------+ |
          INCOMING -------------+  |            v     v                |
             |                     |           DRAINING                | last sample planned
             | bytes arrived       |              |                    v
             +------> DECODE       +-----------------------------> PARKED   waits for results, then perhaps
                      last chunk planned, nothing left to sample       |    for its transfer; keeps its blocks
                                                  |                    |
            FREE <---- last step that names the row retired ---- ENDED <---- stop, limit, abort, drained,
                                                                             handed over (from any phase)
"""

from __future__ import annotations

import collections
import enum

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.request import BoolArray, Int32Array, Int64Array
from blockferry.engine.scheduler.sequence import Sequence

NO_STOP = -1  # pads stop_ids; no token has this id
NO_STEP = -1  # last_step of a row that no plan has named


class Phase(enum.IntEnum):
    """What a row is doing; see the module's drawing."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    PARKED = 3
    INCOMING = 4
    DRAINING = 5
    ENDED = 6


class Batch:
    """Row arrays of one instance. Mutated by that instance's Scheduler only."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.phase: NDArray[np.int8] = np.zeros(max_rows, np.int8)
        self.handle: Int64Array = np.zeros(max_rows, np.int64)
        self.limit: Int32Array = np.zeros(max_rows, np.int32)  # num_tokens at which the row has all it may have
        self.num_left: Int32Array = np.zeros(max_rows, np.int32)  # samples that may still be planned
        self.num_in_flight: Int32Array = np.zeros(max_rows, np.int32)  # samples planned, not yet arrived
        self.last_step: Int64Array = np.full(max_rows, NO_STEP, np.int64)  # last plan that names the row
        self.min_tokens: Int32Array = np.zeros(max_rows, np.int32)  # num_tokens below which stop ids do not count
        self.num_stop_ids: Int32Array = np.zeros(max_rows, np.int32)
        self.stop_ids: NDArray[np.int32] = np.full((0, max_rows), NO_STOP, np.int32)  # [max num_stop_ids, rows]
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.freed_rows: list[int] = []  # rows that the workers must forget with the next plan
        self._rank_order: Int64Array = np.zeros(max_rows, np.int64)
        self._rank_arrival: NDArray[np.float64] = np.zeros(max_rows, np.float64)
        self._rank_priority: Int64Array = np.zeros(max_rows, np.int64)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._quarantine: collections.deque[int] = collections.deque()
        self._prefill_rows: list[int] = []  # by rank
        self._decode_rows: Int32Array = np.empty(0, np.int32)  # by rank
        self._num_draining = 0

    # rows: taking, ending, reusing

    @property
    def num_occupied(self) -> int:
        """Rows that hold a sequence."""
        return self.max_rows - len(self._free_rows) - len(self._quarantine)

    @property
    def num_running(self) -> int:
        """Rows that may be planned or preempted."""
        return len(self._prefill_rows) + len(self._decode_rows)

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
        num_tokens = len(sequence.token_ids)
        sequence.row = row
        self.sequences[row] = sequence
        self.handle[row] = ticket.handle
        self.limit[row] = sequence.limit
        self.num_left[row] = sequence.limit - num_tokens
        self.num_in_flight[row] = 0
        self.last_step[row] = NO_STEP
        self.min_tokens[row] = ticket.num_prompt_tokens + ticket.sampling.min_tokens
        self._set_stop_ids(row, ticket.sampling.stop_token_ids)
        self._rank_order[row] = ticket.rank.order
        self._rank_arrival[row] = ticket.rank.arrival_s
        self._rank_priority[row] = ticket.rank.priority
        self.set_phase(row, phase)

    def end(self, row: int, *, retired_step: int) -> None:
        """Take the row from its sequence; it is reusable once the last step that names it has retired."""
        sequence = self.sequences[row]
        assert sequence is not None, row
        self.set_phase(row, Phase.ENDED)
        sequence.row = None
        self.sequences[row] = None
        self._quarantine.append(row)
        self.retire(retired_step)

    def retire(self, step_id: int) -> None:
        """Make rows reusable whose last step is at most step_id."""
        for _ in range(len(self._quarantine)):
            row = self._quarantine.popleft()
            if self.last_step[row] > step_id:
                self._quarantine.append(row)
                continue
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
            self._prefill_rows.append(row)
            self._prefill_rows.sort(key=self.rank)
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

    # endings

    def find_stops(self, rows: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Which rows' new token is one of their stop ids, with min_tokens reached. All arrays [R]."""
        is_stop = np.zeros(len(rows), np.bool_)
        for stop_ids in self.stop_ids[: self.num_stop_ids[rows].max(initial=0)]:
            is_stop |= stop_ids[rows] == token_ids
        if is_stop.any():
            is_stop &= num_tokens >= self.min_tokens[rows]
        return is_stop

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
