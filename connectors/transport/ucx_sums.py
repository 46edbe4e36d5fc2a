"""Checksums of a peer's bytes, computed over there by the thread that serves us.

Owns the questions that wait for their turn: one message of a connection is on its way at a time, each about as many
runs as fit. Belongs to the transport's thread; nothing waits.
"""

from __future__ import annotations

import collections

import numpy as np

from blockferry.connectors.base import TransportError
from blockferry.connectors.transport import native_packing as native
from blockferry.connectors.transport import ucx_api as api
from blockferry.connectors.transport.native_messages import MAX_RUNS, MAX_SUMMED_BYTES
from blockferry.connectors.transport.ucx_packing import Runs
from blockferry.connectors.transport.ucx_row import ANSWER_S, Phase, UcxRow

_MODULUS = 1 << 64


class UcxSum:
    """A sum that is being computed. Mutated by UcxSums only."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.num_asked = self.num_summed = 0  # runs
        self.total = 0

    @property
    def value(self) -> int | None:
        """The sum once all is summed."""
        return self.total if self.num_summed == len(self.runs.lengths) else None


class UcxSums:
    """One connection's checksums."""

    def __init__(self, ucp: api.Ucp, row: UcxRow) -> None:
        self._ucp = ucp
        self._row = row
        self._queue: collections.deque[UcxSum] = collections.deque()

    def begin(self, runs: Runs) -> UcxSum:
        """Queue a sum. Raises TransportError."""
        if self._row.phase is Phase.CLOSED:
            self._row.open()
        elif self._row.phase is Phase.READY:
            self._row.refresh()
        one = UcxSum(runs)
        if one.value is None:
            self._queue.append(one)
        return one

    def advance(self) -> bool:
        """Carry on; True when something moved. Raises TransportError."""
        if not self._queue:
            return False
        if self._row.phase is Phase.REFUSED:
            raise TransportError("checksum: the peer serves too many connections; use fewer, or no checksums")
        if self._row.phase is not Phase.READY:
            return False
        has_moved = self._take()
        if self._queue and self._row.words[native.SUM_STATE] == native.NO_SUM:
            self._ask(self._queue[0])
        elif self._queue and self._row.idle_s > ANSWER_S:
            self._row.begin_look()
        return has_moved

    def _take(self) -> bool:
        words = self._row.words
        if words[native.SUM_STATE] != native.HAS_SUM:
            return False
        words[native.SUM_STATE] = native.NO_SUM
        one = self._queue[0]
        one.total = (one.total + int(words[native.SUM_VALUE])) % _MODULUS
        one.num_summed = one.num_asked
        if one.value is not None:
            self._queue.popleft()
        self._row.touch()
        return True

    def _ask(self, one: UcxSum) -> None:
        first = one.num_summed
        lengths = one.runs.lengths[first : first + MAX_RUNS]
        num_runs = int(np.searchsorted(np.cumsum(lengths), MAX_SUMMED_BYTES, side="right"))
        status = native.ask_sum(self._row.link, one.runs.remote, one.runs.lengths, first, first + num_runs)
        self._ucp.check(status, "asking for a checksum")
        if status != api.IN_PROGRESS:
            one.num_asked = first + num_runs
            self._row.touch()
