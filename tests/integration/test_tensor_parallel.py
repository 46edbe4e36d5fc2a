"""Instances of several ranks, each a real process, compute what transformers computes."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import load_reference, make_checkpoint, reference_greedy
from support.rank_processes import run_ranks
from support.worker_driver import (
    GREEDY,
    PlanMaker,
    execute_all,
    outputs_by_row,
    plans_to_length,
    start_worker,
    worker_spec,
)

from blockferry.engine.errors import RankLost
from blockferry.engine.request import SamplingParams
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.spec import WorkerSpec

pytestmark = pytest.mark.slow
NUM_OUTPUT = 10
_RNG = random.Random(3)
PROMPTS = [[_RNG.randrange(3, 300) for _ in range(length)] for length in (1, 7, 40)]


def plans_for(sampling: SamplingParams) -> list[StepPlan]:
    maker = PlanMaker(num_blocks=64, block_size=16)
    sequences = [maker.start(row, prompt, sampling) for row, prompt in enumerate(PROMPTS)]
    return plans_to_length(maker, sequences, num_output=NUM_OUTPUT, chunk=16)


@pytest.mark.parametrize(
    ("family", "tp_size", "pp_size", "heads", "layers"),
    [
        ("llama", 2, 1, [(0, 2), (2, 1)], [(0, 1, 2)] * 2),
        ("llama_biased", 1, 2, [(0, 3)] * 2, [(0, 1), (2,)]),
        ("qwen2", 2, 2, [(0, 2), (2, 1)] * 2, [(0, 1), (0, 1), (2,), (2,)]),
        ("one_kv_head", 3, 1, [(0, 1)] * 3, [(0, 1, 2)] * 3),
    ],
)
def test_ranks_share_the_model_and_generate_what_transformers_does(
    tmp_path: Path, family: str, tp_size: int, pp_size: int, heads: list[tuple[int, int]], layers: list[tuple[int, ...]]
) -> None:
    path = make_checkpoint(tmp_path / "model", family)
    spec = worker_spec(path, tp_size=tp_size, pp_size=pp_size)
    plans = plans_for(GREEDY)

    ranks = run_ranks(spec, tmp_path / "meet", execute_all, plans)

    assert outputs_by_row(plans, ranks[spec.sampler_rank].results) == {
        row: reference_greedy(load_reference(path), prompt, NUM_OUTPUT) for row, prompt in enumerate(PROMPTS)
    }
    for rank, report in enumerate(ranks):
        assert rank == spec.sampler_rank or set(report.results) == {None}
    assert [(report.layout.head_start, report.layout.num_heads) for report in ranks] == heads
    assert [report.layout.layer_ids for report in ranks] == layers


def run_until_rank_1_leaves(spec: WorkerSpec, plans: Sequence[StepPlan]) -> str:
    worker = start_worker(spec)
    try:
        worker.execute(plans[0])
        if spec.rank == 1:
            return "left"
        worker.execute(plans[1])
    except RankLost as error:
        return str(error)
    finally:
        worker.close()
    return "noticed nothing"


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "message"), [(2, 1, "rank 0 failed to sum over its stage: "), (1, 2, "rank 0 failed to ")]
)
def test_a_rank_that_leaves_ends_the_others_step_with_its_phase(
    tmp_path: Path, tp_size: int, pp_size: int, message: str
) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    spec = worker_spec(path, tp_size=tp_size, pp_size=pp_size, collective_timeout_s=20.0)

    said = run_ranks(spec, tmp_path / "meet", run_until_rank_1_leaves, plans_for(GREEDY))

    assert said[0].startswith(message)
    assert said[1] == "left"


def test_logprobs_and_seeded_draws_of_four_ranks_equal_those_of_one(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=11, num_logprobs=2, num_prompt_logprobs=3)
    spec = worker_spec(path, tp_size=2, pp_size=2)
    plans = plans_for(sampling)
    alone = execute_all(worker_spec(path), plans).results

    shared = run_ranks(spec, tmp_path / "meet", execute_all, plans)[spec.sampler_rank].results

    assert outputs_by_row(plans, shared) == outputs_by_row(plans, alone)
    ours = [entry for result in shared for entry in result.logprobs]
    theirs = [entry for result in alone for entry in result.logprobs]
    assert [(e.row, e.first_position, e.is_prompt) for e in ours] == [
        (e.row, e.first_position, e.is_prompt) for e in theirs
    ]
    for mine, other in zip(ours, theirs, strict=True):
        for left, right in zip(mine.entries, other.entries, strict=True):
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)
