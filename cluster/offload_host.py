"""A rank's tiers in its process: the files they lie in, and the worker half that fills them.

Owns the names of the files. Their owner is the process that started this one and starts it again (Ray's, on each
node): when that has ended, nobody will look for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from pathlib import Path
from typing import Protocol

from blockferry.cluster.offload_settings import TierSettings
from blockferry.connectors.base import ByteArray, PoolLayout, RankIdentity
from blockferry.connectors.offload_base import CopySink
from blockferry.connectors.offload_files import (
    PREFIX,
    FileOwner,
    TierFile,
    open_tier_file,
    remove_leftovers,
    remove_unused,
)
from blockferry.connectors.offload_pages import PageRuns
from blockferry.connectors.offload_stores import TierDisk, TierMemory
from blockferry.connectors.offload_worker import OffloadWorker, RankTiers
from blockferry.engine.config import DeploymentConfig
from blockferry.engine.wire import StepPlan, StepResult

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


class Executor(Protocol):
    """What executes plans."""

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step; None on ranks that do not sample."""


class GatedExecutor:
    """Executes plans in step with the rank's tiers: blocks are stored before they are written over. Model thread."""

    def __init__(self, executor: Executor, offload: OffloadWorker) -> None:
        self._executor = executor
        self._offload = offload

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step when what it writes over has been stored."""
        self._offload.wait_stored(plan.wait_stored)
        result = self._executor.execute(plan)
        self._offload.executed(plan.step_id)
        return result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPool:
    """A rank's pool: its bytes, and where what is cached lies in them."""

    memory: ByteArray
    layouts: tuple[PoolLayout, ...]


def open_offload(
    settings: TierSettings, own: RankIdentity, pool: RankPool, on_event: CopySink, *, deployment: str
) -> OffloadWorker:
    """Find or make a rank's tiers and start its worker half. Raises OffloadError where there is no room."""
    shape = settings.shape(own.pp_rank)
    content = repr((own.model_fingerprint, own.instance_id, own.rank, pool.layouts, shape))
    fingerprint = hashlib.sha256(content.encode()).digest()
    name = f"{_prefix(deployment)}{own.instance_id}-{own.rank}"
    owner = FileOwner.of(os.getppid())

    def open_file(folder: Path, num_bytes: int) -> TierFile:
        for path in remove_leftovers(folder):
            logger.info("removed %s, whose owner has ended", path)
        return open_tier_file(folder / name, num_bytes, fingerprint=fingerprint, owner=owner)

    memory = TierMemory(open_file(SHARED_MEMORY, settings.memory_bytes(own.pp_rank)))
    disk = None
    if settings.config.disk_path is not None:
        settings.config.disk_path.mkdir(parents=True, exist_ok=True)
        num_bytes = TierDisk.num_bytes(settings.num_disk_units, shape.unit_bytes)
        disk = TierDisk(open_file(settings.config.disk_path, num_bytes), unit_bytes=shape.unit_bytes)
    tiers = RankTiers(pool=pool.memory, pages=PageRuns(pool.layouts, shape), memory=memory, disk=disk)
    return OffloadWorker(own, tiers, on_event)


def remove_files(config: DeploymentConfig) -> None:
    """Remove what killed workers of a deployment that has ended have left on this machine."""
    offloads = [instance.offload for instance in config.instances if instance.offload is not None]
    disks = {one.disk_path for one in offloads if one.disk_path is not None}
    for folder in ({SHARED_MEMORY} if offloads else set()) | disks:
        remove_unused(folder, _prefix(config.name))


def _prefix(deployment: str) -> str:
    return f"{PREFIX}{deployment}-"
