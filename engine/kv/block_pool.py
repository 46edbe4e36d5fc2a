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

import numpy as np

from blockferry.engine.kv.events import BlockRemoved, EventLog
from blockferry.engine.kv.free_queue import FreeQueue
from blockferry.engine.kv.prefix_index import NO_ENTRY, Entries, PrefixIndex
from blockferry.engine.request import BoolArray, Int32Array

NULL_BLOCK_ID = 0
"""Placeholder of table entries that hold nothing; never free, never counted, never hashed."""


class BlockPool:
    """Blocks of one size. Mutated by its KVCacheManager, from one thread.

    num_blocks includes the null block. Two blocks may carry one hash; there is no deduplication. A block may carry
    several hashes of its group: of its tokens, and of a head of them that ends inside the block.
    """

    def __init__(self, num_blocks: int, *, index: PrefixIndex, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.ref_cnt: Int32Array = np.zeros(num_blocks, np.int32)
        self.entry: Int32Array = np.zeros(num_blocks, np.int32)  # in the index; NO_ENTRY without a hash
        self.hash_group = np.zeros(num_blocks, np.int16)  # group of the hash, where there is one
        self.further: dict[int, list[int]] = {}  # further entries of a block, in order
        self.queue = FreeQueue(num_blocks)
        self._places: Int32Array = np.empty(num_blocks, np.int32)  # scratch of _has_repeats
        self.index = index
        self.num_evicted = 0  # hashed blocks reused for something else, ever
        self.events = events

    @property
    def in_use(self) -> BoolArray:
        """Which block ids are part of the pool; shape [num_blocks]."""
        return np.ones(self.num_blocks, np.bool_)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self.queue.num_free

    def num_idle(self, block_ids: Int32Array) -> int:
        """How many of these cached or null blocks have no owner and so count as free now."""
        return int(np.count_nonzero(self.queue.is_free(block_ids)))

    def take(self, num_blocks: int) -> Int32Array:
        """Hand out blocks in LRU order with ref_cnt 1; hashes they still carried are dropped."""
        block_ids = self.queue.take(num_blocks)
        self.ref_cnt[block_ids] = 1
        stale = block_ids[self.entry[block_ids] != NO_ENTRY]
        if len(stale):
            self.num_evicted += len(stale)
            self.drop_hashes(stale)
        return block_ids

    def touch(self, block_ids: Int32Array) -> None:
        """Add an owner to each block (no id twice); free ones leave the queue. Null entries are skipped."""
        block_ids = block_ids[block_ids != NULL_BLOCK_ID]
        idle = block_ids[self.ref_cnt[block_ids] == 0]
        if len(idle):
            self.queue.remove(idle)
        self.ref_cnt[block_ids] += 1

    def free(self, block_ids: Int32Array) -> None:
        """Drop an owner of each block, in this order; null entries are skipped, an id may come more than once.

        Blocks without owners become free: those without a hash are reused first, hashed ones last.
        """
        block_ids = block_ids[block_ids != NULL_BLOCK_ID]
        ref_cnt = self.ref_cnt[block_ids] - np.int32(1)
        self.ref_cnt[block_ids] = ref_cnt
        if self._has_repeats(block_ids):
            ref_cnt = self._drop_owners_again(block_ids)
        assert (ref_cnt >= 0).all(), block_ids[ref_cnt < 0]
        idle = block_ids[ref_cnt == 0]
        has_hash = self.entry[idle] != NO_ENTRY
        self.queue.push_front(idle[~has_hash])
        self.queue.push_back(idle[has_hash])

    def cache(self, groups: Int32Array, block_ids: Int32Array, entries: Entries) -> None:
        """Let held blocks [N] of groups ([N] or [1]) be found under entries [N], and still under their heads' ones."""
        before = self.entry[block_ids]
        if before.any():
            for block_id in block_ids[before != NO_ENTRY].tolist():
                self.further.setdefault(block_id, []).insert(0, int(self.entry[block_id]))
        self.hash_group[block_ids] = groups
        self.entry[block_ids] = entries.ids
        if entries.are_fresh:
            self.index.add_to_fresh(groups, entries.ids, block_ids)
        else:
            self.index.add(groups, entries.ids, block_ids)

    def cache_also(self, group: int, block_id: int, entry: int) -> None:
        """Let a held block be found under one more entry."""
        if self.index.carries(group, entry, block_id):
            return
        if self.entry[block_id] == NO_ENTRY:
            self.entry[block_id] = entry
            self.hash_group[block_id] = group
        else:
            self.further.setdefault(block_id, []).append(entry)
        self.index.add(*(np.array([number], np.int32) for number in (group, entry, block_id)))

    def move_hashes(self, source: int, target: int) -> None:
        """Let target, a held block without hash, be found in place of source, which keeps its owners."""
        group = int(self.hash_group[source])
        entries = self._entries_of(source)
        self.further.pop(source, None)
        self.entry[source] = NO_ENTRY
        # added before it is removed, so that no entry is ever without carrier
        for entry in entries:
            self.cache_also(group, target, entry)
            self.index.remove(group, entry, source)

    def drop_hashes(self, block_ids: Int32Array) -> None:
        """Make blocks unfindable, in this order; the blocks themselves stay where they are."""
        hashed = block_ids[self.entry[block_ids] != NO_ENTRY]
        for block_id, group in zip(hashed.tolist(), self.hash_group[hashed].tolist()):
            for entry in self._entries_of(block_id):
                digest = self.index.digest(entry)
                self.index.remove(group, entry, block_id)
                if self.events is not None:
                    self.events.add(BlockRemoved(group=group, block_hashes=(digest,)))
            self.further.pop(block_id, None)
        self.entry[hashed] = NO_ENTRY

    def forget_hashes(self) -> None:
        """Empty the prefix cache, as the index was emptied; the order of reuse stays."""
        self.entry[:] = NO_ENTRY
        self.further.clear()

    def _has_repeats(self, block_ids: Int32Array) -> bool:
        """Whether an id comes twice. Cost: two passes over block_ids."""
        places = np.arange(len(block_ids), dtype=np.int32)
        self._places[block_ids] = places
        return not bool((self._places[block_ids] == places).all())

    def _drop_owners_again(self, block_ids: Int32Array) -> Int32Array:
        """Owners left, per id, after free() has dropped but one of those that come twice; 1 where it comes again."""
        distinct, first, counts = np.unique(block_ids, return_index=True, return_counts=True)
        self.ref_cnt[distinct] -= (counts - 1).astype(np.int32)
        ref_cnt = self.ref_cnt[block_ids]
        is_again = np.ones(len(block_ids), np.bool_)
        is_again[first] = False
        ref_cnt[is_again & (ref_cnt == 0)] = 1
        return ref_cnt

    def _entries_of(self, block_id: int) -> list[int]:
        return [int(self.entry[block_id]), *self.further.get(block_id, ())]
