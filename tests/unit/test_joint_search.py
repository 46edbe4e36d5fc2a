"""The hit of pool and tiers together is the longest that any of them allows: against the oracle of the pool alone."""

import random

import numpy as np
import pytest
from support.kv_history import CacheHistory, Prompt, history_of, questions
from support.kv_oracle import Cached, OracleHit

from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.joint_search import JointIndex, pool_blocks
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.tier_hits import TierHits
from blockferry.engine.kv.tier_ledger import TierLedger
from blockferry.engine.kv.tier_policies import LruPolicy

NUM_HISTORIES = 60


def tier_of(history: CacheHistory, keys: list[tuple[int, bytes]]) -> TierLedger:
    """A tier that holds these contents."""
    num_groups = len(history.config.groups)
    ledger = TierLedger(units_per_block=[1] * num_groups, num_units=1 + len(keys), policy=LruPolicy())
    blocks = ledger.begin_store(np.array([group for group, _ in keys], np.int32), [digest for _, digest in keys])
    ledger.end_store(blocks)
    return ledger


def found_keys(history: CacheHistory) -> dict[int, list[tuple[int, bytes]]]:
    """(group, digest) of every block that can be found, by block."""
    keys = {}
    for block_id in range(1, history.config.num_blocks):
        report = history.kv.report_block(block_id)
        keys[block_id] = [(report.hash_group or 0, digest) for digest in report.hashes]
    return keys


def scatter(history: CacheHistory, rng: random.Random) -> list[TierLedger]:
    """Move some of what is cached into two tiers; some of it stays in the pool as well, some is in neither."""
    share = rng.choice((0.2, 0.5, 0.9))
    moved: list[list[tuple[int, bytes]]] = [[], []]
    gone = []
    for block_id, keys in found_keys(history).items():
        for key in keys:
            for tier in moved:
                if rng.random() < share:
                    tier.append(key)
        if rng.random() < share:
            gone.append(block_id)
    if gone:
        history.kv.evict_blocks(np.array(gone, np.int32))
    return [tier_of(history, sorted(set(keys))) for keys in moved]


def union(history: CacheHistory, tiers: list[TierLedger]) -> Cached:
    cached = history.cached()
    num_groups = len(history.config.groups)
    for tier in tiers:
        for digest, meaning in history.meaning.items():
            found = tier.find([digest])[0]
            cached |= {(group, meaning) for group in range(num_groups) if found[group]}
    return cached


def check_blocks(
    history: CacheHistory, tiers: list[TierLedger], prompt: Prompt, found: PrefixHit, wanted: OracleHit
) -> int:
    """Every block that is needed comes from where its content is; returns how many come from tiers."""
    joint = JointIndex(PrefixIndex(len(history.config.groups), num_expected=1), tiers)
    num_loaded = 0
    for group, needs in enumerate(wanted.needs):
        blocks = found.block_ids[group]
        assert set(np.flatnonzero(blocks).tolist()) == {need.column for need in needs}, (group, blocks)
        for need in needs:
            one = blocks[need.column : need.column + 1]
            fitting = {(group, history.oracle.prefix(prompt.salt, prompt.tokens, length)) for length in need.lengths}
            if one[0] > 0:
                assert history.prefixes_of(int(one[0])) & fitting
                continue
            tier = next(tier for number, tier in enumerate(tiers) if joint.in_tier(one, number)[0])
            theirs = joint.tier_blocks(one)
            assert (int(tier.groups_of(theirs)[0]), history.meaning[tier.digests_of(theirs)[0]]) in fitting
            num_loaded += 1
    return num_loaded


def check_history(rng: random.Random) -> list[int]:
    history = history_of(rng)
    tiers = scatter(history, rng)
    cached = union(history, tiers)
    search = TierHits(history.kv, tiers)
    loaded = []
    for prompt in questions(history, rng):
        wanted = history.oracle.longest(prompt.salt, prompt.tokens, cached)
        hashes = history.hashes(prompt)
        found = search.find(hashes, len(prompt.tokens))
        assert found.num_tokens == wanted.num_tokens, (prompt, history.config.groups)
        assert found.num_tokens >= history.kv.lookup(hashes, len(prompt.tokens)).num_tokens
        loaded.append(check_blocks(history, tiers, prompt, found, wanted))
    return loaded


def check_seeds(seeds: range) -> None:
    loaded = [count for seed in seeds for count in check_history(random.Random(seed))]
    assert sum(count > 0 for count in loaded) > len(loaded) // 10


def test_joint_hit_is_the_longest_that_every_group_agrees_to() -> None:
    check_seeds(range(NUM_HISTORIES))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_joint_hit_is_the_longest_in_many_more_histories() -> None:
    check_seeds(range(NUM_HISTORIES, 2_000))


def test_pool_blocks_are_preferred_to_tiers_and_earlier_tiers_to_later_ones() -> None:
    pool = PrefixIndex(1, num_expected=8)
    digests = [bytes([number]) for number in range(3)]
    first = TierLedger(units_per_block=[1], num_units=4, policy=LruPolicy())
    second = TierLedger(units_per_block=[1], num_units=4, policy=LruPolicy())
    second.end_store(second.begin_store(np.zeros(3, np.int32), digests))
    first.end_store(first.begin_store(np.zeros(2, np.int32), digests[:2]))
    pool.add(pool.places(np.zeros(1, np.int32), pool.obtain(digests[:1]).ids), np.array([7], np.int32))
    joint = JointIndex(pool, [first, second])
    entries = joint.find(digests)
    blocks = joint.blocks[entries][:, 0]
    assert blocks[0] == 7
    assert joint.in_tier(blocks, 0).tolist() == [False, True, False]
    assert joint.in_tier(blocks, 1).tolist() == [False, False, True]
    assert pool_blocks((blocks,))[0].tolist() == [7, 0, 0]
