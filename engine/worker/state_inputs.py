"""Where the states of one cache group lie that a step reads and writes, drafts' included; and what is to be remembered.

Owns, of each group of recurrent layers, the blocks of states that are not where the ledger would look for them.

    table of a row      | .. | running | draft 1 | .. | draft k |      running: that of the step's last known token
    pass 0 writes              ^
    pass j writes                        ^ j, from what pass j - 1 wrote

After a drafts of a row were accepted, the block of draft a has its state, whatever column the ledger moves that to: the
row's next step starts from there. That step writes the running column again, so that nothing is left to remember.

Legend: R rows in the step's order, T tokens, t tokens and r rows of one pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.models.state_ops import StateMetadata
from blockferry.engine.request import Int32Array, Int64Array
from blockferry.engine.rows import places_in_runs
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.page_views import PageViews

_NOWHERE = 0  # the null block: no state is moved there
_NO_PAIRS: NDArray[np.int32] = np.empty((0, 2), np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """Rows of a step in its order; all arrays [R]. Rows with one known token come first, decode rows before others."""

    rows_R: Int32Array
    computed_R: Int32Array
    known_lens_R: Int32Array  # tokens to compute that are no drafts, at least 1
    num_drafts_R: Int32Array  # these follow them

    def pick(self, chosen: Int64Array) -> StateRows:
        """Some of the rows, by index."""
        return StateRows(
            rows_R=self.rows_R[chosen],
            computed_R=self.computed_R[chosen],
            known_lens_R=self.known_lens_R[chosen],
            num_drafts_R=self.num_drafts_R[chosen],
        )


class StateBlocks:
    """One group's states on one rank. Called by the worker's model thread."""

    def __init__(self, table: BlockTable, block_size: int) -> None:
        """`table` is the group's, kept up to date by its owner; block_size is in tokens."""
        self._table = table
        self._block_size = block_size
        self._moved: Int32Array = np.full(len(table.num_blocks), _NOWHERE, np.int32)  # by row: of an accepted draft

    def forget(self, row: int) -> None:
        """The row ends, or starts."""
        self._moved[row] = _NOWHERE

    def metadata(self, rows: StateRows, device: torch.device) -> StateMetadata:
        """What kernels need to know of a step."""
        first = self._first_pass(rows, device)
        if not np.count_nonzero(rows.num_drafts_R):  # cheaper than any()
            return first
        first_draft_R = np.cumsum(rows.known_lens_R + rows.num_drafts_R, dtype=np.int64) - rows.num_drafts_R
        tokens_t = np.repeat(first_draft_R - rows.known_lens_R, rows.known_lens_R) + places_in_runs(rows.known_lens_R)
        later = tuple(self._later_passes(rows, first_draft_R, device))
        return dataclasses.replace(first, tokens_t=_to(tokens_t, device), later_passes=later)

    def settle(self, rows: StateRows, num_accepted_R: Int32Array) -> NDArray[np.int32]:
        """A step is computed and so many drafts of its rows are accepted: remember where their states are now.

        Returns what must be copied before the next step, [n, 2] of (source, target), no target being a source: the
        ledger may let others find the state at the end of the running column, which drafts went past.
        """
        self._moved[rows.rows_R] = _NOWHERE  # a step writes the usual column
        accepting = num_accepted_R.nonzero()[0]
        if not len(accepting):
            return _NO_PAIRS
        rows, num_accepted_R = rows.pick(accepting), num_accepted_R[accepting]
        running_R = self._running(rows)
        self._moved[rows.rows_R] = self._blocks(rows, running_R + num_accepted_R)
        num_to_end_R = (running_R + 1) * self._block_size - (rows.computed_R + rows.known_lens_R)
        passing = ((num_to_end_R > 0) & (num_to_end_R <= num_accepted_R)).nonzero()[0]
        rows, running_R, num_to_end_R = rows.pick(passing), running_R[passing], num_to_end_R[passing]
        return np.stack((self._blocks(rows, running_R + num_to_end_R), self._blocks(rows, running_R)), axis=1)

    def _first_pass(self, rows: StateRows, device: torch.device) -> StateMetadata:
        """Of all known tokens: they move a row's state from the block of its last one to that of its new last one."""
        is_fresh_R = rows.computed_R == 0
        source_R = self._blocks(rows, np.maximum(rows.computed_R - 1, 0) // self._block_size)
        moved_R = self._moved[rows.rows_R]
        if np.count_nonzero(moved_R):
            source_R = np.where(moved_R == _NOWHERE, source_R, moved_R)
        query_start_R1 = np.zeros(len(rows.rows_R) + 1, np.int32)
        np.cumsum(rows.known_lens_R, out=query_start_R1[1:])
        return StateMetadata(
            num_rows=len(rows.rows_R),
            num_decode_rows=int(np.count_nonzero(rows.known_lens_R == 1)),
            num_tokens=int(query_start_R1[-1]),
            query_start_R1=_to(query_start_R1, device),
            source_R=_to(source_R.astype(np.int64), device),
            target_R=_to(self._blocks(rows, self._running(rows)).astype(np.int64), device),
            is_fresh_R=_to(is_fresh_R, device),
            query_lens=rows.known_lens_R.tolist(),
            is_fresh=is_fresh_R.tolist(),
        )

    def _later_passes(
        self, rows: StateRows, first_draft_R: Int64Array, device: torch.device
    ) -> Iterator[StateMetadata]:
        """Pass j takes the states of rows with at least j drafts from column running + j - 1 to the one after it."""
        running_R = self._running(rows)
        for draft in range(1, int(rows.num_drafts_R.max()) + 1):
            chosen = (rows.num_drafts_R >= draft).nonzero()[0]
            mine, columns_r = rows.pick(chosen), running_R[chosen] + draft
            num_rows = len(chosen)
            yield StateMetadata(
                num_rows=num_rows,
                num_decode_rows=num_rows,
                num_tokens=num_rows,
                query_start_R1=_to(np.arange(num_rows + 1, dtype=np.int32), device),
                source_R=_to(self._blocks(mine, columns_r - 1).astype(np.int64), device),
                target_R=_to(self._blocks(mine, columns_r).astype(np.int64), device),
                is_fresh_R=_to(np.zeros(num_rows, np.bool_), device),
                query_lens=[1] * num_rows,
                is_fresh=[False] * num_rows,
                tokens_t=_to(first_draft_R[chosen] + (draft - 1), device),
            )

    def _running(self, rows: StateRows) -> Int32Array:
        """The column that takes the state after the last known token."""
        running_R: Int32Array = (rows.computed_R + rows.known_lens_R - 1) // self._block_size
        return running_R

    def _blocks(self, rows: StateRows, columns_R: Int32Array) -> Int32Array:
        block_ids: Int32Array = self._table.block_ids[rows.rows_R, columns_R]
        return block_ids


def settle_states(
    plan: StepPlan, num_tokens_S: Int32Array, states: Mapping[int, StateBlocks], views: PageViews
) -> None:
    """A plan is computed, and so many tokens came of each sampling row: bring the states of its rows, by group, there.

    On every rank, and before others may use what the step has computed.
    """
    for group, blocks in states.items():
        num_drafts_R = plan.num_drafts if len(plan.num_drafts) else np.zeros(len(plan.rows), np.int32)
        num_accepted_R = np.zeros(len(plan.rows), np.int32)
        num_accepted_R[plan.sample] = num_tokens_S - 1
        rows = StateRows(
            rows_R=plan.rows,
            computed_R=plan.num_computed,
            known_lens_R=plan.num_scheduled - num_drafts_R,
            num_drafts_R=num_drafts_R,
        )
        views.copy_blocks(group, blocks.settle(rows, num_accepted_R))


def _to(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
