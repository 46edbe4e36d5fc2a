"""One instance's tiers: what a waiting sequence finds in memory and on disk is loaded into the pool before it computes.

Owns the tiers' ledgers and the loads; offload_stores.py has what is written, offload_jobs.py the jobs of both.

    waiting --tiers hold more than the pool--> LOADING --every rank has its bytes--> PREFILL from the loaded length on
       ^                                        |  |  |
       |  policy recompute: without tiers       |  |  +-- aborted: the row ends
       +--- some bytes are missing, or late ----+  +----- policy fail: the request ends

A row's blocks that bytes may still reach are popped from it when it ends and released when the last rank has reported.
Bytes land once a rank has executed the steps planned before the blocks were taken, and the one that clears or copies
into them where there is such a one; ranks see to that themselves, so that none depends on another's pace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart
from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.tier_hits import LoadedBlocks, TierHits
from blockferry.engine.kv.tier_ledger import TierLedger
from blockferry.engine.request import Int32Array
from blockferry.engine.scheduler import sequence as scheduled
from blockferry.engine.scheduler.batch import Phase
from blockferry.engine.scheduler.handoff import LoadFailurePolicy
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.offload_jobs import JobOutcome, Jobs
from blockferry.engine.scheduler.offload_seam import NOTHING_ENDED, LoadFailed, LoadsEnded
from blockferry.engine.scheduler.offload_stores import Stores, StoreWhen

MEMORY, DISK = 0, 1  # numbers of tiers: memory is asked first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """How an instance uses its tiers."""

    when: StoreWhen = StoreWhen.ON_FINISH
    min_load_tokens: int = 1  # fewer are computed rather than loaded
    load_timeout_s: float = 30.0
    policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Load:
    """What is loaded for one row. Owned by Offloading."""

    sequence: scheduled.Sequence
    row: int
    loaded: tuple[LoadedBlocks, ...]
    num_local_tokens: int  # that the pool holds
    num_tokens: int  # that are loaded beyond those
    deadline_s: float
    num_jobs: int = 0  # under way
    failure: str = ""
    popped: tuple[Int32Array, ...] | None = None  # blocks of a row that has ended


class Offloading:
    """The Tiers of one instance. Called by the scheduler's thread."""

    def __init__(
        self,
        instance: Instance,
        *,
        memory: TierLedger,
        disk: TierLedger | None = None,
        options: OffloadOptions = OffloadOptions(),
    ) -> None:
        """Takes its place as the instance's tiers; memory and disk are its own."""
        self._instance = instance
        self._kv = instance.kv
        self._tiers = (memory,) if disk is None else (memory, disk)
        self._options = options
        self._jobs = Jobs(num_ranks=instance.num_ranks)
        self._hits = TierHits(instance.kv, self._tiers)
        self._stores = Stores(instance.kv, memory=memory, disk=disk, jobs=self._jobs, when=options.when)
        self._loads: dict[int, _Load] = {}  # by row, while it is LOADING
        self._quiescing: list[_Load] = []  # whose rows have ended
        self._over: list[_Load] = []  # of loads whose last job has just ended
        self._num_loaded_tokens = 0
        self._num_loaded_blocks = [0, 0]  # per tier
        self._num_failed_loads = 0
        instance.tiers = self

    # from waiting to loading

    def num_loadable_tokens(self, hashes: RequestHashes, num_tokens: int, hit: PrefixHit) -> int:
        """Tokens of a sequence that would be loaded beyond what the pool holds; takes nothing (Tiers)."""
        return self._worth_loading(self._hits.find(hashes, num_tokens), hit)

    def load(self, sequence: scheduled.Sequence, hit: PrefixHit | None, *, num_kept_blocks: int, now_s: float) -> bool:
        """Give a waiting sequence a row and blocks, and load what tiers hold of it beyond hit (Tiers)."""
        if hit is None or not sequence.can_load:
            return False
        joint = self._hits.find(sequence.hashes, len(sequence.token_ids))
        num_tokens = self._worth_loading(joint, hit)
        if not num_tokens:
            return False
        instance, found = self._instance, list[tuple[LoadedBlocks, ...]]()
        options = instance.options(sequence, None, num_kept_blocks)

        def take(row: int) -> bool:
            loaded = self._hits.adopt(row, joint, num_local_tokens=hit.num_tokens, options=options)
            found.extend([] if loaded is None else [loaded])
            return loaded is not None

        row = instance.place(sequence, take, phase=Phase.LOADING, num_hit_tokens=joint.num_tokens)
        if row is None:
            return False
        instance.queue.remove(sequence)
        sequence.junction = joint.junction
        self._loads[row] = _Load(
            sequence=sequence,
            row=row,
            loaded=found[0],
            num_local_tokens=hit.num_tokens,
            num_tokens=num_tokens,
            deadline_s=now_s + self._options.load_timeout_s,
        )
        self._begin(self._loads[row])
        return True

    def _worth_loading(self, joint: PrefixHit, hit: PrefixHit) -> int:
        """Tokens that are to be loaded beyond hit; 0 where computing them is better."""
        num_tokens = joint.num_tokens - hit.num_tokens
        return num_tokens if num_tokens >= max(1, self._options.min_load_tokens) else 0

    def _begin(self, load: _Load) -> None:
        """Give the jobs, after the store of whatever the new blocks held."""
        instance = self._instance
        for one in load.loaded:  # before stores make room for others
            self._tiers[one.tier].pin(one.tier_blocks)
        self._stores.seal(instance.last_step)
        after_step = instance.last_step + int(self._kv.has_orders)
        instance.fence_step = max(instance.fence_step, after_step)
        for number, kind in ((MEMORY, CopyKind.LOAD), (DISK, CopyKind.FETCH)):
            blocks = [one for one in load.loaded if one.tier == number]
            if not blocks:
                continue
            parts = [self._part(one) for one in blocks]
            load.num_jobs += 1
            self._jobs.begin(
                kind,
                parts,
                after_step=after_step,
                on_end=functools.partial(self._end_job, load, blocks),
            )

    def _part(self, one: LoadedBlocks) -> CopyPart:
        units = self._tiers[one.tier].units_of(one.tier_blocks, one.group)
        if one.tier == MEMORY:
            return CopyPart(group=one.group, block_ids=one.block_ids, units=units)
        return CopyPart(group=one.group, block_ids=one.block_ids, disk_units=units, digests=b"".join(one.digests))

    # the end of a load

    def _end_job(self, load: _Load, blocks: Sequence[LoadedBlocks], outcome: JobOutcome) -> None:
        for one in blocks:
            tier = self._tiers[one.tier]
            if outcome.is_done:
                self._num_loaded_blocks[one.tier] += len(one.tier_blocks)
            else:
                tier.discard(one.tier_blocks[tier.are_ready(one.tier_blocks)])
            tier.unpin(one.tier_blocks)
        load.failure = load.failure or outcome.reason
        load.num_jobs -= 1
        if not load.num_jobs:
            self._over.append(load)

    def on_event(self, event: CopyEvent, now_s: float) -> LoadsEnded:
        """A rank has ended its part of a job (Tiers)."""
        del now_s
        self._jobs.on_event(event)
        over, self._over = self._over, []
        return self._fail([load for load in over if not self._settle(load)])

    def _settle(self, load: _Load) -> bool:
        """All ranks have reported a load; False when its row is there, but not all of its bytes."""
        if load.popped is not None:
            self._quiescing.remove(load)
            self._kv.release(load.popped)
            return True
        if load.failure:
            return False
        del self._loads[load.row]
        self._hits.cache(load.row, load.loaded, load.sequence.hashes)
        self._instance.start_prefill(load.sequence)
        load.sequence.ticket.num_loaded_tokens += load.num_tokens
        self._num_loaded_tokens += load.num_tokens
        return True

    def expire(self, now_s: float) -> LoadsEnded:
        """Give up loads that take too long (Tiers)."""
        late = [load for load in self._loads.values() if now_s >= load.deadline_s]
        for load in late:
            load.failure = f"not there within {self._options.load_timeout_s:g} s"
        return self._fail(late)

    def _fail(self, loads: Sequence[_Load]) -> LoadsEnded:
        """By policy: what waits is computed, or its request ends."""
        if not loads:
            return NOTHING_ENDED
        self._num_failed_loads += len(loads)
        if self._options.policy is LoadFailurePolicy.FAIL:
            return LoadsEnded(failed=tuple(self._describe(load) for load in loads))
        for load in loads:
            load.sequence.can_load = False
            ticket = load.sequence.ticket
            ticket.num_cached_tokens = min(ticket.num_cached_tokens, load.num_local_tokens)
            self._instance.start_over(load.sequence)
        return LoadsEnded(restarted=tuple(load.sequence for load in loads))

    def _describe(self, load: _Load) -> LoadFailed:
        where = self._instance.instance_id
        message = f"the KV blocks of {load.num_tokens} tokens did not get from a tier into {where}: {load.failure}"
        return LoadFailed(sequence=load.sequence, message=message)

    def give_back(self, row: int) -> None:
        """Free the blocks of a row in LOADING, which ends, once no byte can land in them any more (Tiers)."""
        load = self._loads.pop(row)
        if not load.num_jobs:
            self._kv.free(row)
            return
        load.popped = self._kv.pop_blocks_for_free(row)
        self._quiescing.append(load)

    def close(self) -> None:
        """No job will end any more (Tiers)."""
        self._jobs.forget()
        self._stores.forget()
        for load in self._quiescing:
            assert load.popped is not None, load.row
            self._kv.release(load.popped)
        self._quiescing.clear()

    # what others ask

    @property
    def num_jobs(self) -> int:
        """Jobs that some rank has still to report."""
        return self._jobs.num_jobs

    def job_to_wait_for(self) -> int:
        """The store that must have ended before the step being planned is computed; 0 for none (Tiers)."""
        return self._stores.seal(self._instance.last_step)

    def take_commands(self) -> list[CopyCommand]:
        """Jobs for every rank, since the last take, in order (Tiers)."""
        self._stores.flush(self._instance.last_step)
        return self._jobs.take_commands()

    def status(self) -> Mapping[str, int | float]:
        """Counters (Tiers)."""
        totals = self._jobs.totals
        values: dict[str, int | float] = {
            "num_loaded_tokens": self._num_loaded_tokens,
            "num_loading": len(self._loads),
            "num_failed_loads": self._num_failed_loads,
            "num_skipped_blocks": self._stores.num_skipped,
            "num_failed_jobs": sum(one.num_failed for one in totals.values()),
        }
        for kind, total in totals.items():
            values[f"{kind}_bytes"] = total.num_bytes
            values[f"{kind}_busy_s"] = round(total.busy_s, 6)
        for name, tier, num_loaded in zip(("memory", "disk"), self._tiers, self._num_loaded_blocks):
            stats = tier.stats()
            values[f"{name}_usage"] = round(1.0 - stats.num_free_units / stats.num_units, 6)
            values[f"{name}_blocks"] = stats.num_blocks
            values[f"{name}_stored_blocks"] = stats.num_stored_blocks
            values[f"{name}_loaded_blocks"] = num_loaded
            values[f"{name}_evicted_blocks"] = stats.num_evicted_blocks
            values[f"{name}_refused_blocks"] = stats.num_refused_blocks
        return values

    def check(self) -> None:
        """Prove the books of all tiers, and that rows in LOADING are those that are loaded for (Tiers)."""
        for tier in self._tiers:
            tier.check()
        batch = self._instance.batch
        if sorted(self._loads) != batch.rows_in(Phase.LOADING):
            raise LedgerCorrupted(f"rows {batch.rows_in(Phase.LOADING)} load, but loads are for {sorted(self._loads)}")
