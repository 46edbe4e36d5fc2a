"""A whole instance in one process: the real scheduler, ledger and plans over the wire, and a real worker, without Ray.

Steps are recorded, so that ranks in other processes can execute the same ones: with an oracle in the worker's place,
plans are made for any number of ranks without any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from blockferry.engine.config import DType, Role, SchedulerConfig, SpeculationConfig
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.instance_plan import InstancePlan, InstanceRequest, plan_instance
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.kv.plan import Planner
from blockferry.engine.models.config import read_header
from blockferry.engine.models.draft_head import num_drafting_layers
from blockferry.engine.request import Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import RowLogprobs, StepPlan, StepResult, pack, plan_from_bytes
from blockferry.engine.worker.pool_memory import Allocate
from blockferry.engine.worker.proposers import make_proposer
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import MakeProposer, Worker

INSTANCE = "mixed0"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Shape of the instance; the defaults are small enough that windows, chunks and states leave their blocks."""

    dtype: DType = DType.FLOAT32
    cache_dtype: CacheDType = CacheDType.AUTO
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
    speculation: SpeculationConfig | None = None

    def worker_spec(self, path: Path) -> WorkerSpec:
        return WorkerSpec(
            model_path=path,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            max_model_len=self.max_model_len,
            max_rows=self.max_rows,
            max_num_batched_tokens=self.max_num_batched_tokens,
            layout=self.layout,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            speculation=self.speculation,
        )

    def plan(self, path: Path) -> InstancePlan:
        header = read_header(path)
        return self.plan_values(header.values, num_draft_layers=num_drafting_layers(header, self.speculation))

    def plan_values(self, config: Mapping[str, Any], *, num_draft_layers: int = 0) -> InstancePlan:
        request = InstanceRequest(
            dtype=self.dtype.value,
            cache_dtype=self.cache_dtype,
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_num_batched_tokens * self.num_steps_in_flight,
            memory_bytes=self.memory_bytes,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            planner=self.planner,
            layout=self.layout,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            num_speculative_tokens=0 if self.speculation is None else self.speculation.num_tokens,
            num_draft_layers=num_draft_layers,
        )
        return plan_instance(config, request)


def nan_memory(num_bytes: int) -> np.ndarray:
    """Memory that is NaN in every float type, so that reading an unwritten slot shows."""
    return np.full(num_bytes, 0xFF, np.uint8)


def start_worker(
    path: Path,
    options: EngineOptions,
    *,
    make_proposer: MakeProposer = make_proposer,
    allocate: Allocate = nan_memory,
) -> Worker:
    """A lone rank whose pool starts full of NaN."""
    worker = Worker(options.worker_spec(path), make_proposer=make_proposer)
    worker.load()
    worker.init_cache(options.plan(path), allocate)
    return worker


def make_instance(instance_id: str, role: Role, plan: InstancePlan, options: EngineOptions) -> Instance:
    """A scheduler's instance with its ledger."""
    rows = RowTable(max_rows=options.max_rows, max_model_len=options.max_model_len)
    config = SchedulerConfig(
        max_num_seqs=options.max_rows,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_steps_in_flight=options.num_steps_in_flight,
        speculation=options.speculation,
    )
    ledger_options = LedgerOptions(
        enable_caching=options.enable_caching,
        watermark=0.0,
        max_in_flight_tokens=options.max_num_batched_tokens * options.num_steps_in_flight,
        max_num_encoder_tokens=plan.model.num_encoder_tokens,
    )
    kv = KVCacheManager(plan.ledger, rows, options=ledger_options)
    num_ranks = options.tp_size * options.pp_size
    return Instance(instance_id, role, config=config, kv=kv, rows=rows, num_ranks=num_ranks)


def make_request(
    handle: int, prompt: Sequence[int], num_output: int, *, encoder_input: Sequence[int] | None = None
) -> Request:
    """A greedy request."""
    return Request(
        request_id=str(handle),
        handle=handle,
        prompt_token_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=num_output),
        arrival_s=0.0,
        encoder_token_ids=None if encoder_input is None else np.array(encoder_input, np.int32),
    )


class OracleExecutor:
    """Says what a model would sample: the known continuation of every prompt."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """sequences: prompts with their continuations, none a prefix of another."""
        self._sequences = [list(sequence) for sequence in sequences]
        self._of_row: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for new_row in plan.new_rows:
            known = new_row.token_ids.tolist()
            self._of_row[new_row.row] = next(one for one in self._sequences if one[: len(known)] == known)
        ends = plan.num_computed + plan.num_scheduled
        tokens = [
            self._of_row[row][end] for row, end in zip(plan.rows[plan.sample].tolist(), ends[plan.sample].tolist())
        ]
        return StepResult(step_id=plan.step_id, token_ids=np.array(tokens, np.int32))


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult | None: ...


class LocalEngine:
    """One mixed instance. generate() may be called again: the prefix cache stays warm."""

    def __init__(self, path: Path, options: EngineOptions, executor: Executor) -> None:
        self.options = options
        self.plan = options.plan(path)
        self.steps: list[tuple[StepPlan, StepResult]] = []
        self.logprobs: dict[int, list[RowLogprobs]] = {}  # by handle
        self.instance = make_instance(INSTANCE, Role.MIXED, self.plan, options)
        self.kv = self.instance.kv
        self.central = CentralScheduler([self.instance])
        self._executor = executor
        self._next_handle = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_output: int,
        *,
        encoder_inputs: Sequence[Sequence[int] | None] | None = None,
    ) -> list[list[int]]:
        """Greedy continuations of prompts that arrive together. Of an encoder-decoder, prompts are the decoder's."""
        inputs = encoder_inputs or [None] * len(prompts)
        requests = [
            make_request(self.next_handle(), prompt, num_output, encoder_input=one)
            for prompt, one in zip(prompts, inputs, strict=True)
        ]
        return self.run(requests)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """What is drawn for requests that arrive together; audits scheduler and ledger after every step."""
        for request in requests:
            self.central.add(request, Route(prefill=INSTANCE, decode=INSTANCE))
        outputs: dict[int, list[int]] = {request.handle: [] for request in requests}
        pending = set(outputs)
        while pending:
            plan = self.central.plan(INSTANCE)
            if plan is None:
                self.wait()
                continue
            self.exchange()
            plan = plan_from_bytes(pack(plan))  # as it arrives over the wire
            result = self._executor.execute(plan)
            assert result is not None
            self.steps.append((plan, result))
            output = self.central.commit(INSTANCE, result)
            self.central.check_integrity()
            for handle, token_id in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
                outputs[handle].append(token_id)
            for handle, entry in output.logprobs:
                self.logprobs.setdefault(handle, []).append(entry)
            pending -= {finished.handle for finished in output.finished}
        return list(outputs.values())

    def next_handle(self) -> int:
        """A handle that no other request has."""
        self._next_handle += 1
        return self._next_handle

    def exchange(self) -> None:
        """For subclasses: what goes to and comes from the rank beside steps, after every plan."""

    def wait(self) -> None:
        """For subclasses: nothing can be planned before something else has happened."""
        raise AssertionError("requests are stuck")
