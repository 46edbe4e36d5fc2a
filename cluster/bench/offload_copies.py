"""How fast blocks go into a tier and come back, against plain memcpy of the same runs in the same rounds.

Through the worker half of the connector, as in a deployment: a job, its thread, its event. A pool of one layout is
enough, as what a copy costs depends on the length and the scatter of its runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from blockferry.cluster.bench.report import ParamValue, Result
from blockferry.connectors.base import Int32Array, PoolLayout, RankIdentity
from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart, TierShape
from blockferry.connectors.offload_files import FileOwner, open_tier_file
from blockferry.connectors.offload_pages import PageRuns
from blockferry.connectors.offload_stores import TierMemory
from blockferry.connectors.offload_worker import OffloadWorker, RankTiers
from blockferry.connectors.transport import native_loops

PATTERNS = ("contiguous", "scattered")
_GIB = 2**30
_TIMEOUT_S = 60.0
_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyBenchConfig:
    """What to copy."""

    block_bytes: tuple[int, ...] = (64 << 10, 360 << 10, 1 << 20)
    total_bytes: int = 128 << 20  # of one job
    num_runs: int = 9

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for size in self.block_bytes:
            if size % _BLOCK_SIZE or not 1024 <= size <= self.total_bytes:
                raise ValueError(
                    f"blocks of {size} bytes are not a multiple of {_BLOCK_SIZE} within 1024 .. {self.total_bytes}; "
                    "choose another size"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A pool and a tier of as many blocks, and what runs between them."""

    worker: OffloadWorker
    events: queue.SimpleQueue[CopyEvent]
    tiers: RankTiers
    num_blocks: int

    def seconds_of(self, kind: CopyKind, part: CopyPart, job_id: int) -> float:
        """From giving a job to its event."""
        started_s = time.perf_counter()
        self.worker.start(CopyCommand(job_id=job_id, kind=kind, after_step=-1, parts=(part,)))
        event = self.events.get(timeout=_TIMEOUT_S)
        elapsed_s = time.perf_counter() - started_s
        if not event.is_done:
            raise ValueError(f"a {kind} failed: {event.reason}")
        return elapsed_s

    def seconds_of_memcpy(self, kind: CopyKind, part: CopyPart) -> float:
        """The same bytes, with nothing around."""
        runs = self.tiers.pages.of(part.group, part.block_ids, part.units)
        sides = [(self.tiers.pool, runs.pool_offsets), (self.tiers.memory.view, runs.tier_offsets)]
        (source, source_offsets), (target, target_offsets) = sides if kind is CopyKind.STORE else sides[::-1]
        started_s = time.perf_counter()
        native_loops.copy_runs(target.ctypes.data, source.ctypes.data, target_offsets, source_offsets, runs.lengths)
        return time.perf_counter() - started_s


def run_copy_bench(config: CopyBenchConfig) -> list[Result]:
    """Rows of store, load, their memcpy and the ratios, for every size and pattern. Raises ValueError."""
    rows: list[Result] = []
    for block_bytes in config.block_bytes:
        with _opened(block_bytes, config.total_bytes // block_bytes) as bench:
            for pattern in PATTERNS:
                rows += _measure(bench, config, block_bytes=block_bytes, pattern=pattern)
    return rows


def _measure(bench: _Bench, config: CopyBenchConfig, *, block_bytes: int, pattern: str) -> Iterator[Result]:
    part = _part(bench.num_blocks, pattern)
    num_bytes = bench.num_blocks * block_bytes
    params: dict[str, ParamValue] = {"pattern": pattern, "block_bytes": block_bytes, "blocks": bench.num_blocks}
    job_id = 0
    speeds: dict[tuple[CopyKind, bool], list[float]] = {}
    for run in range(config.num_runs + 1):
        for kind in (CopyKind.STORE, CopyKind.LOAD):
            job_id += 1
            elapsed = {True: bench.seconds_of_memcpy(kind, part), False: bench.seconds_of(kind, part, job_id)}
            for is_memcpy, seconds in elapsed.items():
                if run:  # the first one touches pages for the first time
                    speeds.setdefault((kind, is_memcpy), []).append(num_bytes / seconds / _GIB)
    for kind in (CopyKind.STORE, CopyKind.LOAD):
        mine, ceiling = speeds[kind, False], speeds[kind, True]
        of = {**params, "of": str(kind)}
        yield Result(name=str(kind), params=params, unit="GiB/s", runs=mine)
        yield Result(name="memcpy", params=of, unit="GiB/s", runs=ceiling)
        yield Result(name="ratio", params=of, unit="1", runs=[a / b for a, b in zip(mine, ceiling, strict=True)])


def _part(num_blocks: int, pattern: str) -> CopyPart:
    numbers: Int32Array = np.arange(num_blocks, dtype=np.int32)
    draw = np.random.default_rng(0)
    block_ids, units = (
        (draw.permutation(numbers), draw.permutation(numbers)) if pattern == "scattered" else (numbers,) * 2
    )
    return CopyPart(group=0, block_ids=block_ids.astype(np.int32), units=units.astype(np.int32)[:, None])


@contextlib.contextmanager
def _opened(block_bytes: int, num_blocks: int) -> Iterator[_Bench]:
    layout = PoolLayout(
        order="BHLNC",
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        layer_ids=(0,),
        head_start=0,
        num_heads=1,
        content_bytes=block_bytes // _BLOCK_SIZE,
        dtype="bfloat16",
    )
    own = RankIdentity(instance_id="bench", rank=0, tp_rank=0, pp_rank=0, model_fingerprint="bench")
    events: queue.SimpleQueue[CopyEvent] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="blockferry-bench-") as folder:
        file = open_tier_file(
            Path(folder) / "tier", num_blocks * block_bytes, fingerprint=bytes(32), owner=FileOwner.of(os.getpid())
        )
        pool = np.random.default_rng(0).integers(0, 256, layout.num_bytes, np.uint8)
        shape = TierShape(units_per_block=(1,), unit_bytes=block_bytes)
        tiers = RankTiers(pool=pool, pages=PageRuns([layout], shape), memory=TierMemory(file))
        worker = OffloadWorker(own, tiers, events.put)
        try:
            yield _Bench(worker=worker, events=events, tiers=tiers, num_blocks=num_blocks)
        finally:
            worker.remove()
