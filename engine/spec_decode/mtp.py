"""Drafts by modules that predict several tokens (models/mtp.py): their caches kept, their tokens proposed.

After every step a module's keys and values stand for all tokens that are final, like the model's own:

    computed   | ............ final | rejected |     module j at position i reads token i + 1 + j and hidden i
    pass 0     | module 0 ......... 1st draft  |     of the module before it
    pass 1     | module 1 ......... 2nd draft  |     ... with the 1st draft as the token after the last known one
    pass 2               | module 1, one token |     the last module goes on alone, from its own output

Passes over final tokens run whether or not anybody wants drafts. Passes of one token write behind them, where the row
has room in its blocks; what they write is overwritten once those tokens are final. Deeper modules have read drafts at a
row's last positions; those are computed again with the row's next tokens (hidden_tails.py).

Owns no pages. The model thread calls it, on all ranks of the last stage alike.

Legend: R rows of the plan, S sampling rows, T tokens of a pass, K drafts to propose, E hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.engine.models.mtp import Drafter
from blockferry.engine.request import BoolArray, Int32Array, Int64Array
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import VerifiedStep, no_drafts
from blockferry.engine.spec_decode.final_tokens import FinalTokens, final_tokens, num_slots
from blockferry.engine.spec_decode.hidden_tails import HiddenTails
from blockferry.engine.worker.block_table import PAD_SLOT_ID
from blockferry.engine.worker.draft_compute import DraftCompute
from blockferry.engine.worker.inputs import GroupTable, build_inputs
from blockferry.engine.worker.paged_caches import GroupMetadata, PagedCaches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftPages:
    """The caches of a rank's last stage, and the tables that say which blocks are whose."""

    caches: PagedCaches
    groups: Sequence[GroupTable]
    max_model_len: int
    device: torch.device

    def draft_groups(self, drafter: Drafter) -> list[int]:
        """Groups of the modules' layers."""
        return sorted({self.caches.pages.attention[module.number].group for module in drafter.modules})


class MtpProposer:
    """See DraftProposer. Of a rank that computes modules."""

    def __init__(self, drafter: Drafter, rows: RowTable, pages: DraftPages, compute: DraftCompute) -> None:
        """`rows` are the worker's; drafts are written behind their tokens. `compute` runs the drafter's modules."""
        self._drafter = drafter
        self._rows = rows
        self._pages = pages
        self._compute = compute
        self._draft_groups = pages.draft_groups(drafter)
        self._tails = HiddenTails(max_rows=len(rows.num_tokens), num_kept=len(drafter.modules) - 1)

    def propose(self, step: VerifiedStep) -> NDArray[np.int32]:
        """See DraftProposer."""
        assert step.hidden_TE is not None, "modules are of the last stage"
        drafts_SK = no_drafts(step)
        tokens = final_tokens(step, self._tails.num_before(step.plan))
        handed_on_SE = self._pass_over_final_tokens(step, tokens, drafts_SK)
        if len(drafts_SK):
            self._go_on_alone(tokens, handed_on_SE, drafts_SK)
        return drafts_SK

    def _pass_over_final_tokens(
        self, step: VerifiedStep, tokens: FinalTokens, drafts_SK: NDArray[np.int32]
    ) -> torch.Tensor:
        """Every module over the step's final tokens. Returns what the last one hands on at rows' last tokens [S, E]."""
        assert step.hidden_TE is not None
        inputs = build_inputs(tokens.plan, self._rows, self._tables, device=self._pages.device)
        order = tokens.order(inputs.first_token_R)
        hidden_TE = self._drafter.normed(step.hidden_TE[self._to(order.source_T)])
        hidden_TE = self._tails.exchange(step.plan.rows, order, hidden_TE)
        last_S = inputs.last_token_R[step.plan.sample]
        num_known_R = self._rows.num_tokens[step.plan.rows]
        for depth in range(len(self._drafter.modules)):
            # beyond the known tokens: any, so that no key is left out; those are computed again once they are known
            next_T = np.minimum(order.positions_T + depth + 1, num_known_R[order.plan_row_T] - 1)
            token_ids_T = self._rows.token_ids[order.rows_T, next_T]
            output = self._compute.forward(
                depth,
                self._to(token_ids_T),
                hidden_TE,
                positions_T=inputs.positions_T,
                metadata=self._whole(inputs.metadata),
            )
            hidden_TE = output.handed_on_TE
            if depth < drafts_SK.shape[1] and len(drafts_SK):
                drafts_SK[:, depth] = self._best(output.normed_TE[self._to(last_S)])
                num_known_R[step.plan.sample] = self._put(tokens.rows_S, tokens.end_S + 1 + depth, drafts_SK[:, depth])
        return hidden_TE[self._to(last_S)]

    def _go_on_alone(self, tokens: FinalTokens, hidden_SE: torch.Tensor, drafts_SK: NDArray[np.int32]) -> None:
        """The last module, one token a pass, until all drafts are made."""
        last = len(self._drafter.modules) - 1
        limit_S = np.minimum(num_slots(tokens.rows_S, self._tables), self._pages.max_model_len)
        for number in range(last + 1, drafts_SK.shape[1]):
            position_S = tokens.end_S + (number - last - 1)
            has_slot_S = position_S < limit_S
            plan = tokens.alone(np.minimum(position_S, limit_S - 1))
            inputs = build_inputs(plan, self._rows, self._tables, device=self._pages.device)
            positions_S = self._to(np.minimum(position_S, self._pages.max_model_len - 1).astype(np.int64))
            output = self._compute.forward(
                last,
                self._to(drafts_SK[:, number - 1].copy()),
                hidden_SE,
                positions_T=positions_S,
                metadata=self._whole(_without(inputs.metadata, ~has_slot_S)),
            )
            hidden_SE = output.handed_on_TE
            drafts_SK[:, number] = self._best(output.normed_TE)

    @property
    def _tables(self) -> list[GroupTable]:
        return [self._pages.groups[group] for group in self._draft_groups]

    def _whole(self, metadata: Sequence[GroupMetadata]) -> list[GroupMetadata]:
        """Metadata of the draft groups, where caches look for it."""
        whole = [GroupMetadata()] * len(self._pages.groups)
        for group, one in zip(self._draft_groups, metadata, strict=True):
            whole[group] = one
        return whole

    def _best(self, normed_SE: torch.Tensor) -> Int32Array:
        best_S: Int32Array = self._drafter.best_tokens(normed_SE).int().cpu().numpy()
        return best_S

    def _put(self, rows_S: Int32Array, positions_S: Int32Array, token_ids_S: Int32Array) -> Int32Array:
        """Let drafts stand behind the known tokens, none beyond the longest sequence. Returns how many tokens stand."""
        fits_S = positions_S < self._rows.token_ids.shape[1]
        self._rows.put_drafts(rows_S[fits_S], positions_S[fits_S], token_ids_S[fits_S])
        num_standing_S: Int32Array = positions_S + fits_S
        return num_standing_S

    def _to(self, array: Int32Array | Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pages.device)


def _without(metadata: Sequence[GroupMetadata], is_dropped_T: BoolArray) -> list[GroupMetadata]:
    """Metadata by which those tokens write nothing."""
    if not is_dropped_T.any():
        return list(metadata)
    changed = []
    for one in metadata:
        assert one.attention is not None, "modules attend"
        slots_T = one.attention.slot_mapping_T.clone()
        slots_T[torch.from_numpy(is_dropped_T).to(slots_T.device)] = PAD_SLOT_ID
        changed.append(GroupMetadata(attention=dataclasses.replace(one.attention, slot_mapping_T=slots_T)))
    return changed
