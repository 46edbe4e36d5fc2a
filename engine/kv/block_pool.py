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

from typing import Protocol

import numpy as np

from blockferry.engine.kv.events import BlockRemoved, EventLog
from blockferry.engine.kv.free_queue import FreeBlocks, FreeQueue
from blockferry.engine.kv.prefix_index import NO_PLACE, Entries, PrefixIndex
from blockferry.engine.request import BoolArray, Int32Array

NULL_BLOCK_ID = 0
"""Placeholder of table entries that hold nothing; never free, never counted, never hashed."""


class PoolObserver(Protocol):
    """Hears of blocks that can be found and that nobody holds, while they still can be. Changes nothing of the pool."""

    def idled(self, block_ids: Int32Array) -> None:
        """These have lost their last owner; they wait for reuse."""

    def evicted(self, block_ids: Int32Array) -> None:
        """These are reused now; what they were found under is about to be forgotten."""


class BlockPool:
    """Blocks of one size. Mutated by its KVCacheManager, from one thread.

    num_blocks includes the null block. Two blocks may carry one hash; there is no deduplication. A block may carry
    several hashes of its group: of its tokens, and of a head of them that ends inside the block.
    """

    def __init__(self, num_blocks: int, *, index: PrefixIndex, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.ref_cnt: Int32Array = np.zeros(num_blocks, np.int32)
        self.place: Int32Array = np.zeros(num_blocks, np.int32)  # in the index; NO_PLACE without a hash
        self.further: dict[int, list[int]] = {}  # further places of a block, in order
        self.queue: FreeBlocks = FreeQueue(num_blocks)
        self.index = index
        self._has_tails = False  # whether a block that is not full was ever cached: only such a one is cached again
        self.num_evicted = 0  # hashed blocks reused for something else, ever
        self.events = events
        self.observer: PoolObserver | None = None

    @property
    def in_use(self) -> BoolArray:
        """Which block ids are part of the pool now; shape [num_blocks]."""
        return self.queue.in_use

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
        self.evict(block_ids)
        return block_ids

    def has_hash(self, block_ids: Int32Array) -> BoolArray:
        """Which of these blocks can be found; of the same shape."""
        has_hash: BoolArray = self.place.take(block_ids) != NO_PLACE
        return has_hash

    def evict(self, block_ids: Int32Array) -> None:
        """Make blocks unfindable, in this order, as they are used for something else."""
        places = self.place.take(block_ids)
        if np.count_nonzero(places):  # cheaper than any()
            stale = block_ids[places != NO_PLACE]
            self.num_evicted += len(stale)
            if self.observer is not None:
                self.observer.evicted(stale)
            self.drop_hashes(stale)

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
        if _has_repeats(block_ids):
            ref_cnt = self._drop_owners_again(block_ids)
        assert (ref_cnt >= 0).all(), block_ids[ref_cnt < 0]
        idle = block_ids if not ref_cnt.any() else block_ids[ref_cnt == 0]
        has_hash = self.place.take(idle) != NO_PLACE
        if has_hash.all():
            self.queue.push_back(idle)
        elif has_hash.any():
            self.queue.push_front(idle[~has_hash])
            self.queue.push_back(idle[has_hash])
        else:
            self.queue.push_front(idle)
        if self.observer is not None and has_hash.any():
            self.observer.idled(idle[has_hash])

    def cache(self, groups: Int32Array, block_ids: Int32Array, entries: Entries) -> None:
        """Let held blocks [N] of groups ([N] or [1]) be found under entries [N], and still under their heads' ones."""
        places = self.index.places(groups, entries.ids)
        if self._has_tails:
            for block_id, place in zip(block_ids.tolist(), self.place.take(block_ids).tolist(), strict=True):
                if place != NO_PLACE:
                    self.further.setdefault(block_id, []).insert(0, place)
        self.place[block_ids] = places
        if entries.are_fresh:
            self.index.add_to_fresh(places, block_ids)
        else:
            self.index.add(places, block_ids)

    def cache_also(self, group: int, block_id: int, entry: int) -> None:
        """Let a held block be found under one more entry."""
        self._cache_at(self.index.place(group, entry), block_id)

    def move_hashes(self, source: int, target: int) -> None:
        """Let target, a held block without hash, be found in place of source, which keeps its owners."""
        places = self.places_of(source)
        self.further.pop(source, None)
        self.place[source] = NO_PLACE
        # added before it is removed, so that no entry is ever without carrier
        for place in places:
            self._cache_at(place, target)
            self.index.remove(place, source)

    def drop_hashes(self, block_ids: Int32Array) -> None:
        """Make blocks unfindable, in this order; the blocks themselves stay where they are."""
        places = self.place.take(block_ids)
        hashed = places != NO_PLACE
        block_ids, places = block_ids[hashed], places[hashed]
        if self.events is None and not self.further:
            self.index.remove_in(places, block_ids)
        else:
            for block_id in block_ids.tolist():
                for place in self.places_of(block_id):
                    if self.events is not None:
                        group, digest = self.index.group(place), self.index.digest(place)
                        self.events.add(BlockRemoved(group=group, block_hashes=(digest,)))
                    self.index.remove(place, block_id)
                self.further.pop(block_id, None)
        self.place[block_ids] = NO_PLACE

    def forget_hashes(self) -> None:
        """Empty the prefix cache, as the index was emptied; the order of reuse stays."""
        self.place[:] = NO_PLACE
        self.further.clear()

    def entry_of(self, block_id: int) -> int:
        """The entry of a block's hash; NO_ENTRY where it carries none."""
        return int(self.place[block_id]) // self.index.num_groups

    def places_of(self, block_id: int) -> list[int]:
        """Where a block can be found in the index."""
        place = int(self.place[block_id])
        return [] if place == NO_PLACE else [place, *self.further.get(block_id, ())]

    def _cache_at(self, place: int, block_id: int) -> None:
        if self.index.carries(place, block_id):
            return
        if self.place[block_id] == NO_PLACE:
            self.place[block_id] = place
        else:
            self.further.setdefault(block_id, []).append(place)
        self._has_tails = True
        self.index.add(np.array([place], np.int32), np.array([block_id], np.int32))

    def _drop_owners_again(self, block_ids: Int32Array) -> Int32Array:
        """Owners left, per id, after free() has dropped but one of those that come twice; 1 where it comes again."""
        distinct, first, counts = np.unique(block_ids, return_index=True, return_counts=True)
        self.ref_cnt[distinct] -= (counts - 1).astype(np.int32)
        ref_cnt = self.ref_cnt[block_ids]
        is_again = np.ones(len(block_ids), np.bool_)
        is_again[first] = False
        ref_cnt[is_again & (ref_cnt == 0)] = 1
        return ref_cnt


def _has_repeats(block_ids: Int32Array) -> bool:
    if len(block_ids) < 2:
        return False
    in_order = np.sort(block_ids)
    return bool((in_order[1:] == in_order[:-1]).any())
