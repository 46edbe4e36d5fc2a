"""A rank's worker half of the offload connector over a small pool of real layouts, in this process or another."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockferry.connectors.base import PoolLayout, RankIdentity
from blockferry.connectors.offload_base import DIGEST_BYTES, CopyCommand, CopyEvent, CopyKind, CopyPart, TierShape
from blockferry.connectors.offload_files import FileOwner, open_tier_file
from blockferry.connectors.offload_pages import PageRuns
from blockferry.connectors.offload_stores import TierDisk, TierMemory
from blockferry.connectors.offload_worker import OffloadTiming, OffloadWorker, RankTiers

LAYOUT = PoolLayout(
    order="LBHNC",
    num_blocks=32,
    block_size=4,
    layer_ids=(0, 1, 2),
    head_start=0,
    num_heads=2,
    content_bytes=64,
    dtype="float32",
)
SHAPE = TierShape(units_per_block=(2,), unit_bytes=832)  # 1,536 bytes a block: the second unit is not full
NUM_UNITS = 64
FINGERPRINT = b"f" * 32
OWN = RankIdentity(instance_id="m0", rank=0, tp_rank=0, pp_rank=0, model_fingerprint="tiny")


def block_of(pool: np.ndarray, block_id: int, layout: PoolLayout = LAYOUT) -> np.ndarray:
    """All bytes of a block, layer after layer."""
    return pool.reshape(len(layout.layer_ids), layout.num_blocks, -1)[:, block_id]


class OffloadRank:
    """Pool, tiers and worker half. Close it."""

    def __init__(self, folder: Path, *, owner_pid: int | None = None, has_disk: bool = True) -> None:
        owner = FileOwner.of(owner_pid or os.getpid())
        memory = TierMemory(
            open_tier_file(
                folder / "blockferry-tier-test", NUM_UNITS * SHAPE.unit_bytes, fingerprint=FINGERPRINT, owner=owner
            )
        )
        self.is_found = memory.is_found
        self.pool = np.random.default_rng(0).integers(0, 256, LAYOUT.num_bytes, np.uint8)
        self.disk_path = folder / "blockferry-tier-disk"
        disk = None
        if has_disk:
            num_bytes = TierDisk.num_bytes(NUM_UNITS, SHAPE.unit_bytes)
            file = open_tier_file(self.disk_path, num_bytes, fingerprint=FINGERPRINT, owner=owner)
            disk = TierDisk(file, unit_bytes=SHAPE.unit_bytes)
        self.events: queue.Queue[CopyEvent] = queue.Queue()
        tiers = RankTiers(pool=self.pool, pages=PageRuns([LAYOUT], SHAPE), memory=memory, disk=disk)
        self.worker = OffloadWorker(OWN, tiers, self.events.put, OffloadTiming(store_timeout_s=5.0))
        self._num_jobs = 0

    def begin(self, kind: CopyKind, parts: Sequence[CopyPart], *, after_step: int = -1) -> int:
        self._num_jobs += 1
        self.worker.start(CopyCommand(job_id=self._num_jobs, kind=kind, after_step=after_step, parts=tuple(parts)))
        return self._num_jobs

    def run(self, kind: CopyKind, part: CopyPart) -> CopyEvent:
        self.begin(kind, [part])
        return self.events.get(timeout=10.0)

    def close(self) -> None:
        self.worker.remove()


def part_of(block_ids: Sequence[int], first: int = 0) -> CopyPart:
    """Blocks in units of memory and disk, from `first` on, the disk's in the opposite order."""
    count = len(block_ids)
    units = np.arange(2 * first, 2 * (first + count), dtype=np.int32).reshape(count, 2)
    return CopyPart(
        group=0,
        block_ids=np.array(block_ids, np.int32),
        units=units,
        disk_units=units[:, ::-1].copy(),
        digests=b"".join((first + number).to_bytes(DIGEST_BYTES, "big") for number in range(count)),
    )


def store_and_wait_to_be_killed(folder: str, owner_pid: str) -> None:
    """Another process: keep blocks 1 to 4 in both tiers, say so, and go on until killed."""
    rank = OffloadRank(Path(folder), owner_pid=int(owner_pid))
    for kind in (CopyKind.STORE, CopyKind.DEMOTE):
        assert rank.run(kind, part_of([1, 2, 3, 4])).is_done
    print("stored", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    store_and_wait_to_be_killed(*sys.argv[1:])
