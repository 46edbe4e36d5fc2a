"""Times the scheduler's part of a decode step, ledger included: plan() and commit() of a full batch, no model.

Every row holds a prompt of its own length, so that in each step one row in block_size crosses into a new block,
which is allocated, and one fills a block, which is hashed and cached. Stop ids are checked as in real use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from blockferry.cluster.bench.report import Result
from blockferry.engine.config import Role, SchedulerConfig
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import StepPlan, StepResult

BLOCK_SIZE = 16
PROMPT_LENGTHS = (64, 192)  # drawn uniformly
STOP_TOKEN_IDS = (0, 2)
VOCAB_SIZE = 49152
STEPS_PER_RUN = 8 * BLOCK_SIZE  # every row crosses eight blocks
INSTANCE_ID = "bench"


def measure(num_rows: Sequence[int] = (256, 1024), *, num_runs: int = 5) -> list[Result]:
    """One result scheduler_step per row count: milliseconds of schedule + update, mean of a run's steps."""
    return [
        Result(
            name="scheduler_step",
            params={"rows": rows, "groups": 1, "block_size": BLOCK_SIZE},
            unit="ms",
            runs=_measure_runs(rows, num_runs),
        )
        for rows in num_rows
    ]


def _measure_runs(num_rows: int, num_runs: int) -> list[float]:
    generator = np.random.default_rng(0)
    central = _fill(num_rows, num_steps=STEPS_PER_RUN * (num_runs + 1), generator=generator)
    _time_steps(central, generator)  # warm-up
    return [1e3 * _time_steps(central, generator) / STEPS_PER_RUN for _ in range(num_runs)]


def _fill(num_rows: int, *, num_steps: int, generator: np.random.Generator) -> CentralScheduler:
    """A scheduler whose every row decodes and has num_steps and more to go."""
    max_model_len = PROMPT_LENGTHS[1] + num_steps + num_rows + 16
    rows = RowTable(max_rows=num_rows, max_model_len=max_model_len)
    spec = AttentionSpec(block_size=BLOCK_SIZE, content=KVContent(num_kv_heads=3, head_dim=64, dtype_bytes=2))
    kv = KVCacheManager(
        KVCacheConfig(
            num_blocks=num_rows * (spec.num_blocks_for(max_model_len) + 1) + 1,
            groups=(KVCacheGroup(layer_ids=(0,), spec=spec),),
            hash_block_size=BLOCK_SIZE,
        ),
        rows,
    )
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=8192)
    central = CentralScheduler([Instance(INSTANCE_ID, Role.MIXED, config=config, kv=kv, rows=rows)])
    for handle in range(num_rows):
        num_prompt_tokens = int(generator.integers(*PROMPT_LENGTHS))
        request = Request(
            request_id=str(handle),
            handle=handle,
            prompt_token_ids=generator.integers(3, VOCAB_SIZE, num_prompt_tokens, np.int32),
            sampling=SamplingParams(max_tokens=max_model_len, stop_token_ids=STOP_TOKEN_IDS, seed=0),
            arrival_s=0.0,
        )
        central.add(request, Route(prefill=INSTANCE_ID, decode=INSTANCE_ID))
    while True:
        plan = central.plan(INSTANCE_ID)
        assert plan is not None, "every row has tokens to go"
        central.commit(INSTANCE_ID, _result(plan, generator))
        if len(plan.rows) == num_rows and (plan.num_scheduled == 1).all():
            return central


def _time_steps(central: CentralScheduler, generator: np.random.Generator) -> float:
    """Seconds that STEPS_PER_RUN steps take in plan() and commit()."""
    total_s = 0.0
    for _ in range(STEPS_PER_RUN):
        started_s = time.perf_counter()
        plan = central.plan(INSTANCE_ID)
        total_s += time.perf_counter() - started_s
        assert plan is not None, "every row has tokens to go"
        result = _result(plan, generator)
        started_s = time.perf_counter()
        central.commit(INSTANCE_ID, result)
        total_s += time.perf_counter() - started_s
    return total_s


def _result(plan: StepPlan, generator: np.random.Generator) -> StepResult:
    num_sampled = int(np.count_nonzero(plan.sample))
    return StepResult(step_id=plan.step_id, token_ids=generator.integers(3, VOCAB_SIZE, num_sampled, np.int32))
