"""Where a step draws tokens, and which of them count once drafts are compared with them. Pure; owns nothing.

A draft is accepted while it equals the token that the sampler draws at its place, and so does every one before it; the
token that follows the last accepted draft counts too. Draws are a function of (seed, position), so that the outcome is
what a row without drafts would have become. As a distribution it is rejection sampling from a proposal that is certain
of its draft: accept with the target's probability of it, else draw from the target without it (Leviathan et al., Fast
Inference from Transformers via Speculative Decoding, 2023, algorithm 1; Chen et al., 2023, arXiv:2302.01318).

    drafts            a  b  c          places: behind the last known token, and behind each draft
    drawn          a  b  x  y
    counts         a  b  x             num_tokens = 3: two drafts and the token in the third's place

Legend: R rows of the plan, S sampling rows, N places where a token is drawn, row by row; D drafts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from blockferry.engine.request import BoolArray, Int32Array, Int64Array
from blockferry.engine.rows import places_in_runs
from blockferry.engine.wire import StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The places of a plan where tokens are drawn."""

    rows_N: Int32Array
    positions_N: Int32Array  # that the tokens would take in their rows
    tokens_N: Int64Array  # the step's token, by its place in T, whose logits they are drawn from
    num_drafts_S: Int32Array
    draft_token_ids_D: Int32Array

    def __len__(self) -> int:
        return len(self.rows_N)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What became of the drawn tokens."""

    token_ids: Int32Array  # those that count, row by row
    num_tokens_S: Int32Array  # >= 1: accepted drafts and one
    is_kept_N: BoolArray


def draft_positions(plan: StepPlan) -> Int32Array:
    """int32 [D]: where in their rows the plan's drafts stand. Only of a plan that has num_drafts."""
    first_R = plan.num_computed + plan.num_scheduled - plan.num_drafts
    return np.repeat(first_R, plan.num_drafts) + places_in_runs(plan.num_drafts)


def targets_of(plan: StepPlan, last_token_R: Int64Array) -> Targets:
    """The places of a plan whose rows' last tokens stand at last_token_R in the step."""
    rows_S, last_S = plan.rows[plan.sample], last_token_R[plan.sample]
    ends_S = (plan.num_computed + plan.num_scheduled)[plan.sample]
    if not len(plan.draft_token_ids):
        return Targets(
            rows_N=rows_S,
            positions_N=ends_S,
            tokens_N=last_S,
            num_drafts_S=np.zeros(len(rows_S), np.int32),
            draft_token_ids_D=plan.draft_token_ids,
        )
    num_drafts_S = plan.num_drafts[plan.sample]
    assert num_drafts_S.sum() == len(plan.draft_token_ids), (plan.num_drafts, plan.sample, len(plan.draft_token_ids))
    counts_S = num_drafts_S + 1
    to_end_N = places_in_runs(counts_S) - np.repeat(num_drafts_S, counts_S)
    return Targets(
        rows_N=np.repeat(rows_S, counts_S),
        positions_N=np.repeat(ends_S, counts_S) + to_end_N,
        tokens_N=np.repeat(last_S, counts_S) + to_end_N,
        num_drafts_S=num_drafts_S,
        draft_token_ids_D=plan.draft_token_ids,
    )


def accept(targets: Targets, token_ids_N: Int32Array) -> Accepted:
    """Compare drafts with what was drawn at their places."""
    num_drafts_S = targets.num_drafts_S
    counts_S = num_drafts_S + 1
    if not len(targets.draft_token_ids_D):
        return Accepted(token_ids=token_ids_N, num_tokens_S=counts_S, is_kept_N=np.ones(len(targets), np.bool_))
    starts_S = np.cumsum(counts_S) - counts_S
    place_N = places_in_runs(counts_S)
    is_draft_N = np.ones(len(targets), np.bool_)
    is_draft_N[starts_S + num_drafts_S] = False
    # the first place of each row whose token is not the draft there; the last one has none to be equal to
    last_N = np.repeat(num_drafts_S, counts_S)
    last_N[is_draft_N] = np.where(
        token_ids_N[is_draft_N] == targets.draft_token_ids_D, last_N[is_draft_N], place_N[is_draft_N]
    )
    num_accepted_S = np.minimum.reduceat(last_N, starts_S)
    is_kept_N = place_N <= np.repeat(num_accepted_S, counts_S)
    return Accepted(token_ids=token_ids_N[is_kept_N], num_tokens_S=num_accepted_S + 1, is_kept_N=is_kept_N)
