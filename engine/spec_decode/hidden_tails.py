"""Hidden states of each row's last tokens, for modules that will have to compute them again.

Module j reads token i + 1 + j at position i. At a row's last j positions that token was a draft, or unknown; once it is
known, the module's keys and values there must be computed anew, and with them those of the modules before it, from the
model's own hidden state. One module never needs that.

Legend: R rows of the plan, T tokens of the pass, W tokens kept per row, E hidden.
"""

from __future__ import annotations

import numpy as np
import torch

from blockferry.engine.request import Int32Array
from blockferry.engine.spec_decode.final_tokens import TokenOrder
from blockferry.engine.wire import StepPlan


class HiddenTails:
    """By row number; one owner, the proposer. Memory is taken with the first step."""

    def __init__(self, *, max_rows: int, num_kept: int) -> None:
        self._num_kept = num_kept
        self._ends = np.zeros(max_rows, np.int32)  # position behind the last token that is kept
        self._counts = np.zeros(max_rows, np.int32)
        self._hidden_WE: torch.Tensor | None = None  # [max_rows, W, E], the last token last

    def num_before(self, plan: StepPlan) -> Int32Array:
        """int32 [R]: tokens kept of each row that directly precede what the plan computes of it."""
        if not self._num_kept:
            return np.zeros(len(plan.rows), np.int32)
        self._counts[[new_row.row for new_row in plan.new_rows]] = 0
        return np.where(self._ends[plan.rows] == plan.num_computed, self._counts[plan.rows], 0).astype(np.int32)

    def exchange(self, rows_R: Int32Array, order: TokenOrder, hidden_TE: torch.Tensor) -> torch.Tensor:
        """The pass's hidden states with what was kept in its places; keeps each row's last ones instead."""
        if not self._num_kept:
            return hidden_TE
        if self._hidden_WE is None:
            shape = (len(self._ends), self._num_kept, hidden_TE.shape[1])
            self._hidden_WE = torch.zeros(shape, dtype=hidden_TE.dtype, device=hidden_TE.device)
        for token in np.flatnonzero(order.num_before_T).tolist():
            hidden_TE[token] = self._hidden_WE[order.rows_T[token], self._num_kept - order.num_before_T[token]]
        for place, row in enumerate(rows_R.tolist()):
            tokens = np.flatnonzero(order.plan_row_T == place)[-self._num_kept :]
            self._counts[row], self._ends[row] = len(tokens), order.positions_T[tokens[-1]] + 1
            self._hidden_WE[row, self._num_kept - len(tokens) :] = hidden_TE[torch.from_numpy(tokens)]
        return hidden_TE
