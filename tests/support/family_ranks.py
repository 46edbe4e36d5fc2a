"""Many checkpoints on the ranks of one instance, one after the other: what a rank process does for the parity suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from support.local_engine import EngineOptions, nan_memory

from blockferry.engine.errors import BlockferryError
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import Worker


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCase:
    """A checkpoint, the shape of its instance and the steps to execute."""

    path: Path
    options: EngineOptions
    plans: Sequence[StepPlan]


def execute_cases(spec: WorkerSpec, cases: Sequence[RankCase]) -> list[list[list[int]]]:
    """Sampled tokens per step of every case; [] on ranks that do not sample. spec says which rank this is."""
    torch.set_num_threads(1)
    return [_execute(spec, number, case) for number, case in enumerate(cases)]


def complaint_of_loading(spec: WorkerSpec, folders: Sequence[Path | None]) -> str:
    """What a rank's load() raises, or nothing; a rank without a folder stays away."""
    folder = folders[spec.rank]
    if folder is None:
        return ""
    worker = Worker(dataclasses.replace(spec, model_path=folder))
    try:
        worker.load()
    except BlockferryError as error:
        return str(error)
    finally:
        worker.close()
    return ""


def _execute(spec: WorkerSpec, number: int, case: RankCase) -> list[list[int]]:
    own = dataclasses.replace(
        case.options.worker_spec(case.path),
        tp_rank=spec.tp_rank,
        pp_rank=spec.pp_rank,
        init_method=f"{spec.init_method}-{number}",
    )
    worker = Worker(own)
    try:
        worker.load()
        worker.init_cache(case.options.plan(case.path), nan_memory)
        results = [worker.execute(plan) for plan in case.plans]
    finally:
        worker.close()
    return [result.token_ids.tolist() for result in results if result is not None]
