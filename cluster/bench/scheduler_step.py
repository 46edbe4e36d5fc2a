"""Times the scheduler's part of a decode step, ledger included: plan() and commit() of a full batch, no model.

Every row holds a prompt of its own length, so that in each step one row in block_size crosses into a new block,
which is allocated, and one fills a block, which is hashed and cached. Stop ids are checked as in real use. Beside it
the same with drafts, where a step yields about two tokens per row, and so fills twice as many blocks.
"""

from __future__ import annotations

import dataclasses
import statistics
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
NUM_DRAFTS = 3  # of a row in a step
INSTANCE_ID = "bench"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How every row drafts; each draft is accepted with this chance where those before it were."""

    is_adaptive: bool
    acceptance: float

    @property
    def config(self) -> SpeculationConfig:
        """What the instance is told."""
        return SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=NUM_DRAFTS, is_adaptive=self.is_adaptive)


# where half of the drafts are accepted, or four in five, rows that adapt verify none or one in batches of these sizes
DRAFTINGS = (Drafting(is_adaptive=False, acceptance=0.5), Drafting(is_adaptive=True, acceptance=0.8))


def measure(num_rows: Sequence[int] = (256, 1024), *, num_runs: int = 5) -> list[Result]:
    """Results of each row count: scheduler_step without and with drafts, and ratio, the latter over the former.

    scheduler_step is milliseconds of schedule + update: a run's median step, as other processes' turns do not count.
    They take turns, run by run.
    """
    return [result for rows in num_rows for result in _measure_rows(rows, num_runs)]


def _measure_rows(num_rows: int, num_runs: int) -> list[Result]:
    benches = [_Bench(num_rows, drafting, num_runs=num_runs) for drafting in (None, *DRAFTINGS)]
    for bench in benches:
        bench.time_step()  # warm-up
    runs = np.array([[1e3 * bench.time_step() for bench in benches] for _ in range(num_runs)])
    params = {"rows": num_rows, "groups": 1, "block_size": BLOCK_SIZE}
    plain = runs[:, 0]
    results = [Result(name="scheduler_step", params={**params, "drafts": 0}, unit="ms", runs=plain.tolist())]
    for drafting, drafted in zip(DRAFTINGS, runs.T[1:], strict=True):
        mine = {**params, "drafts": NUM_DRAFTS, **dataclasses.asdict(drafting)}
        results.append(Result(name="scheduler_step", params=mine, unit="ms", runs=drafted.tolist()))
        ratio = (drafted / plain).tolist()
        results.append(Result(name="ratio", params={"of": "scheduler_step", **mine}, unit="1", runs=ratio))
    return results


class _Bench:
    """A scheduler whose every row decodes, and the model's part played by dice."""

    def __init__(self, num_rows: int, drafting: Drafting | None, *, num_runs: int) -> None:
        self._generator = np.random.default_rng(0)
        self._acceptance = 0.0 if drafting is None else drafting.acceptance
        self._central = _make(num_rows, drafting, num_steps=STEPS_PER_RUN * (num_runs + 1))
        self._fill(num_rows, most_tokens=1 if drafting is None else 1 + NUM_DRAFTS)

    def time_step(self) -> float:
        """Seconds that the median of STEPS_PER_RUN steps takes in plan() and commit()."""
        steps_s = []
        for _ in range(STEPS_PER_RUN):
            started_s = time.perf_counter()
            plan = self._central.plan(INSTANCE_ID)
            planned_s = time.perf_counter() - started_s
            assert plan is not None, "every row has tokens to go"
            result = self._result(plan)
            started_s = time.perf_counter()
            self._central.commit(INSTANCE_ID, result)
            steps_s.append(planned_s + time.perf_counter() - started_s)
        return statistics.median(steps_s)

    def _fill(self, num_rows: int, *, most_tokens: int) -> None:
        """Add requests and compute their prompts."""
        for handle in range(num_rows):
            num_prompt_tokens = int(self._generator.integers(*PROMPT_LENGTHS))
            request = Request(
                request_id=str(handle),
                handle=handle,
                prompt_token_ids=self._tokens(num_prompt_tokens),
                sampling=SamplingParams(max_tokens=1 << 30, stop_token_ids=STOP_TOKEN_IDS, seed=0),
                arrival_s=0.0,
            )
            self._central.add(request, Route(prefill=INSTANCE_ID, decode=INSTANCE_ID))
        while True:
            plan = self._central.plan(INSTANCE_ID)
            assert plan is not None, "every row has tokens to go"
            self._central.commit(INSTANCE_ID, self._result(plan))
            if len(plan.rows) == num_rows and (plan.num_scheduled <= most_tokens).all():
                return

    def _result(self, plan: StepPlan) -> StepResult:
        """Tokens drawn at random, of drafts as many accepted as the dice say, and new proposals."""
        num_sampled = int(np.count_nonzero(plan.sample))
        if not plan.num_proposals:
            return StepResult(step_id=plan.step_id, token_ids=self._tokens(num_sampled))
        num_drafts = plan.num_drafts[plan.sample] if len(plan.num_drafts) else np.zeros(num_sampled, np.int32)
        is_accepted = self._generator.random((num_sampled, NUM_DRAFTS)) < self._acceptance
        is_accepted &= np.arange(NUM_DRAFTS) < num_drafts[:, None]
        num_tokens = 1 + np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1, dtype=np.int32)
        return StepResult(
            step_id=plan.step_id,
            token_ids=self._tokens(int(num_tokens.sum())),
            num_tokens=num_tokens,
            proposals=self._tokens(num_sampled, plan.num_proposals),
        )

    def _tokens(self, *shape: int) -> Int32Array:
        return self._generator.integers(3, VOCAB_SIZE, shape, np.int32)


def _make(num_rows: int, drafting: Drafting | None, *, num_steps: int) -> CentralScheduler:
    """A scheduler with room for num_rows rows that have num_steps steps and more to go."""
    most_tokens = 1 if drafting is None else 1 + NUM_DRAFTS
    max_model_len = PROMPT_LENGTHS[1] + (num_steps + num_rows + 16) * most_tokens
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
    config = SchedulerConfig(
        max_num_seqs=num_rows,
        max_num_batched_tokens=8192,
        speculation=None if drafting is None else drafting.config,
    )
    return CentralScheduler([Instance(INSTANCE_ID, Role.MIXED, config=config, kv=kv, rows=rows)])
