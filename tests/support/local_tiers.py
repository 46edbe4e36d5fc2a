"""Tiers for instances that run in one process: files in a test's folder, and the real worker half."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import queue
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.local_engine import EngineOptions, LocalEngine

from blockferry.connectors.base import RankIdentity
from blockferry.connectors.offload_base import CopyEvent, TierShape
from blockferry.connectors.offload_files import FileOwner, open_tier_file
from blockferry.connectors.offload_pages import PageRuns
from blockferry.connectors.offload_stores import TierDisk, TierMemory
from blockferry.connectors.offload_worker import OffloadWorker, RankTiers
from blockferry.engine.kv.instance_plan import InstancePlan
from blockferry.engine.kv.tier_ledger import TierLedger
from blockferry.engine.kv.tier_plan import plan_tiers
from blockferry.engine.kv.tier_policies import PolicyName, make_policy
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.offloading import Offloading, OffloadOptions
from blockferry.engine.wire import StepPlan, StepResult
from blockferry.engine.worker.proposers import make_proposer
from blockferry.engine.worker.worker import MakeProposer, Worker

TIMEOUT_S = 60.0
MAX_IDLE = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierSizes:
    """Units of the memory and, with one, of the disk; None: as many as the largest test fills."""

    memory: int = 400
    disk: int = 0
    policy: PolicyName = PolicyName.LRU


def give_tiers(instance: Instance, plan: InstancePlan, sizes: TierSizes, options: OffloadOptions) -> Offloading:
    """The scheduler's side."""
    units_per_block = plan_tiers(plan).units_per_block
    memory, disk = (
        TierLedger(units_per_block=units_per_block, num_units=size, policy=make_policy(sizes.policy, capacity=size))
        if size
        else None
        for size in (sizes.memory, sizes.disk)
    )
    assert memory is not None
    return Offloading(instance, memory=memory, disk=disk, options=options)


class GatedWorker:
    """A worker and its rank's tiers: steps wait for stores, copies for steps."""

    def __init__(self, worker: Worker, plan: InstancePlan, sizes: TierSizes, *, folder: Path, pool: NDArray[np.uint8]):
        spec = worker.spec
        self.worker = worker
        self.events: queue.Queue[CopyEvent] = queue.Queue()
        cut = plan_tiers(plan)
        shape = TierShape(units_per_block=cut.units_per_block, unit_bytes=cut.unit_bytes[spec.pp_rank])
        owner, fingerprint = FileOwner.of(os.getpid()), hashlib.sha256(repr(worker.layouts()).encode()).digest()
        name = f"blockferry-tier-{spec.rank}"
        memory = TierMemory(
            open_tier_file(folder / name, sizes.memory * shape.unit_bytes, fingerprint=fingerprint, owner=owner)
        )
        disk = None
        if sizes.disk:
            num_bytes = TierDisk.num_bytes(sizes.disk, shape.unit_bytes)
            file = open_tier_file(folder / f"{name}-disk", num_bytes, fingerprint=fingerprint, owner=owner)
            disk = TierDisk(file, unit_bytes=shape.unit_bytes)
        self.offload = OffloadWorker(
            RankIdentity(
                instance_id="mixed0",
                rank=spec.rank,
                tp_rank=spec.tp_rank,
                pp_rank=spec.pp_rank,
                model_fingerprint="tiny",
            ),
            RankTiers(pool=pool, pages=PageRuns(worker.layouts(), shape), memory=memory, disk=disk),
            self.events.put,
        )

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.offload.wait_stored(plan.wait_stored)
        result = self.worker.execute(plan)
        self.offload.executed(plan.step_id)
        return result

    def close(self) -> None:
        self.offload.remove()


class TieredEngine(LocalEngine):
    """A LocalEngine whose pool has tiers behind it. Close it."""

    def __init__(
        self,
        path: Path,
        options: EngineOptions,
        *,
        folder: Path,
        sizes: TierSizes = TierSizes(),
        offload: OffloadOptions | None = None,
        make_proposer: MakeProposer = make_proposer,
    ) -> None:
        pools: list[NDArray[np.uint8]] = []

        def allocate(num_bytes: int) -> NDArray[np.uint8]:
            pools.append(np.full(num_bytes, 0xFF, np.uint8))
            return pools[-1]

        worker = Worker(options.worker_spec(path), make_proposer=make_proposer)
        worker.load()
        plan = options.plan(path)
        worker.init_cache(plan, allocate)
        self.rank = GatedWorker(worker, plan, sizes, folder=folder, pool=pools[-1])
        super().__init__(path, options, self.rank)
        self.tiers = give_tiers(self.instance, self.plan, sizes, offload or OffloadOptions())
        self._num_ended = self._num_idle = 0

    def settle(self) -> None:
        """Let what is under way end, as a deployment would between requests."""
        self.exchange()
        while self.tiers.num_jobs:
            self._take(self.rank.events.get(timeout=TIMEOUT_S))
            self.exchange()

    def exchange(self) -> None:
        """Give the rank its copies; take what it has reported."""
        for _, command in self.central.take_copies():
            self.rank.offload.start(command)
        while not self.rank.events.empty():
            self._take(self.rank.events.get())
        self.central.check_integrity()

    def wait(self) -> None:
        """Nothing can be planned: something is loading, or a hit that stood in the way was just dropped."""
        num_ended = self._num_ended
        self.exchange()
        if self._num_ended == num_ended and self.tiers.num_jobs:
            self._take(self.rank.events.get(timeout=TIMEOUT_S))
        elif self._num_ended == num_ended:
            self._num_idle += 1
            assert self._num_idle < MAX_IDLE, "requests are stuck"

    def _take(self, event: CopyEvent) -> None:
        self._num_ended += 1
        self.central.on_copy(event)
        self.central.check_integrity()

    def close(self) -> None:
        self.rank.close()
        self.rank.worker.close()
