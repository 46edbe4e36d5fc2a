"""Runs one function on every rank of an instance, each in a process of its own (spawned, gloo)."""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockferry.engine.worker.spec import WorkerSpec

TIMEOUT_S = 240.0


def run_ranks(spec: WorkerSpec, meeting_point: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of function(its spec, *arguments) by rank. Raises AssertionError with a failed rank's trace."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = []
    for rank in range(spec.world_size):
        pp_rank, tp_rank = divmod(rank, spec.tp_size)
        own = dataclasses.replace(spec, tp_rank=tp_rank, pp_rank=pp_rank, init_method=f"file://{meeting_point}")
        processes.append(context.Process(target=_call, args=(results, rank, function, own, arguments), daemon=True))
    for process in processes:
        process.start()
    try:
        return _collect(results, spec.world_size)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(results: Any, num_ranks: int) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < num_ranks:
        try:
            rank, value, trace = results.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise AssertionError(
                f"ranks {set(range(num_ranks)) - set(found)} gave no result in {TIMEOUT_S} s"
            ) from None
        assert not trace, f"rank {rank}:\n{trace}"
        found[rank] = value
    return [found[rank] for rank in range(num_ranks)]


def _call(results: Any, rank: int, function: Callable[..., Any], spec: WorkerSpec, arguments: tuple[Any, ...]) -> None:
    try:
        results.put((rank, function(spec, *arguments), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
