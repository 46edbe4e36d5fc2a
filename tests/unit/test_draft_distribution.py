"""What is sampled with drafts follows the model's distribution: chi-square over a small vocabulary, with fixed seeds.

The model is a Markov chain, so that the exact distribution of a row's first tokens can be written down. Rows draft what
another chain finds likeliest, so that drafts are accepted about as often as not, and need not draft equally many.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.acceptance import Targets, accept, draft_positions, targets_of
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.sampler import sample
from blockferry.engine.worker.sampling_state import SamplingState

VOCAB, NUM_ROWS, NUM_TOKENS, MAX_DRAFTS = 6, 40_000, 2, 3
START = 0
REJECT_BELOW = 1e-3  # fixed seeds: no test ever fails by chance
_LOGITS = np.random.default_rng(5).normal(0.0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
_DRAFTER = _LOGITS + np.random.default_rng(6).normal(0.0, 0.8, (VOCAB, VOCAB)).astype(np.float32)

Change = Callable[[Targets, Int32Array], Int32Array]
"""What is made of the drawn tokens [N] before drafts are compared with them."""


def nothing(targets: Targets, token_ids_N: Int32Array) -> Int32Array:
    del targets
    return token_ids_N


def take_drafts_once_too_often(targets: Targets, token_ids_N: Int32Array) -> Int32Array:
    """Accepts one draft of fifty whatever was drawn."""
    counts_S = targets.num_drafts_S + 1
    is_draft_N = np.ones(len(targets), np.bool_)
    is_draft_N[np.cumsum(counts_S) - 1] = False
    drafts_N = np.zeros_like(token_ids_N)
    drafts_N[is_draft_N] = targets.draft_token_ids_D
    is_wrong_N = is_draft_N & (np.random.default_rng(9).random(len(targets)) < 0.02)
    return np.where(is_wrong_N, drafts_N, token_ids_N)


SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
]


def make_state(sampling: dict[str, float]) -> SamplingState:
    """All rows alike but for their seeds."""
    state = SamplingState(NUM_ROWS)
    state.seed[:] = np.arange(NUM_ROWS)
    state.is_random[:] = True
    state.is_filtered[:] = "top_k" in sampling or "top_p" in sampling
    for name, value in sampling.items():
        getattr(state, name)[:] = value
    return state


def make_plan(rows: RowTable) -> StepPlan:
    """Every row verifies what it drafts, 0 to MAX_DRAFTS tokens."""
    all_rows = np.arange(NUM_ROWS, dtype=np.int32)
    num_drafts = (all_rows + rows.num_tokens) % (MAX_DRAFTS + 1)
    token = rows.token_ids[all_rows, rows.num_tokens - 1]
    drafts = []
    for _ in range(MAX_DRAFTS):
        token = _DRAFTER[token].argmax(-1).astype(np.int32)
        drafts.append(token)
    is_drafted = np.arange(MAX_DRAFTS) < num_drafts[:, None]
    return StepPlan(
        step_id=1,
        rows=all_rows,
        num_computed=rows.num_tokens - 1,
        num_scheduled=1 + num_drafts,
        sample=np.ones(NUM_ROWS, np.bool_),
        num_drafts=num_drafts,
        draft_token_ids=np.stack(drafts, axis=1)[is_drafted],
    )


def speculate(sampling: dict[str, float], change: Change = nothing) -> NDArray[np.int32]:
    """[R, NUM_TOKENS]: every row's first tokens."""
    state, rows = make_state(sampling), RowTable(max_rows=NUM_ROWS, max_model_len=2 + NUM_TOKENS + 2 * MAX_DRAFTS)
    rows.token_ids[:, 0] = START
    rows.num_tokens[:] = rows.num_prompt_tokens[:] = 1
    while rows.num_tokens.min() < 1 + NUM_TOKENS:
        plan = make_plan(rows)
        rows.put_drafts(np.repeat(plan.rows, plan.num_drafts), draft_positions(plan), plan.draft_token_ids)
        targets = targets_of(plan, np.cumsum(plan.num_scheduled, dtype=np.int64) - 1)
        logits_NV = torch.from_numpy(_LOGITS[rows.token_ids[targets.rows_N, targets.positions_N - 1]])
        drawn_N = sample(logits_NV, targets.rows_N, targets.positions_N, state=state, table=rows)
        accepted = accept(targets, change(targets, drawn_N))
        rows.append_several(plan.rows, accepted.token_ids, accepted.num_tokens_S)
    return rows.token_ids[:, 1 : 1 + NUM_TOKENS]


def step_by_step(sampling: dict[str, float]) -> NDArray[np.int32]:
    """The same without drafts."""
    state, rows = make_state(sampling), RowTable(max_rows=NUM_ROWS, max_model_len=1 + NUM_TOKENS)
    rows.token_ids[:, 0] = START
    all_rows = np.arange(NUM_ROWS, dtype=np.int32)
    for position in range(1, 1 + NUM_TOKENS):
        logits_RV = torch.from_numpy(_LOGITS[rows.token_ids[:, position - 1]])
        positions_R = np.full(NUM_ROWS, position, np.int32)
        rows.token_ids[:, position] = sample(logits_RV, all_rows, positions_R, state=state, table=rows)
    return rows.token_ids[:, 1:]


def exact(sampling: dict[str, float]) -> NDArray[np.float64]:
    """[VOCAB, VOCAB]: the probability of every next token after each, as the parameters define it."""
    weights = np.exp(_LOGITS.astype(np.float64) / sampling["temperature"])
    weights /= weights.max(-1, keepdims=True)
    weights[weights < sampling.get("min_p", 0.0)] = 0.0
    order = np.argsort(-weights, axis=-1)
    sorted_weights = np.take_along_axis(weights, order, -1)
    sorted_weights[:, int(sampling.get("top_k", VOCAB)) :] = 0.0
    before = np.cumsum(sorted_weights, -1) - sorted_weights
    sorted_weights[before >= sampling.get("top_p", 1.0 + 1e-9) * sorted_weights.sum(-1, keepdims=True)] = 0.0
    np.put_along_axis(weights, order, sorted_weights, -1)
    return weights / weights.sum(-1, keepdims=True)


def p_value(tokens: NDArray[np.int32], chain: NDArray[np.float64]) -> float:
    """Of Pearson's chi-square test of rows' first two tokens against the chain; 0 where one of them cannot be."""
    expected = (chain[START][:, None] * chain).ravel() * len(tokens)
    counts = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB * VOCAB)
    is_possible = expected > 0
    if counts[~is_possible].any():
        return 0.0
    statistic = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    half_freedom = torch.tensor((is_possible.sum() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_sampled_with_drafts_follow_the_models_distribution(sampling: dict[str, float]) -> None:
    assert p_value(speculate(sampling), exact(sampling)) > REJECT_BELOW


@pytest.mark.parametrize("sampling", SAMPLINGS[2:4], ids=str)
def test_the_test_notices_drafts_that_are_accepted_two_percent_too_often(sampling: dict[str, float]) -> None:
    assert p_value(speculate(sampling, take_drafts_once_too_often), exact(sampling)) < REJECT_BELOW


@pytest.mark.parametrize("sampling", SAMPLINGS[2:4], ids=str)
def test_every_token_is_the_one_that_is_drawn_without_drafts(sampling: dict[str, float]) -> None:
    np.testing.assert_array_equal(speculate(sampling), step_by_step(sampling))
