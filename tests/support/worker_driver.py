"""A minimal scheduler for worker tests: gives rows blocks and drives Worker.execute through StepPlans."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockferry.connectors.base import PoolLayout
from blockferry.engine.config import DType
from blockferry.engine.kv.instance_plan import InstancePlan, InstanceRequest, plan_instance
from blockferry.engine.models.config import read_header
from blockferry.engine.request import SamplingParams
from blockferry.engine.wire import BlockDeltas, NewRow, StepPlan, StepResult, pack, plan_from_bytes
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import Worker

UNKNOWN = -1  # a sampled token: its worker knows it, a scheduler need not
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1 << 30)


def worker_spec(path: Path, **options: object) -> WorkerSpec:
    """A small float32 spec."""
    defaults: dict[str, object] = {
        "dtype": DType.FLOAT32,
        "max_model_len": 128,
        "max_rows": 8,
        "max_num_batched_tokens": 256,
    }
    return WorkerSpec(model_path=path, **(defaults | options))  # type: ignore[arg-type]  # checked by the dataclass's users


def start_worker(spec: WorkerSpec, *, num_blocks: int = 64, block_size: int = 16) -> Worker:
    """A loaded worker whose pool starts full of NaN, so that reading an unwritten slot shows."""
    worker = Worker(spec)
    worker.load()
    plan = plan_blocks(spec, num_blocks=num_blocks, block_size=block_size)
    worker.init_cache(plan, lambda num_bytes: np.full(num_bytes, 0xFF, np.uint8))
    return worker


def plan_blocks(spec: WorkerSpec, *, num_blocks: int = 64, block_size: int = 16) -> InstancePlan:
    """The plan of an instance of such workers, with exactly so many blocks."""
    request = InstanceRequest(
        dtype=spec.dtype.value,
        max_model_len=min(spec.max_model_len, (num_blocks - 1) * block_size),
        max_in_flight_tokens=spec.max_num_batched_tokens,
        memory_bytes=0,
        num_blocks=num_blocks,
        block_size=block_size,
        layout=spec.layout,
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
    )
    return plan_instance(read_header(spec.model_path).values, request)


@dataclasses.dataclass
class Running:
    """One sequence being generated."""

    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    is_new: bool = True


class PlanMaker:
    """Builds plans for sequences; blocks are handed out in a shuffled order."""

    def __init__(self, *, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)
        self._block_size = block_size
        self._step_id = 0
        self._freed: list[int] = []

    def start(self, row: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Running:
        return Running(row=row, token_ids=list(prompt), num_prompt_tokens=len(prompt), sampling=sampling)

    def release(self, sequence: Running) -> None:
        """End or preempt: its blocks may be reused at once; a resumed sequence starts again from nothing."""
        self._free += sequence.blocks
        self._freed.append(sequence.row)
        sequence.blocks, sequence.num_computed, sequence.is_new = [], 0, True

    def plan(self, chunks: Sequence[tuple[Running, int]]) -> StepPlan:
        """A step that computes so many tokens of each sequence; those that then have all computed sample."""
        new_rows, deltas, computed, sample = [], [], [], []
        for sequence, count in chunks:
            if sequence.is_new:
                sequence.is_new = False
                new_rows.append(
                    NewRow(
                        row=sequence.row,
                        token_ids=np.array(sequence.token_ids, np.int32),
                        num_prompt_tokens=sequence.num_prompt_tokens,
                        sampling=sequence.sampling,
                    )
                )
            computed.append(sequence.num_computed)
            sequence.num_computed += count
            while len(sequence.blocks) * self._block_size < sequence.num_computed:
                deltas.append((0, sequence.row, len(sequence.blocks), self._free[0]))
                sequence.blocks.append(self._free.pop(0))
            sample.append(sequence.num_computed == len(sequence.token_ids))
            if sample[-1]:
                sequence.token_ids.append(UNKNOWN)
        freed, self._freed = self._freed, []
        self._step_id += 1
        columns = np.array(deltas, np.int32).reshape(-1, 4).T
        plan = StepPlan(
            step_id=self._step_id,
            freed_rows=np.array(freed, np.int32),
            new_rows=tuple(new_rows),
            deltas=BlockDeltas(group=columns[0], row=columns[1], column=columns[2], block_id=columns[3]),
            rows=np.array([sequence.row for sequence, _ in chunks], np.int32),
            num_computed=np.array(computed, np.int32),
            num_scheduled=np.array([count for _, count in chunks], np.int32),
            sample=np.array(sample, np.bool_),
        )
        return plan_from_bytes(pack(plan))  # as it arrives over the wire


def plans_to_length(maker: PlanMaker, sequences: Sequence[Running], *, num_output: int, chunk: int) -> list[StepPlan]:
    """Plans that bring every sequence to num_output output tokens, at most `chunk` tokens of each a step."""
    plans = []
    while True:
        chunks = [
            (sequence, min(chunk, len(sequence.token_ids) - sequence.num_computed))
            for sequence in sequences
            if len(sequence.token_ids) - sequence.num_prompt_tokens < num_output
        ]
        if not chunks:
            return plans
        plans.append(maker.plan(chunks))


def outputs_by_row(plans: Sequence[StepPlan], results: Sequence[StepResult | None]) -> dict[int, list[int]]:
    """Sampled tokens of each row over all steps."""
    outputs: dict[int, list[int]] = {}
    for plan, result in zip(plans, results, strict=True):
        assert result is not None
        for row, token in zip(plan.rows[plan.sample].tolist(), result.token_ids.tolist(), strict=True):
            outputs.setdefault(row, []).append(token)
    return outputs


def generate(
    worker: Worker, prompts: Sequence[Sequence[int]], *, num_output: int, chunk: int, sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """Outputs of prompts that run together, row numbers in reverse order; the rows are free again afterwards."""
    (layout,) = worker.layouts()
    maker = PlanMaker(num_blocks=layout.num_blocks, block_size=layout.block_size)
    rows = list(reversed(range(worker.spec.max_rows)))[: len(prompts)]
    sequences = [maker.start(row, prompt, sampling) for row, prompt in zip(rows, prompts, strict=True)]
    plans = plans_to_length(maker, sequences, num_output=num_output, chunk=chunk)
    outputs = outputs_by_row(plans, [worker.execute(plan) for plan in plans])
    for sequence in sequences:
        maker.release(sequence)
    worker.execute(maker.plan([]))
    return [outputs[row] for row in rows]


def execute_all(spec: WorkerSpec, plans: Sequence[StepPlan], num_blocks: int = 64) -> RankReport:
    """Start a worker, run plans, close it; importable by rank processes."""
    worker = start_worker(spec, num_blocks=num_blocks)
    try:
        return RankReport(results=[worker.execute(plan) for plan in plans], layout=worker.layouts()[0])
    finally:
        worker.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank did."""

    results: list[StepResult | None]
    layout: PoolLayout
