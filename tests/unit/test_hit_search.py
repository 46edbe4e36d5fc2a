"""The longest hit is the true maximum for any mix of cache types: against an oracle that tries every length."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv_history import CacheHistory, Prompt, history_of, questions
from support.kv_oracle import Cached, OracleHit

from blockferry.engine.kv.hit_search import PrefixHit

NUM_HISTORIES = 120


def check_blocks(history: CacheHistory, prompt: Prompt, found: PrefixHit, wanted: OracleHit) -> None:
    """Every block that is needed, under the right tokens of the right group, and null everywhere else."""
    for group, needs in enumerate(wanted.needs):
        block_ids = found.block_ids[group].tolist()
        held = {need.column: need.lengths for need in needs}
        assert {column for column, block_id in enumerate(block_ids) if block_id} == set(held), (group, block_ids)
        for column, lengths in held.items():
            fitting = {(group, history.oracle.prefix(prompt.salt, prompt.tokens, length)) for length in lengths}
            assert history.prefixes_of(block_ids[column]) & fitting, (group, column)
        if held:
            assert len(block_ids) == -(-found.num_tokens // history.config.groups[group].spec.tokens_per_block)


def check_lookup(history: CacheHistory, prompt: Prompt, cached: Cached) -> OracleHit:
    wanted = history.oracle.longest(prompt.salt, prompt.tokens, cached)
    found = history.kv.lookup(history.hashes(prompt), len(prompt.tokens))
    assert found.num_tokens == wanted.num_tokens, (prompt, history.config.groups)
    check_blocks(history, prompt, found, wanted)
    return wanted


def check_all(rng: random.Random) -> list[OracleHit]:
    history = history_of(rng)
    cached = history.cached()
    return [check_lookup(history, prompt, cached) for prompt in questions(history, rng)]


def check_seeds(seeds: range) -> None:
    hits = [hit for seed in seeds for hit in check_all(random.Random(seed))]
    assert sum(hit.num_tokens > 0 for hit in hits) > len(hits) // 5


def test_hit_is_the_longest_that_every_group_agrees_to() -> None:
    check_seeds(range(NUM_HISTORIES))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_hit_is_the_longest_in_many_more_histories() -> None:
    check_seeds(range(NUM_HISTORIES, 5_000))


@settings(max_examples=30, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_hit_is_the_longest_in_histories_that_shrink(rng: random.Random) -> None:
    check_all(rng)
