"""Drafts by one module that predicts the token after the next (models/mtp.py), applied to itself for further ones.

What mtp.py does for chains of modules, in as little Python as the one module needs: it reads no drafts at the tokens
that a step computes, so its first pass is over the step as the model saw it, refused drafts included.

    computed   | ............ final | refused |    pass 0, over all of it: token i + 1 and hidden i give the 1st draft
    pass 1                   | one token |         from its own output at the last final token, 2nd draft
    pass 2                     | one token |       3rd draft

What it writes behind the final tokens is overwritten once those tokens are known.

Owns no pages. The model thread calls it, on all ranks of the last stage alike.

Legend: R rows of the plan, S sampling rows, W those that are being drafted for, T tokens of the step, K drafts to
propose, E hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.engine.models.mtp import Drafter
from blockferry.engine.request import Int32Array, Int64Array
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import VerifiedStep
from blockferry.engine.spec_decode.drafting import Drafting
from blockferry.engine.spec_decode.final_tokens import num_slots
from blockferry.engine.spec_decode.mtp import DraftPages
from blockferry.engine.worker.draft_compute import DraftCompute
from blockferry.engine.worker.inputs import one_token_metadata
from blockferry.engine.worker.paged_caches import GroupMetadata


class LoneModuleProposer:
    """See ModuleProposer. Of a rank that computes a module."""

    def __init__(
        self, drafter: Drafter, rows: RowTable, pages: DraftPages, compute: DraftCompute, *, min_chance: float
    ) -> None:
        """`rows` are the worker's. `compute` runs the drafter's module. min_chance: see drafting.py."""
        (self._group,) = pages.draft_groups(drafter)
        self._drafter = drafter
        self._rows = rows
        self._pages = pages
        self._compute = compute
        self._min_chance = min_chance

    def complete(self, step: VerifiedStep, drafts_SK: NDArray[np.int32]) -> None:
        """See ModuleProposer."""
        assert step.hidden_TE is not None, "modules are of the last stage"
        plan, inputs = step.plan, step.inputs
        # after a refused draft: any token, as that position is computed again once its own is known
        next_T = np.minimum(inputs.places_T + 1, self._rows.num_tokens[inputs.rows_T] - 1)
        next_ids_T = self._rows.token_ids[inputs.rows_T, next_T]
        output = self._compute.forward(
            0,
            self._to(next_ids_T),
            self._drafter.normed(step.hidden_TE),
            positions_T=inputs.positions_T,
            metadata=inputs.metadata,
        )
        drafting = Drafting(drafts_SK, min_chance=self._min_chance)
        if drafting.is_over(0):
            return
        num_final_S = step.num_final()[plan.sample]
        last_S = inputs.first_token_R[plan.sample] + num_final_S - 1
        drafting.put(0, self._drafter.best_tokens(output.normed_TE[self._to(last_S[drafting.places_W])]))
        end_S = plan.num_computed[plan.sample] + num_final_S
        hidden_WE = output.handed_on_TE[self._to(last_S[drafting.places_W])]
        self._go_on_alone(drafting, plan.rows[plan.sample], end_S, hidden_WE)

    def _go_on_alone(self, drafting: Drafting, rows_S: Int32Array, end_S: Int32Array, hidden_WE: torch.Tensor) -> None:
        """One token a pass, the first at positions end_S, until all drafts are made."""
        group = self._pages.groups[self._group]
        metadata = [GroupMetadata()] * len(self._pages.groups)
        number = 1
        while not drafting.is_over(number):
            rows_W = rows_S[drafting.places_W]
            limit_W = np.minimum(num_slots(rows_W, [group]), self._pages.max_model_len)
            position_W = end_S[drafting.places_W] + np.int32(number - 1)
            metadata[self._group] = GroupMetadata(
                attention=one_token_metadata(
                    rows_W,
                    np.minimum(position_W, limit_W - 1),
                    position_W < limit_W,
                    group=group,
                    device=self._pages.device,
                )
            )
            output = self._compute.forward(
                0,
                self._to(drafting.last(number - 1)),
                hidden_WE,
                positions_T=self._to(np.minimum(position_W, self._pages.max_model_len - 1).astype(np.int64)),
                metadata=metadata,
            )
            going = drafting.put(number, self._drafter.best_tokens(output.normed_TE))
            hidden_WE = output.handed_on_TE[self._to(going)]
            number += 1

    def _to(self, array: Int32Array | Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pages.device)
