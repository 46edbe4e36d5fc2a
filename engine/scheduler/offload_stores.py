"""What an instance's tiers keep: blocks that its pool reuses or that nobody holds go to memory, cold ones to disk.

Owns the stores under way; the pool's observer. A store takes nothing from the pool: its blocks may be reused at once,
by a plan that waits for it (StepPlan.wait_stored) or by a load that is given later. So it delays no admission and loses
no race, and a step at most by the copy of what it overwrites.

    pool evicts a block --------------------> store now; the plan that reuses it waits for the job
    nobody holds a block any more (idle) ---> store when the pass ends; evicted meanwhile: as above
    blocks of the memory that are next to go -> copied to disk, so that they can go
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import numpy as np

from blockferry.connectors.offload_base import CopyKind, CopyPart
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.tier_ledger import NO_BLOCK, TierLedger
from blockferry.engine.kv.tier_policies import TierKey
from blockferry.engine.request import Int32Array
from blockferry.engine.scheduler.offload_jobs import JobOutcome, Jobs

_MAX_STORING = 0.25  # share of the memory that may be stores under way; more are skipped
_DEMOTE_ABOVE = 0.5  # share of the memory that is in use before anything is copied to disk
_DEMOTE_BLOCKS = 32  # a job
_DEMOTE_JOBS = 2  # under way


class StoreWhen(enum.StrEnum):
    """When blocks are stored."""

    ON_FINISH = "on_finish"  # as soon as nobody holds them
    ON_EVICTION = "on_eviction"  # when the pool reuses them


class Stores:
    """Everything that is written into one instance's tiers. Called by its Tiers and by the pools of its ledger."""

    def __init__(
        self, kv: KVCacheManager, *, memory: TierLedger, disk: TierLedger | None, jobs: Jobs, when: StoreWhen
    ) -> None:
        self._pools = kv.parts.shared.pools.pools
        self._index = kv.parts.index
        self._memory = memory
        self._disk = disk
        self._jobs = jobs
        self._when = when
        self._evicted: dict[TierKey, int] = {}  # block that carried the content
        self._idle: list[tuple[int, Int32Array]] = []  # pool, blocks
        self._job_of: list[Int32Array] = [np.zeros(pool.num_blocks, np.int32) for pool in self._pools]
        self._guard = 0  # last job whose blocks are being reused
        self._num_storing = 0  # units
        self._has_news = False  # something became ready since the last look for what may go to disk
        self.num_skipped = 0  # blocks not stored, as too many were under way
        for number, pool in enumerate(self._pools):
            pool.observer = _Watch(self, number)

    def blocks_idled(self, pool: int, block_ids: Int32Array) -> None:
        """Nobody holds these any more."""
        if self._when is StoreWhen.ON_FINISH:
            self._idle.append((pool, block_ids))

    def blocks_evicted(self, pool: int, block_ids: Int32Array) -> None:
        """These are reused; the plan being put together, or a load, is to write them."""
        job_of = self._job_of[pool]
        self._guard = max(self._guard, int(job_of[block_ids].max(initial=0)))
        job_of[block_ids] = 0
        for block_id in block_ids.tolist():
            for key in self._keys_of(pool, block_id):
                self._evicted.setdefault(key, block_id)

    def seal(self, last_step: int) -> int:
        """Begin to store what was evicted; the job that whoever writes those blocks must wait for, 0 for none.

        last_step: no later step writes what the blocks are stored for.
        """
        if self._evicted:
            evicted, self._evicted = self._evicted, {}
            self._guard = self._store(evicted, last_step) or self._guard
        return self._guard if self._jobs.is_under_way(self._guard) else 0

    def flush(self, last_step: int) -> None:
        """Begin to store what is idle, and to copy to disk what is cold."""
        self.seal(last_step)
        idle, self._idle = self._idle, []
        found: dict[TierKey, int] = {}
        for number, block_ids in idle:
            pool = self._pools[number]
            still_idle = block_ids[pool.has_hash(block_ids) & pool.queue.is_free(block_ids)]
            for block_id in still_idle.tolist():
                for key in self._keys_of(number, block_id):
                    found.setdefault(key, block_id)
        if found:
            self._store(found, last_step)
        if self._has_news and self._disk is not None:
            self._demote(self._disk)

    def forget(self) -> None:
        """No job ends any more, and nothing is to be stored."""
        for pool in self._pools:
            pool.observer = None
        self._evicted.clear()
        self._idle.clear()

    # steps of the above

    def _keys_of(self, pool: int, block_id: int) -> list[TierKey]:
        places = self._pools[pool].places_of(block_id)
        return [TierKey(self._index.group(place), self._index.digest(place)) for place in places]

    def _store(self, contents: Mapping[TierKey, int], last_step: int) -> int:
        """Begin to store contents, each from its block; the job's id, 0 for none."""
        if self._num_storing >= _MAX_STORING * self._memory.num_units:
            self.num_skipped += len(contents)
            return 0
        groups = np.array([key.group for key in contents], np.int32)
        block_ids = np.array([*contents.values()], np.int32)
        stored = self._memory.begin_store(groups, [key.digest for key in contents])
        is_given = stored != NO_BLOCK
        if not is_given.any():
            return 0
        groups, block_ids, stored = groups[is_given], block_ids[is_given], stored[is_given]
        num_units = sum(self._memory.units_per_block[group] for group in groups.tolist())
        self._num_storing += num_units

        def end(outcome: JobOutcome) -> None:
            self._num_storing -= num_units
            self._has_news = True
            (self._memory.end_store if outcome.is_done else self._memory.fail_store)(stored)

        parts = [
            CopyPart(
                group=group,
                block_ids=block_ids[groups == group],
                units=self._memory.units_of(stored[groups == group], group),
            )
            for group in np.unique(groups).tolist()
        ]
        job_id = self._jobs.begin(CopyKind.STORE, parts, after_step=last_step, on_end=end)
        for number, pool in enumerate(self._pools):
            mine = block_ids if len(self._pools) == 1 else block_ids[groups == number]
            still_hashed = mine[pool.has_hash(mine)]
            self._job_of[number][still_hashed] = job_id
        return job_id

    def _demote(self, disk: TierLedger) -> None:
        """Copy to disk what is next to go of the memory."""
        memory = self._memory
        stats = memory.stats()
        if stats.num_free_units > (1.0 - _DEMOTE_ABOVE) * stats.num_units:
            self._has_news = False
            return
        if self._jobs.num_under_way(CopyKind.DEMOTE) >= _DEMOTE_JOBS:
            return
        cold = memory.coldest(max(_DEMOTE_BLOCKS, stats.num_blocks // 4))
        groups, digests = memory.groups_of(cold), memory.digests_of(cold)
        fresh = np.flatnonzero(~disk.knows(groups, digests))[:_DEMOTE_BLOCKS]
        if not len(fresh):
            self._has_news = False
            return
        cold, groups, digests = cold[fresh], groups[fresh], [digests[number] for number in fresh.tolist()]
        given = disk.begin_store(groups, digests)
        is_given = given != NO_BLOCK
        if is_given.any():
            self._begin_demotion(disk, cold[is_given], given[is_given])

    def _begin_demotion(self, disk: TierLedger, cold: Int32Array, given: Int32Array) -> None:
        memory = self._memory
        groups = memory.groups_of(cold)
        memory.spill(cold)

        def end(outcome: JobOutcome) -> None:
            memory.unpin(cold)
            (disk.end_store if outcome.is_done else disk.fail_store)(given)

        parts = []
        for group in np.unique(groups).tolist():
            mine = groups == group
            parts.append(
                CopyPart(
                    group=group,
                    units=memory.units_of(cold[mine], group),
                    disk_units=disk.units_of(given[mine], group),
                    digests=b"".join(memory.digests_of(cold[mine])),
                )
            )
        self._jobs.begin(CopyKind.DEMOTE, parts, after_step=-1, on_end=end)


class _Watch:
    """The PoolObserver of one pool."""

    def __init__(self, stores: Stores, pool: int) -> None:
        self._stores = stores
        self._pool = pool

    def idled(self, block_ids: Int32Array) -> None:
        """Tell the stores."""
        self._stores.blocks_idled(self._pool, block_ids)

    def evicted(self, block_ids: Int32Array) -> None:
        """Tell the stores."""
        self._stores.blocks_evicted(self._pool, block_ids)
