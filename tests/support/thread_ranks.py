"""The ranks of an instance as threads of this process, each a real Worker, where processes would be slow to start.

Tensors pass between threads instead of over gloo, which tests/integration/test_family_ranks.py covers.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from support.dense_step import MEETING_TIMEOUT_S, ThreadCommunicator
from support.local_engine import EngineOptions

from blockferry.engine.models.layers import Communicator
from blockferry.engine.request import Int32Array
from blockferry.engine.wire import StepPlan, StepResult
from blockferry.engine.worker.proposers import make_proposer
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import MakeProposer, Worker

Result = TypeVar("Result")


class _Board:
    """What the threads of one instance share."""

    def __init__(self, options: EngineOptions) -> None:
        num_ranks = options.tp_size * options.pp_size
        self.stages = [ThreadCommunicator.ranks(options.tp_size) for _ in range(options.pp_size)]
        self.hidden: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(num_ranks)]  # by receiver
        self.barrier = threading.Barrier(num_ranks)
        self.token_ids: Int32Array | None = None

    def join(self, spec: WorkerSpec) -> ThreadRank:
        """See worker.parallel.join."""
        return ThreadRank(self, spec)


class ThreadRank:
    """See worker.parallel.Parallel."""

    def __init__(self, board: _Board, spec: WorkerSpec) -> None:
        self.tensor: Communicator = board.stages[spec.pp_rank][spec.tp_rank]
        self._board = board
        self._spec = spec

    def send_hidden(self, x_TE: torch.Tensor) -> None:
        self._board.hidden[self._spec.rank + self._spec.tp_size].put(x_TE.clone())

    def receive_hidden(self, out_TE: torch.Tensor) -> torch.Tensor:
        return out_TE.copy_(self._board.hidden[self._spec.rank].get(timeout=MEETING_TIMEOUT_S))

    def share_tokens(self, token_ids: Int32Array) -> Int32Array:
        if self._spec.is_sampler:
            self._board.token_ids = token_ids
        self._board.barrier.wait(MEETING_TIMEOUT_S)
        shared = self._board.token_ids
        self._board.barrier.wait(MEETING_TIMEOUT_S)
        assert shared is not None
        return shared

    def close(self) -> None:
        self._board.barrier.abort()


class ThreadRanks:
    """All ranks of one instance, in the order of their numbers. Close it."""

    def __init__(self, path: Path, options: EngineOptions, *, make_proposer: MakeProposer = make_proposer) -> None:
        """Loads the model; pools are made by each()."""
        board = _Board(options)
        spec = options.worker_spec(path)
        places = [(pp_rank, tp_rank) for pp_rank in range(options.pp_size) for tp_rank in range(options.tp_size)]
        specs = [dataclasses.replace(spec, pp_rank=pp_rank, tp_rank=tp_rank) for pp_rank, tp_rank in places]
        self.workers = [Worker(one, join=board.join, make_proposer=make_proposer) for one in specs]
        self._threads = ThreadPoolExecutor(len(self.workers))
        self.each(Worker.load)

    def each(self, function: Callable[[Worker], Result]) -> list[Result]:
        """function(worker) on all ranks at once, as collectives need; results by rank."""
        return [future.result() for future in [self._threads.submit(function, one) for one in self.workers]]

    def execute(self, plan: StepPlan) -> StepResult:
        """One step on all ranks; what the sampling one says."""
        (result,) = [one for one in self.each(lambda worker: worker.execute(plan)) if one is not None]
        return result

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._threads.shutdown()
