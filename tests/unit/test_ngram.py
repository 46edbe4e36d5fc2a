"""The n-gram proposer against a lookup in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ngrams import naive_lookup

from blockferry.engine.config import cache_dir
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.base import VerifiedStep
from blockferry.engine.spec_decode.ngram import NgramProposer
from blockferry.engine.wire import NO_DRAFT, StepPlan
from blockferry.engine.worker.inputs import StepInputs
from blockferry.kernels.cpu_launch import Launcher, kernel_store
from blockferry.kernels.cpu_ngram import NgramLookup


@pytest.fixture(scope="module")
def look_up() -> NgramLookup:
    made = NgramLookup(Launcher(kernel_store(cache_dir() / "kernels")))
    made.prepare()  # which may compile
    return made


long_texts = st.tuples(st.integers(0, 1000), st.integers(100, 400), st.integers(2, 300)).map(
    lambda drawn: np.random.default_rng(drawn[0]).integers(0, drawn[2], drawn[1]).tolist()
)


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30) | long_texts, min_size=1, max_size=5),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 3),
    num_drafts=st.integers(1, 5),
)
def test_drafts_are_what_followed_the_longest_and_then_latest_recurrence(
    look_up: NgramLookup, texts: list[list[int]], min_ngram: int, more: int, num_drafts: int
) -> None:
    rows = list(reversed(range(len(texts))))
    tokens_RL = np.zeros((len(texts), 400), np.int32)
    for row, text in zip(rows, texts, strict=True):
        tokens_RL[row, : len(text)] = text

    drafts = look_up(
        tokens_RL,
        np.array(rows, np.int32),
        np.array([len(text) for text in texts], np.int32),
        min_ngram=min_ngram,
        max_ngram=min_ngram + more,
        num_drafts=num_drafts,
    )

    assert drafts.tolist() == [
        naive_lookup(text, min_ngram=min_ngram, max_ngram=min_ngram + more, num_drafts=num_drafts) for text in texts
    ]


def proposals(rows: RowTable, sampling_rows: list[int], num_proposals: int) -> list[list[int]]:
    plan = StepPlan(
        step_id=1,
        rows=np.array([*sampling_rows, 7], np.int32),
        sample=np.array([True] * len(sampling_rows) + [False]),
        num_proposals=num_proposals,
    )
    step = VerifiedStep(
        plan=plan,
        hidden_TE=None,
        inputs=StepInputs(
            token_ids_T=torch.empty(0),
            positions_T=torch.empty(0),
            metadata=(),
            rows_T=np.empty(0, np.int32),
            places_T=np.empty(0, np.int64),
            first_token_R=np.zeros(len(plan.rows), np.int64),
            last_token_R=np.zeros(len(plan.rows), np.int64),
        ),
        num_tokens_S=np.ones(len(sampling_rows), np.int32),
    )
    return NgramProposer(rows, min_ngram=2, max_ngram=3).propose(step).tolist()


def test_only_sampling_rows_are_looked_up_and_only_in_their_own_tokens() -> None:
    rows = RowTable(max_rows=8, max_model_len=16)
    rows.assign(3, np.array([5, 6, 7, 8, 5, 6], np.int32), num_prompt_tokens=4)
    rows.assign(1, np.array([5, 6], np.int32), num_prompt_tokens=2)

    assert proposals(rows, [1, 3], 3) == [[NO_DRAFT] * 3, [7, 8, 5]]


def test_nothing_is_proposed_where_nothing_is_asked_for() -> None:
    rows = RowTable(max_rows=8, max_model_len=16)
    rows.assign(3, np.array([5, 5, 5], np.int32), num_prompt_tokens=3)

    assert proposals(rows, [3], 0) == [[]]
    assert proposals(rows, [], 2) == []
