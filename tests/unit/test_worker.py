"""Worker.execute follows plans: chunks, block sizes, layouts, resumption and log probabilities."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint, reference_greedy, reference_logits
from support.worker_driver import (
    GREEDY,
    PlanMaker,
    generate,
    outputs_by_row,
    plan_blocks,
    plans_to_length,
    start_worker,
    worker_spec,
)

from blockferry.engine.config import DraftMethod, DType, SpeculationConfig
from blockferry.engine.kv.plan_layout import LAYOUTS
from blockferry.engine.request import SamplingParams
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.ceiling import linear_ceiling
from blockferry.engine.worker.warm_up import warm_up_plans
from blockferry.engine.worker.worker import Worker

NUM_OUTPUT = 8
_RNG = random.Random(5)
PROMPTS = [[_RNG.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 37)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    reference = load_reference(path)
    return [reference_greedy(reference, prompt, NUM_OUTPUT) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def worker(path: Path) -> Worker:
    return start_worker(worker_spec(path))


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunk_size_changes_no_token(worker: Worker, expected: list[list[int]], chunk: int) -> None:
    assert generate(worker, PROMPTS, num_output=NUM_OUTPUT, chunk=chunk) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_layout_changes_no_token(path: Path, expected: list[list[int]], layout: str) -> None:
    worker = start_worker(worker_spec(path, layout=layout))

    assert generate(worker, PROMPTS, num_output=NUM_OUTPUT, chunk=20) == expected


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_block_size_changes_no_token(path: Path, expected: list[list[int]], block_size: int) -> None:
    worker = start_worker(worker_spec(path), num_blocks=256, block_size=block_size)

    assert generate(worker, PROMPTS, num_output=NUM_OUTPUT, chunk=20) == expected


def test_a_decode_step_planned_before_the_last_result_uses_the_workers_own_token(
    worker: Worker, expected: list[list[int]]
) -> None:
    maker = PlanMaker(num_blocks=64, block_size=16)
    plans = plans_to_length(maker, [maker.start(3, PROMPTS[1])], num_output=NUM_OUTPUT, chunk=64)

    # all plans exist before the first one runs
    assert outputs_by_row(plans, [worker.execute(plan) for plan in plans]) == {3: expected[1]}


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, top_p=0.9, seed=9)])
def test_a_preempted_row_resumes_in_another_row_with_the_same_tokens(worker: Worker, sampling: SamplingParams) -> None:
    whole = generate(worker, PROMPTS[2:], num_output=NUM_OUTPUT, chunk=64, sampling=sampling)[0]
    maker = PlanMaker(num_blocks=64, block_size=16)
    before = maker.start(2, PROMPTS[2], sampling)
    other = maker.start(4, PROMPTS[1])
    plans = plans_to_length(maker, [before, other], num_output=3, chunk=16)
    head = outputs_by_row(plans, [worker.execute(plan) for plan in plans])[2]
    maker.release(before)
    resumed = maker.start(5, PROMPTS[2] + head, sampling)
    resumed.num_prompt_tokens = len(PROMPTS[2])

    plans = plans_to_length(maker, [other, resumed], num_output=NUM_OUTPUT, chunk=16)
    tail = outputs_by_row(plans, [worker.execute(plan) for plan in plans])[5]

    assert head + tail == whole


def test_results_follow_the_plans_order_when_decode_and_prefill_mix(worker: Worker, expected: list[list[int]]) -> None:
    maker = PlanMaker(num_blocks=64, block_size=16)
    decoding, prefilling = maker.start(0, PROMPTS[0]), maker.start(1, PROMPTS[2])
    first = worker.execute(maker.plan([(decoding, 1)]))

    mixed = worker.execute(maker.plan([(prefilling, 37), (decoding, 1)]))

    assert first is not None
    assert mixed is not None
    assert mixed.token_ids.tolist() == [expected[2][0], expected[0][1]]


def test_a_row_handed_over_continues_from_blocks_it_did_not_compute(path: Path, expected: list[list[int]]) -> None:
    source, target = worker_with_pool_of(path), worker_with_pool_of(path)
    maker = PlanMaker(num_blocks=64, block_size=16)
    prefilled = maker.start(0, PROMPTS[2])
    first = source.worker.execute(maker.plan([(prefilled, 37)]))
    assert first is not None
    target.pool[:] = source.pool
    arrived = PlanMaker(num_blocks=64, block_size=16)
    handed = arrived.start(6, PROMPTS[2] + first.token_ids.tolist())
    handed.num_prompt_tokens = len(PROMPTS[2])
    handed.num_computed = len(PROMPTS[2])
    first_step = arrived.plan([(handed, 1)])  # its deltas name the blocks that the source filled, in the same order

    plans = [first_step, *plans_to_length(arrived, [handed], num_output=NUM_OUTPUT, chunk=1)]

    assert outputs_by_row(plans, [target.worker.execute(plan) for plan in plans])[6] == expected[2][1:]


def test_blocks_are_copied_and_zeroed_before_the_step(path: Path, expected: list[list[int]]) -> None:
    target = worker_with_pool_of(path)
    maker = PlanMaker(num_blocks=64, block_size=16)
    sequence = maker.start(0, PROMPTS[1])
    target.worker.execute(maker.plan([(sequence, 16)]))
    block = sequence.blocks[0]
    other = next(candidate for candidate in range(1, 64) if candidate != block)
    pages = target.pool.reshape(64, -1)

    target.worker.execute(
        StepPlan(step_id=9, copies=np.array([[0, block, other]], np.int32), zero=np.array([[0, 0]], np.int32))
    )

    assert (pages[other] == pages[block]).all()
    assert not pages[0].any()


def test_sampled_logprobs_are_those_of_the_model(worker: Worker, path: Path) -> None:
    sampling = dataclasses.replace(GREEDY, num_logprobs=3)
    maker = PlanMaker(num_blocks=64, block_size=16)

    result = worker.execute(maker.plan([(maker.start(0, PROMPTS[1], sampling), 16)]))

    assert result is not None
    (entry,) = result.logprobs
    best = reference_logits(load_reference(path), PROMPTS[1])[-1].log_softmax(-1).topk(3)
    assert (entry.row, entry.first_position, entry.is_prompt) == (0, 16, False)
    assert entry.entries[0].rank == 1
    assert entry.entries[0].token_ids.tolist() == [result.token_ids[0], *best.indices.tolist()]
    np.testing.assert_allclose(entry.entries[0].logprobs[1:], best.values, atol=1e-4)


@pytest.mark.parametrize("chunk", [10, 37])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first(worker: Worker, path: Path, chunk: int) -> None:
    sampling = dataclasses.replace(GREEDY, num_prompt_logprobs=1)
    maker = PlanMaker(num_blocks=64, block_size=16)
    plans = plans_to_length(maker, [maker.start(0, PROMPTS[2], sampling)], num_output=2, chunk=chunk)
    results = [worker.execute(plan) for plan in plans]

    parts = [part for result in results if result is not None for part in result.logprobs]

    assert all(part.is_prompt for part in parts)
    positions = [part.first_position + i for part in parts for i in range(len(part.entries))]
    assert positions == list(range(1, 37))
    logprobs = reference_logits(load_reference(path), PROMPTS[2]).log_softmax(-1)
    entries = [entry for part in parts for entry in part.entries]
    for position, entry in zip(positions, entries, strict=True):
        row = logprobs[position - 1]
        assert entry.token_ids.tolist() == [PROMPTS[2][position], int(row.argmax())]
        np.testing.assert_allclose(entry.logprobs, row[entry.token_ids].numpy(), atol=1e-4)
        assert entry.rank == int((row > row[PROMPTS[2][position]]).sum()) + 1


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_half_precision_logprobs_are_close_to_float32(path: Path, dtype: DType) -> None:
    worker = start_worker(worker_spec(path, dtype=dtype))
    sampling = dataclasses.replace(GREEDY, num_prompt_logprobs=0)
    maker = PlanMaker(num_blocks=64, block_size=16)

    result = worker.execute(maker.plan([(maker.start(0, PROMPTS[2], sampling), 37)]))

    assert result is not None
    ours = np.array([entry.logprobs[0] for entry in result.logprobs[0].entries])
    logprobs = reference_logits(load_reference(path), PROMPTS[2]).log_softmax(-1)
    theirs = logprobs[range(36), PROMPTS[2][1:]].numpy()
    assert np.abs(ours - theirs).max() < 0.25


def test_an_empty_plan_yields_an_empty_result(worker: Worker) -> None:
    result = worker.execute(StepPlan(step_id=3))

    assert result is not None
    assert (result.step_id, len(result.token_ids), result.error) == (3, 0, "")


def test_linear_ceiling_times_layers_and_head(worker: Worker) -> None:
    assert 0 < linear_ceiling(worker.model, num_rows=4, repeats=2) < 5
    with pytest.raises(ValueError, match="num_rows=0"):
        linear_ceiling(worker.model, num_rows=0, repeats=1)


@dataclasses.dataclass(frozen=True)
class WorkerWithPool:
    worker: Worker
    pool: np.ndarray


def worker_with_pool_of(path: Path) -> WorkerWithPool:
    worker = Worker(worker_spec(path))
    worker.load()
    plan = plan_blocks(worker.spec)
    pool = np.full(plan.bytes_per_rank, 0xFF, np.uint8)
    worker.init_cache(plan, lambda num_bytes: pool)
    return WorkerWithPool(worker=worker, pool=pool)


NGRAM = SpeculationConfig(method=DraftMethod.NGRAM)


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "drafts"])
def test_warm_up_changes_no_token(path: Path, expected: list[list[int]], speculation: SpeculationConfig | None) -> None:
    worker = start_worker(worker_spec(path, speculation=speculation))

    worker.warm_up()

    assert generate(worker, PROMPTS, num_output=NUM_OUTPUT, chunk=20) == expected


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "drafts"])
@pytest.mark.parametrize("num_blocks", [2, 3, 5, 8])
def test_warm_up_fits_any_pool(path: Path, num_blocks: int, speculation: SpeculationConfig | None) -> None:
    worker = start_worker(worker_spec(path, speculation=speculation), num_blocks=num_blocks, block_size=1)

    worker.warm_up()


@pytest.mark.parametrize("num_batched_tokens", [1, 2, 3, 64])
def test_warm_up_verifies_no_more_drafts_than_a_step_holds(path: Path, num_batched_tokens: int) -> None:
    spec = worker_spec(path, speculation=NGRAM, max_num_batched_tokens=num_batched_tokens)

    plans = warm_up_plans(spec, plan_blocks(spec).ledger)

    assert [int(plan.num_drafts.sum()) for plan in plans if len(plan.num_drafts)] == (
        [min(3, num_batched_tokens - 1)] if num_batched_tokens > 1 else []
    )
    assert max(int(plan.num_scheduled.sum()) for plan in plans) <= num_batched_tokens
