"""Has a model continue token sequences: scheduler, ledger and worker of one instance in this process, without Ray.

Owns the worker and its pool. One thread calls it; torch's thread count is set when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from blockferry.engine.config import DType, Role, SchedulerConfig
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.instance_plan import InstancePlan, InstanceRequest, plan_instance
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.models.config import read_header
from blockferry.engine.request import Int32Array, Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import Worker

INSTANCE = "writer"
MAX_NUM_BATCHED_TOKENS = 512
NUM_STEPS_IN_FLIGHT = 2

Tick = Callable[[int], None]
"""Told how many tokens were drawn since the last call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A beginning and how the model is to go on from it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


class ModelWriter:
    """One mixed instance that writes one batch of assignments after the other."""

    def __init__(self, path: Path, *, max_model_len: int, num_rows: int, num_threads: int) -> None:
        """Reads the model and compiles what it computes with. Raises ModelLoadError, ConfigError."""
        config = SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_steps_in_flight=NUM_STEPS_IN_FLIGHT,
        )
        plan = _plan(path, config, max_model_len)
        self._worker = Worker(
            WorkerSpec(
                model_path=path,
                dtype=DType.BFLOAT16,
                max_model_len=max_model_len,
                max_rows=num_rows,
                max_num_batched_tokens=config.max_num_batched_tokens,
                num_threads=num_threads,
            )
        )
        self._worker.load()
        self._worker.init_cache(plan, _zeros)
        self._worker.warm_up()
        self._central = CentralScheduler([_instance(plan, config, max_model_len)])
        self._num_requests = 0

    def write(self, assignments: Sequence[Assignment], tick: Tick) -> list[list[int]]:
        """What the model writes after each beginning, in order. Raises RequestRejected for one that is too long."""
        outputs: dict[int, list[int]] = {}
        for assignment in assignments:
            self._num_requests += 1
            outputs[self._num_requests] = []
            self._central.add(_request(self._num_requests, assignment), Route(prefill=INSTANCE, decode=INSTANCE))
        num_pending = len(outputs)
        while num_pending:
            plan = self._central.plan(INSTANCE)
            assert plan is not None, f"{num_pending} requests are stuck"
            result = self._worker.execute(plan)
            assert result is not None, "a lone rank samples"
            output = self._central.commit(INSTANCE, result)
            for handle, token_id in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
                outputs[handle].append(token_id)
            num_pending -= len(output.finished)
            tick(len(output.token_ids))
        return list(outputs.values())


def _plan(path: Path, config: SchedulerConfig, max_model_len: int) -> InstancePlan:
    """A pool for every row's longest sequence."""
    block_size = 16
    request = InstanceRequest(
        dtype=DType.BFLOAT16.value,
        max_model_len=max_model_len,
        max_in_flight_tokens=config.max_in_flight_tokens,
        memory_bytes=0,
        num_blocks=1 + config.max_num_seqs * (-(-max_model_len // block_size) + 1),
        block_size=block_size,
    )
    return plan_instance(read_header(path).values, request)


def _instance(plan: InstancePlan, config: SchedulerConfig, max_model_len: int) -> Instance:
    rows = RowTable(max_rows=config.max_num_seqs, max_model_len=max_model_len)
    options = LedgerOptions(watermark=0.0, max_in_flight_tokens=config.max_in_flight_tokens)
    kv = KVCacheManager(plan.ledger, rows, options=options)
    return Instance(INSTANCE, Role.MIXED, config=config, kv=kv, rows=rows)


def _request(handle: int, assignment: Assignment) -> Request:
    return Request(
        request_id=str(handle),
        handle=handle,
        prompt_token_ids=_int32(assignment.prompt),
        sampling=assignment.sampling,
        arrival_s=0.0,
    )


def _int32(token_ids: Sequence[int]) -> Int32Array:
    return np.array(token_ids, np.int32)


def _zeros(num_bytes: int) -> np.ndarray:
    return np.zeros(num_bytes, np.uint8)
