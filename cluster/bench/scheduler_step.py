"""Times the scheduler's part of a decode step, ledger included: plan() and commit() of a full batch, no model.

Every row holds a prompt of its own length, so that in each step one row in block_size crosses into a new block,
which is allocated, and one fills a block, which is hashed and cached. Stop ids are checked as in real use. Beside it
the same with drafts, of which most are accepted, so that a step yields about three tokens per row and fills three times
as many blocks; how many drafts a row wants is learned all the while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from blockferry.cluster.bench.report import Result
from blockferry.engine.config import DraftMethod, Role, SchedulerConfig, SpeculationConfig
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Int32Array, Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import StepPlan, StepResult

BLOCK_SIZE = 16
PROMPT_LENGTHS = (64, 192)  # drawn uniformly
STOP_TOKEN_IDS = (0, 2)
VOCAB_SIZE = 49152
STEPS_PER_RUN = 8 * BLOCK_SIZE  # every row crosses eight blocks, or more
NUM_DRAFTS = 3  # of every row in every step
ACCEPTANCE = 0.8  # of each draft, where those before it were accepted
INSTANCE_ID = "bench"


def measure(num_rows: Sequence[int] = (256, 1024), *, num_runs: int = 5) -> list[Result]:
    """Results of each row count: scheduler_step without and with drafts, and ratio, the latter over the former.

    scheduler_step is milliseconds of schedule + update, mean of a run's steps. Both take turns, run by run.
    """
    return [result for rows in num_rows for result in _measure_rows(rows, num_runs)]


def _measure_rows(num_rows: int, num_runs: int) -> list[Result]:
    generator = np.random.default_rng(0)
    num_steps = STEPS_PER_RUN * (num_runs + 1)
    sides = [_fill(num_rows, num_drafts=drafts, num_steps=num_steps, generator=generator) for drafts in (0, NUM_DRAFTS)]
    for central in sides:
        _time_steps(central, generator)  # warm-up
    runs = [[1e3 * _time_steps(central, generator) / STEPS_PER_RUN for central in sides] for _ in range(num_runs)]
    params = {"rows": num_rows, "groups": 1, "block_size": BLOCK_SIZE}
    drafting = {**params, "drafts": NUM_DRAFTS, "acceptance": ACCEPTANCE}
    return [
        Result(name="scheduler_step", params={**params, "drafts": 0}, unit="ms", runs=[plain for plain, _ in runs]),
        Result(name="scheduler_step", params=drafting, unit="ms", runs=[drafted for _, drafted in runs]),
        Result(
            name="ratio",
            params={"of": "scheduler_step", **drafting},
            unit="1",
            runs=[one / other for other, one in runs],
        ),
    ]


def _fill(num_rows: int, *, num_drafts: int, num_steps: int, generator: np.random.Generator) -> CentralScheduler:
    """A scheduler whose every row decodes and has num_steps and more to go."""
    max_model_len = PROMPT_LENGTHS[1] + (num_steps + num_rows + 16) * (1 + num_drafts)
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
    drafting = SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=num_drafts) if num_drafts else None
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=8192, speculation=drafting)
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
        if len(plan.rows) == num_rows and (plan.num_scheduled <= 1 + num_drafts).all():
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
    """Tokens drawn at random, of drafts as many accepted as ACCEPTANCE says, and new proposals."""
    num_sampled = int(np.count_nonzero(plan.sample))
    if not plan.num_proposals:
        return StepResult(step_id=plan.step_id, token_ids=_tokens(generator, num_sampled))
    num_drafts = np.zeros(num_sampled, np.int32)
    if len(plan.num_drafts):
        num_drafts = plan.num_drafts[plan.sample]
    is_accepted = generator.random((num_sampled, NUM_DRAFTS)) < ACCEPTANCE
    is_accepted &= np.arange(NUM_DRAFTS) < num_drafts[:, None]
    num_tokens = 1 + np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1, dtype=np.int32)
    return StepResult(
        step_id=plan.step_id,
        token_ids=_tokens(generator, int(num_tokens.sum())),
        num_tokens=num_tokens,
        proposals=_tokens(generator, num_sampled, plan.num_proposals),
    )


def _tokens(generator: np.random.Generator, *shape: int) -> Int32Array:
    return generator.integers(3, VOCAB_SIZE, shape, np.int32)
