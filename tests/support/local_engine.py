"""A whole instance in one process: the real scheduler, ledger, plans over the wire and one real worker, without Ray.

Records every plan, so that the same steps can be executed by ranks in other processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockferry.engine.config import DType, Role, SchedulerConfig
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.instance_plan import InstancePlan, InstanceRequest, plan_instance
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.plan import Planner
from blockferry.engine.models.config import read_header
from blockferry.engine.request import Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import StepPlan, pack, plan_from_bytes
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import Worker

INSTANCE = "mixed0"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Shape of the instance; the defaults are small enough that windows, chunks and states leave their blocks."""

    max_model_len: int = 256
    max_rows: int = 8
    max_num_batched_tokens: int = 48  # prompts are computed in chunks
    num_blocks: int | None = None
    memory_bytes: int = 1 << 22
    block_size: int | None = None
    planner: Planner | None = None
    layout: str = "BHLNC"
    enable_caching: bool = True
    num_steps_in_flight: int = 2
    tp_size: int = 1
    pp_size: int = 1

    def worker_spec(self, path: Path) -> WorkerSpec:
        return WorkerSpec(
            model_path=path,
            dtype=DType.FLOAT32,
            max_model_len=self.max_model_len,
            max_rows=self.max_rows,
            max_num_batched_tokens=self.max_num_batched_tokens,
            layout=self.layout,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
        )

    def plan(self, path: Path) -> InstancePlan:
        request = InstanceRequest(
            dtype="float32",
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_num_batched_tokens * self.num_steps_in_flight,
            memory_bytes=self.memory_bytes,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            planner=self.planner,
            layout=self.layout,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
        )
        return plan_instance(read_header(path).values, request)


def nan_memory(num_bytes: int) -> np.ndarray:
    """Memory that is NaN in every float type, so that reading an unwritten slot shows."""
    return np.full(num_bytes, 0xFF, np.uint8)


class LocalEngine:
    """One mixed instance. generate() may be called again: the prefix cache stays warm."""

    def __init__(self, path: Path, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.plan = self.options.plan(path)
        self.plans: list[StepPlan] = []
        rows = RowTable(max_rows=self.options.max_rows, max_model_len=self.options.max_model_len)
        config = SchedulerConfig(
            max_num_seqs=self.options.max_rows,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            num_steps_in_flight=self.options.num_steps_in_flight,
        )
        self.kv = KVCacheManager(
            self.plan.ledger,
            rows,
            options=LedgerOptions(
                enable_caching=self.options.enable_caching,
                watermark=0.0,
                max_in_flight_tokens=self.options.max_num_batched_tokens * self.options.num_steps_in_flight,
            ),
        )
        self.instance = Instance(INSTANCE, Role.MIXED, config=config, kv=self.kv, rows=rows)
        self.central = CentralScheduler([self.instance])
        self.worker = Worker(self.options.worker_spec(path))
        self.worker.load()
        self.worker.init_cache(self.plan, nan_memory)
        self._next_handle = 0

    def generate(self, prompts: Sequence[Sequence[int]], num_output: int) -> list[list[int]]:
        """Greedy continuations of prompts that arrive together; audits the ledger after every step."""
        handles = [self._add(prompt, num_output) for prompt in prompts]
        outputs: dict[int, list[int]] = {handle: [] for handle in handles}
        pending = set(handles)
        idle = 0
        while pending and idle < 3:
            plan = self.central.plan(INSTANCE)
            if plan is None:
                idle += 1
                continue
            idle = 0
            plan = plan_from_bytes(pack(plan))  # as it arrives over the wire
            self.plans.append(plan)
            result = self.worker.execute(plan)
            assert result is not None
            output = self.central.commit(INSTANCE, result)
            self.central.check_integrity()
            for handle, token_id in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
                outputs[handle].append(token_id)
            pending -= {finished.handle for finished in output.finished}
        assert not pending, f"{len(pending)} requests are stuck"
        return [outputs[handle] for handle in handles]

    def _add(self, prompt: Sequence[int], num_output: int) -> int:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        request = Request(
            request_id=str(handle),
            handle=handle,
            prompt_token_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=num_output),
            arrival_s=0.0,
        )
        self.central.add(request, Route(prefill=INSTANCE, decode=INSTANCE))
        return handle
