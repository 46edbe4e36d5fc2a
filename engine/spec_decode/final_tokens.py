"""Which tokens of a step are final once its drafts are verified, and how a pass over them is laid out. NumPy only.

    row of the plan    | num_computed ... known | accepted | rejected |
    final                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    with those before  ..^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^       that are computed again: hidden_tails.py

Owns nothing.

Legend: R rows of the plan, S sampling rows, W some of those, T tokens of the pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from blockferry.engine.request import Int32Array, Int64Array
from blockferry.engine.rows import places_in_runs
from blockferry.engine.spec_decode.base import VerifiedStep
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.inputs import GroupTable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenOrder:
    """The pass's tokens as they are computed."""

    plan_row_T: Int64Array  # place in the plan
    rows_T: Int32Array
    positions_T: Int64Array
    source_T: Int64Array  # place in the step's hidden states; of those before it, of the row's first token
    num_before_T: Int64Array  # 0: a token of the step; else so many tokens before the row's first one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinalTokens:
    """Of one step."""

    plan: StepPlan  # that computes the pass: the step's rows, with its final tokens and those before them
    step: VerifiedStep
    num_before_R: Int32Array
    rows_S: Int32Array
    end_S: Int32Array  # position behind a row's last final token

    def order(self, first_token_R: Int64Array) -> TokenOrder:
        """The tokens, where each row's first one stands at first_token_R in the pass."""
        counts_R = self.plan.num_scheduled.astype(np.int64)
        row_T = np.repeat(np.arange(len(counts_R)), counts_R)
        offset_T = places_in_runs(counts_R).astype(np.int64)
        place_T = first_token_R[row_T] + offset_T
        plan_row_T, sorted_offset_T = np.empty_like(row_T), np.empty_like(offset_T)
        plan_row_T[place_T], sorted_offset_T[place_T] = row_T, offset_T
        in_step_T = sorted_offset_T - self.num_before_R[plan_row_T]
        return TokenOrder(
            plan_row_T=plan_row_T,
            rows_T=self.plan.rows[plan_row_T],
            positions_T=self.plan.num_computed[plan_row_T] + sorted_offset_T,
            source_T=self.step.inputs.first_token_R[plan_row_T] + np.maximum(in_step_T, 0),
            num_before_T=np.maximum(-in_step_T, 0),
        )

    def alone(self, places_W: Int64Array, position_W: Int32Array) -> StepPlan:
        """A step of one token each of those sampling rows."""
        return StepPlan(
            step_id=self.plan.step_id,
            rows=self.rows_S[places_W],
            num_computed=position_W.astype(np.int32),
            num_scheduled=np.ones(len(places_W), np.int32),
            sample=np.ones(len(places_W), np.bool_),
        )


def final_tokens(step: VerifiedStep, num_before_R: Int32Array) -> FinalTokens:
    """The final tokens of a step, and so many of each row before them."""
    plan = step.plan
    num_final_R = step.num_final()
    counts_R = num_final_R + num_before_R
    # what a verifying row computes is a few rows of one token to attention, everything else a chunk
    num_behind_R = np.where(plan.num_drafts > 0, counts_R - 1, 0) if len(plan.num_drafts) else np.zeros_like(counts_R)
    return FinalTokens(
        plan=StepPlan(
            step_id=plan.step_id,
            new_rows=plan.new_rows,
            rows=plan.rows,
            num_computed=plan.num_computed - num_before_R,
            num_scheduled=counts_R,
            sample=plan.sample,
            num_drafts=num_behind_R.astype(np.int32),
            draft_token_ids=np.zeros(int(num_behind_R.sum()), np.int32),
        ),
        step=step,
        num_before_R=num_before_R,
        rows_S=plan.rows[plan.sample],
        end_S=(plan.num_computed + num_final_R)[plan.sample],
    )


def num_slots(rows_S: Int32Array, tables: Sequence[GroupTable]) -> Int32Array:
    """int32 [S]: tokens that each row's blocks hold; a row in use never gives its last ones back."""
    held = [table.table.num_blocks[rows_S] * table.block_size for table in tables]
    return np.asarray(np.min(held, axis=0), np.int32)
