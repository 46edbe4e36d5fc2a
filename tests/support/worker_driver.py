"""A minimal scheduler for worker tests: gives rows blocks and drives Worker.execute through StepPlans."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from blockferry.engine.config import DType
from blockferry.engine.request import SamplingParams
from blockferry.engine.wire import BlockDeltas, NewRow, StepPlan, StepResult, pack, plan_from_bytes
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1 << 30)


def worker_spec(path: Path, **options: object) -> WorkerSpec:
    """A small float32 spec."""
    defaults: dict[str, object] = {
        "dtype": DType.FLOAT32,
        "max_model_len": 128,
        "max_rows": 8,
        "max_num_batched_tokens": 256,
        "block_size": 16,
    }
    return WorkerSpec(model_path=path, **(defaults | options))  # type: ignore[arg-type]  # checked by the dataclass's users


def start_worker(spec: WorkerSpec, *, num_blocks: int = 64) -> Worker:
    """A loaded worker whose pool starts full of NaN, so that reading an unwritten slot shows."""
    worker = Worker(spec)
    worker.load()
    worker.init_cache(num_blocks, lambda num_bytes: np.full(num_bytes, 0xFF, np.uint8))
    return worker


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

    def learn(self, chunks: Sequence[tuple[Running, int]], result: StepResult) -> None:
        """Append a step's tokens."""
        tokens = iter(result.token_ids.tolist())
        for sequence, _ in chunks:
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(next(tokens))
        assert next(tokens, None) is None, result


def run_to_length(
    worker: Worker, maker: PlanMaker, sequences: Sequence[Running], *, num_output: int, chunk: int
) -> Iterator[StepResult]:
    """Step all sequences, at most `chunk` tokens of each, until every one has num_output output tokens."""
    while True:
        chunks = [
            (sequence, min(chunk, len(sequence.token_ids) - sequence.num_computed))
            for sequence in sequences
            if len(sequence.token_ids) - sequence.num_prompt_tokens < num_output
        ]
        if not chunks:
            return
        result = worker.execute(maker.plan(chunks))
        assert result is not None
        maker.learn(chunks, result)
        yield result


def generate(
    worker: Worker, prompts: Sequence[Sequence[int]], *, num_output: int, chunk: int, sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """Outputs of prompts run together, row numbers in reverse order."""
    layout = worker.layout()
    maker = PlanMaker(num_blocks=layout.num_blocks, block_size=layout.block_size)
    rows = range(worker.spec.max_rows)
    sequences = [maker.start(row, prompt, sampling) for row, prompt in zip(reversed(rows), prompts, strict=False)]
    for _ in run_to_length(worker, maker, sequences, num_output=num_output, chunk=chunk):
        pass
    for sequence in sequences:
        maker.release(sequence)
    worker.execute(maker.plan([]))
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
