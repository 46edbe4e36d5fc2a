"""Rows that start with blocks of tiers: what they hold, what is found afterwards, and what observers hear."""

import numpy as np
from support.kv_configs import attention, states

from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.events import BlockStored, EventLog
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import FullReach, WindowReach
from blockferry.engine.kv.spec import KVCacheConfig, KVCacheGroup
from blockferry.engine.kv.tier_hits import LoadedBlocks, TierHits
from blockferry.engine.kv.tier_ledger import TierLedger
from blockferry.engine.kv.tier_policies import LruPolicy
from blockferry.engine.rows import RowTable

TOKENS = np.arange(14, dtype=np.int32)


class Ledger:
    """A pool in which TOKENS were computed once, and a tier that has kept all of it."""

    def __init__(self, *specs, num_blocks: int = 32) -> None:
        groups = tuple(KVCacheGroup(layer_ids=(number,), spec=spec) for number, spec in enumerate(specs))
        self.rows = RowTable(max_rows=4, max_model_len=32)
        config = KVCacheConfig(num_blocks=num_blocks, groups=groups, hash_block_size=4)
        self.kv = KVCacheManager(config, self.rows, events=EventLog())
        hashes = self.start(0)
        computed = 0
        for stop in (4, 8, 12, 14):
            self.kv.start_step()
            assert self.kv.allocate(0, stop - computed)
            computed = stop
            self.rows.num_computed_tokens[0] = stop
            self.kv.take_copies()
        keys = [(group, digest) for group in range(len(groups)) for digest in hashes.digests]
        self.tier = TierLedger(units_per_block=[1] * len(groups), num_units=64, policy=LruPolicy())
        found = np.array([group for group, _ in keys], np.int32)
        self.tier.end_store(self.tier.begin_store(found, [digest for _, digest in keys]))
        self.hits = TierHits(self.kv, [self.tier])
        self.kv.free(0)

    def start(self, row: int) -> RequestHashes:
        self.rows.assign(row, TOKENS, num_prompt_tokens=len(TOKENS))
        hashes = self.kv.hash_prompt(TOKENS)
        self.kv.start_row(row, hashes)
        return hashes

    def evict(self, group: int) -> None:
        index = self.kv.parts.index.blocks[:, group]
        self.kv.evict_blocks(index[index != 0], group)

    def adopt(self, row: int, hashes: RequestHashes) -> tuple[LoadedBlocks, ...] | None:
        hit = self.hits.find(hashes, len(TOKENS))
        assert hit.num_tokens == 12
        return self.hits.adopt(row, hit, num_local_tokens=0, options=AllocateOptions())


def test_only_what_the_pool_lacks_is_loaded() -> None:
    ledger = Ledger(attention(4, FullReach()), attention(4, WindowReach(window=5)), states(4))
    for group in (1, 2):
        ledger.evict(group)
    hashes = ledger.start(1)
    loaded = ledger.adopt(1, hashes)
    assert loaded is not None
    assert {part.group: part.columns.tolist() for part in loaded} == {1: [2], 2: [2]}
    ledger.kv.check_integrity()


def test_loaded_blocks_are_found_once_they_are_cached() -> None:
    ledger = Ledger(attention(4, FullReach()), states(4))
    for group in (0, 1):
        ledger.evict(group)
    hashes = ledger.start(1)
    loaded = ledger.adopt(1, hashes)
    assert loaded is not None
    assert ledger.kv.lookup(hashes, len(TOKENS)).num_tokens == 0
    ledger.hits.cache(1, loaded, hashes)
    assert ledger.kv.lookup(hashes, len(TOKENS)).num_tokens == 12
    ledger.kv.check_integrity()


def test_observers_hear_of_what_was_loaded() -> None:
    ledger = Ledger(attention(4, FullReach()), states(4))
    for group in (0, 1):
        ledger.evict(group)
    hashes = ledger.start(1)
    loaded = ledger.adopt(1, hashes)
    assert loaded is not None
    ledger.kv.take_events()
    ledger.hits.cache(1, loaded, hashes)
    stored = [event for event in ledger.kv.take_events() if isinstance(event, BlockStored)]
    heard = {(event.group, event.block_hashes[0]): event.token_ids.tolist() for event in stored}
    expected = {(0, hashes.digests[column]): TOKENS[4 * column : 4 * column + 4].tolist() for column in range(3)}
    assert heard == expected | {(1, hashes.digests[2]): TOKENS[8:12].tolist()}


def test_a_row_that_ends_unloaded_leaves_nothing_to_be_found() -> None:
    ledger = Ledger(attention(4, FullReach()))
    ledger.evict(0)
    hashes = ledger.start(1)
    assert ledger.adopt(1, hashes) is not None
    ledger.kv.free(1)
    assert ledger.kv.lookup(hashes, len(TOKENS)).num_tokens == 0
    assert ledger.kv.num_free_blocks == ledger.kv.num_usable_blocks


def test_a_row_without_room_changes_nothing() -> None:
    ledger = Ledger(attention(4, FullReach()))
    ledger.evict(0)
    hashes = ledger.start(1)
    num_free = ledger.kv.num_free_blocks
    hit = ledger.hits.find(hashes, len(TOKENS))
    options = AllocateOptions(num_reserved_blocks=num_free - 2)
    assert ledger.hits.adopt(1, hit, num_local_tokens=0, options=options) is None
    assert ledger.kv.num_free_blocks == num_free
    ledger.kv.check_integrity()
