"""Where chunks of models with states end, over every small case."""

import itertools
import random

import pytest
from support.sim_families import family_groups

from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.scheduler.chunking import StateGrid


def grid(*sizes: int, alignment: int | None = None, shift: int = 1) -> StateGrid:
    return StateGrid(block_sizes=sizes, hit_alignment=alignment or max(sizes), replay_shift=shift)


WHOLE, INSIDE, SIZES, COARSE = grid(4), grid(8, alignment=2), grid(4, 6, alignment=2), grid(2, alignment=8)
GRIDS = [WHOLE, INSIDE, SIZES, COARSE]


def ends(one: StateGrid, *, num_tokens: int, budgets, start: int = 0, num_prompt_tokens=None, junction: int = 0):
    """Ends of all chunks of a sequence, given the budget of each."""
    kept = one.kept_lengths(
        num_prompt_tokens=num_tokens if num_prompt_tokens is None else num_prompt_tokens,
        num_tokens=num_tokens,
        junction=junction,
    )
    found = []
    for budget in budgets:
        if start == num_tokens:
            break
        start = one.end_chunk(start, min(start + budget, num_tokens), kept_lengths=kept)
        found.append(start)
    return found


def every_case(one: StateGrid):
    for num_tokens in range(1, 30):
        for num_prompt_tokens in range(max(1, num_tokens - 9), num_tokens + 1, 4):
            for junction in range(0, num_tokens, one.hit_alignment):
                yield num_tokens, num_prompt_tokens, junction


@pytest.mark.parametrize("one", GRIDS)
def test_every_chunk_makes_progress_within_its_budget(one):
    for num_tokens, num_prompt_tokens, junction in every_case(one):
        kept = one.kept_lengths(num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens, junction=junction)
        for start, limit in itertools.combinations(range(num_tokens + 1), 2):
            assert start < one.end_chunk(start, limit, kept_lengths=kept) <= limit


@pytest.mark.parametrize("one", GRIDS)
def test_chunk_that_starts_inside_a_block_never_leaves_it(one):
    for start, limit in itertools.combinations(range(30), 2):
        end = one.end_chunk(start, limit, kept_lengths=())
        for size in one.block_sizes:
            assert start % size == 0 or end <= start // size * size + size


@pytest.mark.parametrize("one", GRIDS)
def test_every_kept_length_is_the_end_of_a_chunk_whatever_the_budgets(one):
    generator = random.Random(0)
    for num_tokens, num_prompt_tokens, junction in every_case(one):
        kept = one.kept_lengths(num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens, junction=junction)
        budgets = [generator.choice((1, 3, 8, 30)) for _ in range(num_tokens)]
        found = ends(
            one, num_tokens=num_tokens, num_prompt_tokens=num_prompt_tokens, junction=junction, budgets=budgets
        )
        assert found[-1] == num_tokens
        assert set(kept) - {0} <= set(found)


@pytest.mark.parametrize("one", GRIDS)
def test_budget_that_reaches_a_multiple_of_the_block_is_used_up_to_the_last_one(one):
    for start in range(0, 40, one.spacing):
        for limit in range(start + 1, 60):
            end = one.end_chunk(start, limit, kept_lengths=())
            assert end == (limit // one.spacing * one.spacing if limit - start >= one.spacing else limit)


def test_prompt_is_cut_at_the_last_length_that_a_repeat_of_it_can_hit():
    assert ends(WHOLE, num_tokens=46, budgets=[32, 32, 32]) == [32, 44, 46]
    assert ends(WHOLE, num_tokens=20, budgets=[32, 32]) == [16, 20]


def test_prompt_is_cut_inside_a_block_where_hits_may_end_there():
    assert ends(INSIDE, num_tokens=13, budgets=[32, 32, 32]) == [8, 12, 13]
    assert ends(INSIDE, num_tokens=8, budgets=[32, 32]) == [6, 8]


def test_hit_that_ends_inside_a_block_fills_the_block_first():
    assert ends(INSIDE, start=6, num_tokens=30, budgets=[32] * 4) == [8, 24, 28, 30]


def test_junction_is_cut_at_the_block_before_it():
    assert ends(INSIDE, num_tokens=63, junction=44, budgets=[64] * 4) == [40, 56, 62, 63]
    assert ends(WHOLE, num_tokens=43, junction=12, budgets=[32] * 3) == [12, 40, 43]


def test_draft_moves_the_cut_back_to_where_its_hits_resume():
    assert ends(grid(4, shift=4), num_tokens=14, budgets=[32] * 3) == [8, 12, 14]


def test_resumed_sequence_keeps_the_states_of_its_prompt_and_of_its_whole():
    assert ends(INSIDE, num_tokens=30, num_prompt_tokens=13, budgets=[64] * 4) == [12, 16, 24, 30]


def test_small_budgets_fill_a_block_in_pieces():
    assert ends(WHOLE, num_tokens=11, budgets=[3] * 9) == [3, 4, 7, 8, 11]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("full+5 windows", None),
        ("running states only", None),
        ("full+states", StateGrid(block_sizes=(2,), hit_alignment=2, replay_shift=1)),
        ("full+states, hits inside states", StateGrid(block_sizes=(8,), hit_alignment=2, replay_shift=1)),
        ("full+window+states, three sizes", StateGrid(block_sizes=(8,), hit_alignment=8, replay_shift=1)),
        ("states of two sizes", StateGrid(block_sizes=(4, 6), hit_alignment=2, replay_shift=1)),
    ],
)
def test_grid_of_a_ledger_is_that_of_its_cacheable_states(family, expected):
    config = KVCacheConfig(num_blocks=9, groups=family_groups(family, 2), hash_block_size=2)
    assert StateGrid.of(config) == expected


def test_draft_group_shifts_the_grid_by_one_block_of_all_groups():
    groups = family_groups("full+states, hits inside states", 2, has_draft=True)
    found = StateGrid.of(KVCacheConfig(num_blocks=9, groups=groups, hash_block_size=2))
    assert found is not None
    assert found.replay_shift == 8


def test_prompt_whose_last_state_is_exported_ends_in_one_chunk() -> None:
    exporting = StateGrid(block_sizes=(4,), hit_alignment=4, replay_shift=1, exports_states=True)
    assert ends(exporting, num_tokens=14, budgets=(6, 20)) == [4, 14]
    assert ends(exporting, num_tokens=14, budgets=(20, 20), junction=8) == [8, 14]
    assert ends(exporting, num_tokens=14, budgets=(20, 20), num_prompt_tokens=9) == [8, 12]
