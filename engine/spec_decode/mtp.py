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

Legend: R rows of the plan, S sampling rows, W those that are being drafted for, T tokens of a pass, K drafts to
propose, E hidden.
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
from blockferry.engine.spec_decode.base import VerifiedStep
from blockferry.engine.spec_decode.drafting import Drafting
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
    """See ModuleProposer. Of a rank that computes modules."""

    def __init__(
        self, drafter: Drafter, rows: RowTable, pages: DraftPages, compute: DraftCompute, *, min_chance: float
    ) -> None:
        """`rows` are the worker's; drafts are written behind their tokens. `compute` runs the drafter's modules.

        min_chance: see drafting.py.
        """
        self._drafter = drafter
        self._rows = rows
        self._pages = pages
        self._compute = compute
        self._min_chance = min_chance
        self._draft_groups = pages.draft_groups(drafter)
        self._tails = HiddenTails(max_rows=len(rows.num_tokens), num_kept=len(drafter.modules) - 1)

    def complete(self, step: VerifiedStep, drafts_SK: NDArray[np.int32]) -> None:
        """See ModuleProposer."""
        tokens = final_tokens(step, self._tails.num_before(step.plan))
        drafting = Drafting(drafts_SK, min_chance=self._min_chance)
        handed_on_WE = self._pass_over_final_tokens(step, tokens, drafting)
        self._go_on_alone(tokens, handed_on_WE, drafting)

    def _pass_over_final_tokens(self, step: VerifiedStep, tokens: FinalTokens, drafting: Drafting) -> torch.Tensor:
        """Every module over the step's final tokens.

        Returns what the last one hands on at the last tokens of rows that are still being drafted for, [W, E].
        """
        assert step.hidden_TE is not None, "modules are of the last stage"
        inputs = build_inputs(tokens.plan, self._rows, self._tables, device=self._pages.device)
        order = tokens.order(inputs.first_token_R)
        hidden_TE = self._drafter.normed(step.hidden_TE[self._to(order.source_T)])
        hidden_TE = self._tails.exchange(step.plan.rows, order, hidden_TE)
        sample_S = step.plan.sample.nonzero()[0]
        last_S = inputs.last_token_R[sample_S]
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
            if not drafting.is_over(depth):
                last_W = self._to(last_S[drafting.places_W])
                drafting.put(depth, self._drafter.best_tokens(output.normed_TE[last_W]))
                places_W = drafting.places_W
                num_known_R[sample_S[places_W]] = self._put(
                    tokens.rows_S[places_W], tokens.end_S[places_W] + 1 + depth, drafting.last(depth)
                )
        return hidden_TE[self._to(last_S[drafting.places_W])]

    def _go_on_alone(self, tokens: FinalTokens, hidden_WE: torch.Tensor, drafting: Drafting) -> None:
        """The last module, one token a pass, until all drafts are made."""
        last = len(self._drafter.modules) - 1
        number = last + 1
        while not drafting.is_over(number):
            places_W = drafting.places_W
            limit_W = np.minimum(num_slots(tokens.rows_S[places_W], self._tables), self._pages.max_model_len)
            position_W = tokens.end_S[places_W] + (number - last - 1)
            has_slot_W = position_W < limit_W
            plan = tokens.alone(places_W, np.minimum(position_W, limit_W - 1))
            inputs = build_inputs(plan, self._rows, self._tables, device=self._pages.device)
            positions_W = self._to(np.minimum(position_W, self._pages.max_model_len - 1).astype(np.int64))
            output = self._compute.forward(
                last,
                self._to(drafting.last(number - 1)),
                hidden_WE,
                positions_T=positions_W,
                metadata=self._whole(_without(inputs.metadata, ~has_slot_W)),
            )
            going = drafting.put(number, self._drafter.best_tokens(output.normed_TE))
            hidden_WE = output.handed_on_TE[self._to(going)]
            number += 1

    @property
    def _tables(self) -> list[GroupTable]:
        return [self._pages.groups[group] for group in self._draft_groups]

    def _whole(self, metadata: Sequence[GroupMetadata]) -> list[GroupMetadata]:
        """Metadata of the draft groups, where caches look for it."""
        whole = [GroupMetadata()] * len(self._pages.groups)
        for group, one in zip(self._draft_groups, metadata, strict=True):
            whole[group] = one
        return whole

    def _put(self, rows_W: Int32Array, positions_W: Int32Array, token_ids_W: Int32Array) -> Int32Array:
        """Let drafts stand behind the known tokens, none beyond the longest sequence. Returns how many tokens stand."""
        fits_W = positions_W < self._rows.token_ids.shape[1]
        self._rows.put_drafts(rows_W[fits_W], positions_W[fits_W], token_ids_W[fits_W])
        num_standing_W: Int32Array = positions_W + fits_W
        return num_standing_W

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
