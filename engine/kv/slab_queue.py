"""Which group owns each slab of a pool, and the order in which a group's pages are reused.

Owns the slab table and, per group, the queue of free pages. Knows nothing of rows or tokens; how many pages may be
taken at all is SlabPools' to say.

    slab:   unowned --claimed--> active: some page held --last page freed--> idle: owned, no page held
                                    ^                                          |  |
                                    +----------- one of its pages touched -----+  +--claimed, by any group--> active
    page:   of an active slab: held, or free in its group's queue; of an idle slab: free, and goes with the slab

Two levels after Jenga (Zhang et al., "Jenga: Effective Memory Management for Serving LLM with Heterogeneity", SOSP
2025): pages that may be evicted keep the order of their last use, and a slab without a held page, whose age is that of
its most recently used page, may be evicted whole for any group. A group that lacks pages uses, in this order: its own
pages without a hash; slabs without any hash; then whatever was last used longest ago, a cached page in one of its own
active slabs or an idle slab of any group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.free_queue import FreeQueue
from blockferry.engine.kv.reach import cdiv
from blockferry.engine.kv.spec import SlabGeometry
from blockferry.engine.request import BoolArray, Int32Array, Int64Array

UNOWNED = -1
"""Owner of a slab that no group has been given."""
_ONE = np.int32(1)  # a Python 1 makes ufunc.at eight times slower
_NEVER = -1  # age of a slab that nothing is lost with


class SlabTable:
    """All slabs, numbered from 1. Mutated by its SlabQueues only.

    The tail, if there is one, counts as further slabs after the last one, which are never idle.
    """

    def __init__(self, geometry: SlabGeometry) -> None:
        num_tail = cdiv(geometry.tail_pages, geometry.pages_per_slab[geometry.tail_group])
        self.num_slabs = geometry.num_slabs
        self.owner: Int32Array = np.full(1 + geometry.num_slabs + num_tail, UNOWNED, np.int32)
        self.num_held: Int32Array = np.zeros(len(self.owner), np.int32)  # pages; one more where the slab is tail
        self.idle_since: Int64Array = np.full(len(self.owner), _NEVER, np.int64)  # clock, where idle
        self.idle = FreeQueue(geometry.num_slabs + 1)  # slabs without a held page, first to be claimed first
        self.clock = 0  # pages freed, ever
        self.promised = [0] * len(geometry.pages_per_slab)  # pages that each group may still take of what was granted
        self.queues: Sequence[SlabQueue] = ()  # per group
        self.owner[geometry.num_slabs + 1 :] = geometry.tail_group
        self.num_held[geometry.num_slabs + 1 :] = 1

    def num_spare(self, group: int) -> int:
        """Slabs that this group may claim without breaking what others were promised."""
        num_spare = self.idle.num_free
        for queue, num_pages in zip(self.queues, self.promised, strict=True):
            if num_pages and queue.group != group:
                num_spare -= queue.num_slabs_for(num_pages)
        return num_spare

    def claim(self, num_slabs: int, group: int) -> Int32Array:
        """Give the first idle slabs to a group; what they cached is lost."""
        slabs = self.idle.take(num_slabs)
        stale = slabs[self.idle_since[slabs] != _NEVER]
        if len(stale):
            owners = self.owner[stale]
            for queue in self.queues:
                queue.evict(stale[owners == queue.group])
        self.owner[slabs] = group
        return slabs

    def disown(self) -> None:
        """Take all slabs from their groups; none has a held or cached page."""
        assert self.idle.num_free == self.num_slabs, (self.idle.num_free, self.num_slabs)
        self.owner[: self.num_slabs + 1] = UNOWNED
        self.idle_since[:] = _NEVER
        self.idle = FreeQueue(self.num_slabs + 1)


class SlabQueue:
    """The FreeBlocks of one group: its pages in the order of reuse. Mutated by its BlockPool only."""

    def __init__(self, table: SlabTable, pool: BlockPool, *, group: int, geometry: SlabGeometry) -> None:
        """The pool's pages that lie in the tail are free, all others not yet its own."""
        self.group = group
        self.pages_per_slab = geometry.pages_per_slab[group]
        self._table = table
        self._pool = pool
        first_in_tail = 1 + geometry.num_slabs * self.pages_per_slab
        self.waiting = FreeQueue(pool.num_blocks, first_free=first_in_tail)  # free pages of active slabs
        self.num_held = 0
        self._freed_at: Int64Array = np.zeros(pool.num_blocks, np.int64)  # clock, where free
        self._within_slab: Int32Array = np.arange(1, self.pages_per_slab + 1, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Free pages of the slabs that the group owns. Cost: O(slabs)."""
        return self.waiting.num_free + len(self._own_idle()) * self.pages_per_slab

    @property
    def in_use(self) -> BoolArray:
        """Pages of the slabs that the group owns; shape [num_blocks]."""
        in_use: BoolArray = (
            self._table.owner[self.slab_of(np.arange(self._pool.num_blocks, dtype=np.int32))] == self.group
        )
        return in_use

    def num_slabs_for(self, num_pages: int) -> int:
        """Slabs that the group must claim to take num_pages, once every free page of its active slabs is taken."""
        missing = num_pages - self.waiting.num_free
        return cdiv(missing, self.pages_per_slab) if missing > 0 else 0

    def num_idle_slabs(self, block_ids: Int32Array) -> int:
        """Idle slabs that become active when these pages (or nulls) are touched."""
        slabs = self.slab_of(block_ids[block_ids != NULL_BLOCK_ID])
        return len(np.unique(slabs[self._table.num_held[slabs] == 0]))

    def take(self, num_blocks: int) -> Int32Array:
        """Remove and return num_blocks free pages, claiming slabs where that is better or needed.

        Cost: O(num_blocks) amortised: a slab's pages are visited once per claim, which at least one page is taken of.
        """
        self._claim_for(num_blocks)
        block_ids = self.waiting.take(num_blocks)
        self._hold(block_ids)
        return block_ids

    def remove(self, block_ids: Int32Array) -> None:
        """Take these free pages out; the others of their slabs, if those were idle, wait for reuse from now on."""
        slabs = self.slab_of(block_ids)
        assert (self._table.owner[slabs] == self.group).all(), (self.group, block_ids)
        woken = np.unique(slabs[self._table.num_held[slabs] == 0])
        if len(woken):
            self._table.idle.remove(woken)
            pages = self.pages_of(woken).ravel()
            has_hash = self._pool.has_hash(pages)
            cached = pages[has_hash]
            self.waiting.push_front(pages[~has_hash])
            self.waiting.push_back(cached[np.argsort(self._freed_at[cached])])
        self.waiting.remove(block_ids)
        self._hold(block_ids)

    def push_back(self, block_ids: Int32Array) -> None:
        """Free these pages: they are reused last."""
        if len(block_ids):
            self.waiting.push_back(self._let_go(block_ids))

    def push_front(self, block_ids: Int32Array) -> None:
        """Free these pages: they are reused first."""
        if len(block_ids):
            self.waiting.push_front(self._let_go(block_ids))

    def is_free(self, block_ids: Int32Array) -> BoolArray:
        """Which of these pages are the group's and free."""
        is_owned = self._table.owner[self.slab_of(block_ids)] == self.group
        is_free: BoolArray = is_owned & (self._pool.ref_cnt[block_ids] == 0)
        return is_free

    def order(self) -> Int32Array:
        """Every free page: those of active slabs in the order of reuse, then those of idle slabs. Cost: O(pool)."""
        return np.concatenate([self.waiting.order(), self.pages_of(self._own_idle()).ravel()])

    def evict(self, slabs: Int32Array) -> None:
        """Drop the hashes of idle slabs' pages."""
        if len(slabs):
            self._pool.evict(self.pages_of(slabs).ravel())

    def slab_of(self, block_ids: Int32Array) -> Int32Array:
        """Slab of each page; 0 for null."""
        slabs: Int32Array = (block_ids + np.int32(self.pages_per_slab - 1)) // np.int32(self.pages_per_slab)
        return slabs

    def pages_of(self, slabs: Int32Array) -> Int32Array:
        """Pages of each slab; shape [S, pages_per_slab]."""
        pages: Int32Array = (slabs[:, None] - 1) * np.int32(self.pages_per_slab) + self._within_slab
        return pages

    def _claim_for(self, num_pages: int) -> None:
        """Claim slabs until the first num_pages waiting are the ones to take.

        Between cached pages and idle slabs, both in the order of last use, the older goes; a slab counts for all its
        pages. So the s-th slab is claimed iff those before it, with the pages older than it, do not suffice.
        """
        table = self._table
        first = self.waiting.peek(num_pages)
        cached = first[self._pool.has_hash(first)]
        missing = num_pages - len(first) + len(cached)
        if not missing or not table.idle.num_free:
            return
        needed = self.num_slabs_for(num_pages)
        limit = max(needed, min(cdiv(missing, self.pages_per_slab), table.num_spare(self.group)))
        slabs = table.idle.peek(limit)
        page_ages = np.maximum.accumulate(self._freed_at[cached])
        older_pages = page_ages.searchsorted(table.idle_since[slabs], side="right")
        supply_before = older_pages + np.arange(len(slabs)) * self.pages_per_slab
        num_claimed = max(needed, int(supply_before.searchsorted(missing)))
        if num_claimed:
            self.waiting.push_front(self.pages_of(table.claim(num_claimed, self.group)).ravel())

    def _hold(self, block_ids: Int32Array) -> None:
        np.add.at(self._table.num_held, self.slab_of(block_ids), _ONE)
        self.num_held += len(block_ids)
        promised = self._table.promised
        promised[self.group] = max(0, promised[self.group] - len(block_ids))

    def _let_go(self, block_ids: Int32Array) -> Int32Array:
        """Count pages as free; those that stay in active slabs. Idle slabs take the others along."""
        table = self._table
        self._freed_at[block_ids] = np.arange(table.clock, table.clock + len(block_ids))
        table.clock += len(block_ids)
        self.num_held -= len(block_ids)
        slabs = self.slab_of(block_ids)
        np.subtract.at(table.num_held, slabs, _ONE)
        is_idle = table.num_held[slabs] == 0
        if not is_idle.any():
            return block_ids
        self._retire(_unique_by_last(slabs[is_idle]))
        staying: Int32Array = block_ids[~is_idle]
        return staying

    def _retire(self, slabs: Int32Array) -> None:
        """Queue slabs that have become idle, in this order."""
        pages = self.pages_of(slabs)
        waiting = pages[self.waiting.is_free(pages)]
        if len(waiting):
            self.waiting.remove(waiting)
        has_hash = self._pool.has_hash(pages).any(axis=1)
        self._table.idle_since[slabs] = np.where(has_hash, self._freed_at[pages].max(axis=1), _NEVER)
        self._table.idle.push_front(slabs[~has_hash])
        self._table.idle.push_back(slabs[has_hash])

    def _own_idle(self) -> Int32Array:
        idle = self._table.idle.order()
        own: Int32Array = idle[self._table.owner[idle] == self.group]
        return own


def _unique_by_last(slabs: Int32Array) -> Int32Array:
    """Each slab once, in the order of where it comes last."""
    _, from_end = np.unique(slabs[::-1], return_index=True)
    if len(from_end) == len(slabs):
        return slabs
    unique: Int32Array = slabs[::-1][np.sort(from_end)[::-1]]
    return unique
