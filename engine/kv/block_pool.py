"""The block pool: which blocks are free, held by how many owners, and findable under which hash.

Owns all per-block state as arrays indexed by block id. Knows nothing of rows, tokens or cache types.

            take                        cache
    free ----------> held, no hash ---------------> held, hashed
     ^  ^  to front        |                            |   ^
     |  +------------------+ free         free, to back |   | touch
     |                                                  v   |
     +------------------------------------------- free, hashed (evictable)
          take: the hash is dropped as the block is reused
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from blockferry.engine.kv.events import AllBlocksCleared, BlockRemoved, EventLog
from blockferry.engine.kv.free_queue import FreeQueue
from blockferry.engine.kv.prefix_map import PrefixMap
from blockferry.engine.request import Int32Array

NULL_BLOCK_ID = 0
"""Placeholder of table entries that hold nothing; never free, never counted, never hashed."""

_NO_GROUP = -1
_NULL_GROUP = -2  # the null block is in no group and may join none


class BlockPool:
    """The blocks of one instance. Mutated by its KVCacheManager, from one thread.

    num_blocks includes the null block. Two blocks may carry one hash; there is no deduplication.
    """

    def __init__(self, num_blocks: int, *, num_groups: int = 1, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.ref_cnt: Int32Array = np.zeros(num_blocks, np.int32)
        # group whose hash the block carries; int16 as there are as many blocks as fit, but few groups
        self.hash_group = np.full(num_blocks, _NO_GROUP, np.int16)
        self.hash_group[NULL_BLOCK_ID] = _NULL_GROUP
        self.digests: list[bytes | None] = [None] * num_blocks
        self.queue = FreeQueue(num_blocks)
        self.prefix_maps = tuple(PrefixMap() for _ in range(num_groups))
        self.num_evicted = 0  # hashed blocks reused for something else, ever
        self.events = events

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self.queue.num_free

    def num_idle(self, block_ids: Int32Array) -> int:
        """How many of these cached blocks have no owner and so count as free now."""
        return int(np.count_nonzero(self.queue.is_free(block_ids)))

    def take(self, num_blocks: int) -> Int32Array:
        """Hand out blocks in LRU order with ref_cnt 1; hashes they still carried are dropped."""
        block_ids = self.queue.take(num_blocks)
        self.ref_cnt[block_ids] = 1
        stale = block_ids[self.hash_group[block_ids] != _NO_GROUP]
        if len(stale):
            self.num_evicted += len(stale)
            self.drop_hashes(stale)
        return block_ids

    def touch(self, block_ids: Int32Array) -> None:
        """Add an owner to each cached block (no id twice); free ones leave the queue."""
        idle = block_ids[self.ref_cnt[block_ids] == 0]
        if len(idle):
            self.queue.remove(idle)
        self.ref_cnt[block_ids] += 1

    def free(self, block_ids: Int32Array) -> None:
        """Drop an owner of each block (no id twice), in this order; null entries are skipped.

        Blocks without owners become free: those without a hash are reused first, hashed ones last.
        """
        block_ids = block_ids[block_ids != NULL_BLOCK_ID]
        ref_cnt = self.ref_cnt[block_ids] - 1
        assert (ref_cnt >= 0).all(), block_ids[ref_cnt < 0]
        self.ref_cnt[block_ids] = ref_cnt
        idle = block_ids[ref_cnt == 0]
        has_hash = self.hash_group[idle] != _NO_GROUP
        self.queue.push_front(idle[~has_hash])
        self.queue.push_back(idle[has_hash])

    def cache(self, group: int, block_ids: Int32Array, digests: Sequence[bytes]) -> None:
        """Let these held blocks be found under their digests. Null entries are skipped."""
        can_cache = self.hash_group[block_ids] == _NO_GROUP
        if not can_cache.all():
            assert (block_ids[~can_cache] == NULL_BLOCK_ID).all(), block_ids[~can_cache]
            digests, block_ids = list(compress(digests, can_cache)), block_ids[can_cache]
        self.hash_group[block_ids] = group
        ids = block_ids.tolist()
        self.prefix_maps[group].add(digests, ids)
        for block_id, digest in zip(ids, digests):
            self.digests[block_id] = digest

    def drop_hashes(self, block_ids: Int32Array) -> None:
        """Make blocks unfindable, in this order; the blocks themselves stay where they are."""
        hashed = block_ids[self.hash_group[block_ids] >= 0]
        for block_id, group in zip(hashed.tolist(), self.hash_group[hashed].tolist()):
            digest = self.digests[block_id]
            assert digest is not None, block_id
            self.digests[block_id] = None
            self.prefix_maps[group].remove(digest, block_id)
            if self.events is not None:
                self.events.add(BlockRemoved(group=group, block_hashes=(digest,)))
        self.hash_group[hashed] = _NO_GROUP

    def clear_hashes(self) -> None:
        """Empty the prefix cache; the order of reuse stays."""
        for prefix_map in self.prefix_maps:
            prefix_map.clear()
        self.hash_group[:] = _NO_GROUP
        self.hash_group[NULL_BLOCK_ID] = _NULL_GROUP
        self.digests = [None] * self.num_blocks
        if self.events is not None:
            self.events.add(AllBlocksCleared())
