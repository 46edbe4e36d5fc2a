"""Drafts by one module that predicts the token after the next (models/mtp.py), applied to itself for further ones.

What mtp.py does for chains of modules, in as little Python as the one module needs: it reads no drafts at the tokens
that a step computes, so its first pass is over the step as the model saw it, refused drafts included.

    computed   | ............ final | refused |    pass 0, over all of it: token i + 1 and hidden i give the 1st draft
    pass 1                   | one token |         from its own output at the last final token, 2nd draft
    pass 2                     | one token |       3rd draft

What it writes behind the final tokens is overwritten once those tokens are known.

Owns no pages. The model thread calls it, on all ranks of the last stage alike.

Legend: R rows of the plan, S sampling rows, T tokens of the step, K drafts to propose, E hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.engine.models.mtp import Drafter
from blockferry.engine.request import Int32Array, Int64Array
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import VerifiedStep, no_drafts
from blockferry.engine.spec_decode.final_tokens import num_slots
from blockferry.engine.spec_decode.mtp import DraftPages
from blockferry.engine.worker.draft_compute import DraftCompute
from blockferry.engine.worker.inputs import one_token_metadata
from blockferry.engine.worker.paged_caches import GroupMetadata


class LoneModuleProposer:
    """See DraftProposer. Of a rank that computes a module."""

    def __init__(self, drafter: Drafter, rows: RowTable, pages: DraftPages, compute: DraftCompute) -> None:
        """`rows` are the worker's. `compute` runs the drafter's module."""
        (self._group,) = pages.draft_groups(drafter)
        self._drafter = drafter
        self._rows = rows
        self._pages = pages
        self._compute = compute

    def propose(self, step: VerifiedStep) -> NDArray[np.int32]:
        """See DraftProposer."""
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
        drafts_SK = no_drafts(step)
        if drafts_SK.size:
            num_final_S = step.num_final()[plan.sample]
            last_S = self._to(inputs.first_token_R[plan.sample] + num_final_S - 1)
            drafts_SK[:, 0] = self._best(output.normed_TE[last_S])
            end_S = plan.num_computed[plan.sample] + num_final_S
            self._go_on_alone(plan.rows[plan.sample], end_S, output.handed_on_TE[last_S], drafts_SK)
        return drafts_SK

    def _go_on_alone(
        self, rows_S: Int32Array, end_S: Int32Array, hidden_SE: torch.Tensor, drafts_SK: NDArray[np.int32]
    ) -> None:
        """One token a pass, the first at positions end_S, until all drafts are made."""
        if drafts_SK.shape[1] == 1:
            return
        group = self._pages.groups[self._group]
        limit_S = np.minimum(num_slots(rows_S, [group]), self._pages.max_model_len)
        metadata = [GroupMetadata()] * len(self._pages.groups)
        for number in range(1, drafts_SK.shape[1]):
            position_S = end_S + np.int32(number - 1)
            metadata[self._group] = GroupMetadata(
                attention=one_token_metadata(
                    rows_S,
                    np.minimum(position_S, limit_S - 1),
                    position_S < limit_S,
                    group=group,
                    device=self._pages.device,
                )
            )
            output = self._compute.forward(
                0,
                self._to(drafts_SK[:, number - 1].copy()),
                hidden_SE,
                positions_T=self._to(np.minimum(position_S, self._pages.max_model_len - 1).astype(np.int64)),
                metadata=metadata,
            )
            hidden_SE = output.handed_on_TE
            drafts_SK[:, number] = self._best(output.normed_TE)

    def _best(self, normed_SE: torch.Tensor) -> Int32Array:
        best_S: Int32Array = self._drafter.best_tokens(normed_SE).int().cpu().numpy()
        return best_S

    def _to(self, array: Int32Array | Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pages.device)
