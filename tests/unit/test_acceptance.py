"""Acceptance of drafts against an oracle that takes one row at a time, and its distribution."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockferry.engine.spec_decode.acceptance import accept, draft_positions, targets_of
from blockferry.engine.wire import StepPlan


@dataclasses.dataclass
class Row:
    """One row of a plan, and what is drawn at each of its places."""

    row: int
    num_known: int
    drafts: list[int]
    drawn: list[int]  # len(drafts) + 1
    samples: bool = True


def naive_accept(row: Row) -> list[int]:
    kept = []
    for place, token in enumerate(row.drawn):
        kept.append(token)
        if place == len(row.drafts) or row.drafts[place] != token:
            break
    return kept


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    made = []
    for row in draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]:
        drafts = draw(st.lists(st.integers(0, 2), max_size=4))
        drawn = draw(st.lists(st.integers(0, 2), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
        samples = bool(drafts) or draw(st.booleans())
        made.append(Row(row=row, num_known=draw(st.integers(1, 50)), drafts=drafts, drawn=drawn, samples=samples))
    return made


def plan_of(made: list[Row]) -> StepPlan:
    return StepPlan(
        step_id=1,
        rows=np.array([row.row for row in made], np.int32),
        num_computed=np.array([row.num_known - 1 for row in made], np.int32),
        num_scheduled=np.array([1 + len(row.drafts) for row in made], np.int32),
        sample=np.array([row.samples for row in made], np.bool_),
        num_drafts=np.array([len(row.drafts) for row in made], np.int32),
        draft_token_ids=np.array([token for row in made for token in row.drafts], np.int32),
    )


def last_tokens(plan: StepPlan) -> np.ndarray:
    """Of a step that computes rows in the plan's order."""
    return np.cumsum(plan.num_scheduled, dtype=np.int64) - 1


@given(rows())
def test_each_row_keeps_its_drafts_up_to_the_first_that_was_not_drawn_and_one_token_more(made: list[Row]) -> None:
    plan = plan_of(made)
    drawn = np.array([token for row in made if row.samples for token in row.drawn], np.int32)

    accepted = accept(targets_of(plan, last_tokens(plan)), drawn)

    expected = [naive_accept(row) for row in made if row.samples]
    assert accepted.token_ids.tolist() == [token for kept in expected for token in kept]
    assert accepted.num_tokens_S.tolist() == [len(kept) for kept in expected]
    assert accepted.token_ids.dtype == accepted.num_tokens_S.dtype == np.int32
    np.testing.assert_array_equal(drawn[accepted.is_kept_N], accepted.token_ids)


@given(rows())
def test_tokens_are_drawn_behind_the_last_known_token_and_behind_each_draft(made: list[Row]) -> None:
    plan = plan_of(made)

    targets = targets_of(plan, last_tokens(plan))

    sampling = [row for row in made if row.samples]
    assert targets.rows_N.tolist() == [row.row for row in sampling for _ in row.drawn]
    assert targets.positions_N.tolist() == [row.num_known + i for row in sampling for i in range(len(row.drawn))]
    first_T = dict(zip(plan.rows.tolist(), (last_tokens(plan) - plan.num_scheduled + 1).tolist()))
    assert targets.tokens_N.tolist() == [first_T[row.row] + i for row in sampling for i in range(len(row.drawn))]


@given(rows())
def test_drafts_stand_behind_the_known_tokens(made: list[Row]) -> None:
    assert draft_positions(plan_of(made)).tolist() == [
        row.num_known + i for row in made for i in range(len(row.drafts))
    ]


def test_a_plan_without_drafts_keeps_every_token() -> None:
    plan = dataclasses.replace(
        plan_of([Row(row=3, num_known=4, drafts=[], drawn=[7]), Row(row=1, num_known=2, drafts=[], drawn=[9])]),
        num_drafts=np.empty(0, np.int32),
    )

    accepted = accept(targets_of(plan, last_tokens(plan)), np.array([7, 9], np.int32))

    assert accepted.token_ids.tolist() == [7, 9]
    assert accepted.num_tokens_S.tolist() == [1, 1]
