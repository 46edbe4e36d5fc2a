"""The pools of a ledger whose groups have pages of different sizes, carved out of slabs.

Owns the pools and answers what fits; which slab a page comes from is SlabQueue's to decide.

A group that must take `need` pages beside the `free` ones of its active slabs claims ceil((need - free) / pages per
slab) idle slabs, but at least as many as its hit wakes. Where all groups' claims together are no more than the idle
slabs, every order of takes succeeds: what was granted is remembered, and no group claims a slab that another group
needs for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.events import EventLog
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.reach import NEVER_DROPPING, cdiv
from blockferry.engine.kv.slab_queue import UNOWNED, SlabQueue, SlabTable
from blockferry.engine.kv.spec import KVCacheGroup, SlabGeometry
from blockferry.engine.request import BoolArray, Int32Array


class SlabPools:
    """One pool per group over common slabs.

    The unit of num_free, num_usable and num_reserved is the smallest page: a free page of group g counts as many
    units as pages of the group with most pages per slab fit its share of a slab. So a share of config.num_blocks is
    about that share of the memory, and num_free = num_usable iff nothing is held.
    """

    def __init__(
        self,
        geometry: SlabGeometry,
        groups: Sequence[KVCacheGroup],
        *,
        index: PrefixIndex,
        events: EventLog | None = None,
    ) -> None:
        """Raises ValueError for a geometry of other groups."""
        if len(geometry.pages_per_slab) != len(groups):
            raise ValueError(
                f"the slab geometry has {len(geometry.pages_per_slab)} groups, the KV cache {len(groups)}; "
                "take both from one plan"
            )
        self.pools = tuple(
            BlockPool(1 + geometry.num_pages(group), index=index, events=events) for group in range(len(groups))
        )
        self._table = SlabTable(geometry)
        self._queues = tuple(
            SlabQueue(self._table, pool, group=group, geometry=geometry) for group, pool in enumerate(self.pools)
        )
        self._table.queues = self._queues
        for pool, queue in zip(self.pools, self._queues, strict=True):
            pool.queue = queue
        self._geometry = geometry
        self._index = index
        self._has_stalled = False  # whether the last question without a hit was refused though memory is there
        self._is_dropping = [group.spec.kind not in NEVER_DROPPING for group in groups]
        self._pages_per_slab: Int32Array = np.array(geometry.pages_per_slab, np.int32)
        # exact arithmetic in fractions of a slab that are whole numbers for every page
        self._slab_parts = math.lcm(*geometry.pages_per_slab)
        self._page_parts = [self._slab_parts // pages for pages in geometry.pages_per_slab]
        self._unit_parts = self._slab_parts // max(geometry.pages_per_slab)
        self.num_usable = (
            geometry.num_slabs * self._slab_parts + geometry.tail_pages * self._page_parts[geometry.tail_group]
        ) // self._unit_parts

    def pool_of(self, group: int) -> int:
        """Its own."""
        return group

    @property
    def num_free(self) -> int:
        """Units that are not held: free pages of active slabs, and idle slabs."""
        return self._num_free_parts() // self._unit_parts

    def count_units(self, needs: Sequence[int]) -> int:
        """Their shares of slabs, rounded up."""
        return cdiv(sum(need * parts for need, parts in zip(needs, self._page_parts, strict=True)), self._unit_parts)

    def can_hold(self, needs: Sequence[int]) -> bool:
        """Whether one sequence that holds at most needs[g] pages of each group g always gets them when it is alone.

        A type that drops pages as it goes holds a run of those it took, which may begin and end inside slabs, and
        may leave its part of the tail cached.
        """
        num_slabs = 0
        for group, (need, pages) in enumerate(zip(needs, self._geometry.pages_per_slab, strict=True)):
            if self._is_dropping[group]:
                num_slabs += cdiv(need - 1, pages) + 1 if need else 0
            else:
                num_slabs += cdiv(max(0, need - self._num_tail_pages(group)), pages)
        return num_slabs <= self._geometry.num_slabs

    def fits(self, needs: Sequence[int], *, hits: Sequence[Int32Array] = (), num_reserved: int = 0) -> bool:
        """Whether needs[g] pages of each group g, hits[g] among them, can be taken with num_reserved units left over.

        If so they are promised until the next question. A hit that would be tried for ever (see _is_hopeless) is
        refused and made unfindable: the next lookup finds a shorter one, or in the end none.
        """
        self._table.promised[:] = [0] * len(self.pools)
        has_hit = any(len(block_ids) for block_ids in hits)
        num_slabs = 0
        for group, (queue, need) in enumerate(zip(self._queues, needs, strict=True)):
            num_woken = queue.num_idle_slabs(hits[group]) if hits else 0
            num_slabs += max(num_woken, queue.num_slabs_for(need))
        is_short = num_slabs > self._table.idle.num_free
        is_scattered = is_short and self._fits_dense(needs)
        if has_hit and self._is_hopeless(is_scattered=is_scattered):
            for pool, block_ids in zip(self.pools, hits, strict=True):
                pool.drop_hashes(block_ids)
            return False
        if not has_hit:
            self._has_stalled = is_scattered
        if is_short:
            return False
        need_parts = sum(need * parts for need, parts in zip(needs, self._page_parts, strict=True))
        if self._num_free_parts() - need_parts < num_reserved * self._unit_parts:
            return False
        self._table.promised[:] = needs
        return True

    def num_leading(self, needs: Int32Array) -> int:
        """How many leading rows' needs [R, G] can be taken together; they are promised until the next question."""
        waiting = np.array([queue.waiting.num_free for queue in self._queues])
        missing = np.maximum(np.cumsum(needs, axis=0) - waiting, 0)
        num_slabs = (-(-missing // self._pages_per_slab)).sum(axis=1)
        num_rows = int(np.searchsorted(num_slabs, self._table.idle.num_free, side="right"))
        self._table.promised[:] = needs[:num_rows].sum(axis=0).tolist()
        self._has_stalled = num_rows == 0 and self._fits_dense(needs[0].tolist())
        return num_rows

    def clear_hashes(self) -> None:
        """Empty the prefix cache; nothing is held, so no group owns a slab any more."""
        for pool in self.pools:
            pool.forget_hashes()
        self._index.clear()
        self._table.disown()

    def check(self) -> None:
        """Prove the slab table: owners, held pages, idle slabs and waiting pages. Raises LedgerCorrupted. O(pool)."""
        table = self._table
        num_slabs = self._geometry.num_slabs
        is_idle = np.zeros(len(table.owner), np.bool_)
        is_idle[table.idle.order()] = True
        if np.count_nonzero(is_idle) != table.idle.num_free:
            raise LedgerCorrupted(f"{np.count_nonzero(is_idle)} slabs are idle, but {table.idle.num_free} are counted")
        num_held = np.zeros(len(table.owner), np.int64)
        num_held[num_slabs + 1 :] = 1
        for queue, pool in zip(self._queues, self.pools, strict=True):
            num_held += self._check_group(queue, pool, is_idle)
        _require_none(num_held != table.num_held, "slabs count another number of held pages than there are")
        is_unheld = num_held == 0
        is_unheld[NULL_BLOCK_ID] = False
        _require_none(is_unheld != is_idle, "slabs without held page are not idle, or idle ones have one")
        _require_none((table.owner == UNOWNED)[1:] & ~is_idle[1:], "slabs without owner are in use")
        if is_idle[num_slabs + 1 :].any() or (table.owner[num_slabs + 1 :] != self._geometry.tail_group).any():
            raise LedgerCorrupted("the tail has left its group")

    def _check_group(self, queue: SlabQueue, pool: BlockPool, is_idle: BoolArray) -> Int32Array:
        """Held pages of a group per slab."""
        block_ids = np.arange(1, pool.num_blocks, dtype=np.int32)
        slabs = queue.slab_of(block_ids)
        is_own = self._table.owner[slabs] == queue.group
        is_held = pool.ref_cnt[1:] > 0
        _require_none(is_held & ~is_own, f"pages of group {queue.group} are held in slabs of others")
        _require_none(pool.has_hash(block_ids) & ~is_own, f"pages of group {queue.group} are cached in such slabs")
        is_waiting = queue.waiting.is_free(block_ids)
        should_wait = is_own & ~is_idle[slabs] & ~is_held
        _require_none(is_waiting != should_wait, f"pages of group {queue.group} do not wait where they should")
        if np.count_nonzero(is_waiting) != queue.waiting.num_free:
            raise LedgerCorrupted(f"group {queue.group} counts {queue.waiting.num_free} waiting pages")
        if np.count_nonzero(is_held) != queue.num_held:
            raise LedgerCorrupted(f"group {queue.group} counts {queue.num_held} held pages")
        counts: Int32Array = np.bincount(slabs[is_held], minlength=len(is_idle)).astype(np.int32)
        return counts

    def _is_hopeless(self, *, is_scattered: bool) -> bool:
        """Whether a hit stands in the way of a sequence that is alone.

        A hit's blocks may lie in many slabs, each with room only for its own group. A sequence that would fit in an
        empty pool may then be refused, or stall as it grows, end, and find the same hit again.
        """
        return (is_scattered or self._has_stalled) and self.num_free == self.num_usable

    def _fits_dense(self, needs: Sequence[int]) -> bool:
        """Whether the needs would fit, if what is held were in as few slabs as possible."""
        num_slabs = 0
        for group, (queue, need) in enumerate(zip(self._queues, needs, strict=True)):
            num_pages = queue.num_held + need - self._num_tail_pages(group)
            num_slabs += cdiv(max(0, num_pages), queue.pages_per_slab)
        return num_slabs <= self._geometry.num_slabs

    def _num_free_parts(self) -> int:
        waiting = zip(self._queues, self._page_parts, strict=True)
        return self._table.idle.num_free * self._slab_parts + sum(
            queue.waiting.num_free * parts for queue, parts in waiting
        )

    def _num_tail_pages(self, group: int) -> int:
        return self._geometry.tail_pages if group == self._geometry.tail_group else 0


def _require_none(bad: BoolArray, what: str) -> None:
    if bad.any():
        raise LedgerCorrupted(f"{what}: {np.flatnonzero(bad)[:8].tolist()} ({int(np.count_nonzero(bad))} in all)")
