"""Steps that verify drafts yield what steps of one token would have: same tokens, same log probabilities."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import tiny_families
from support.draft_driver import DraftDriver, Drafts, Generated
from support.local_engine import EngineOptions, start_worker
from support.tiny_families import VOCAB_SIZE, make_prompt

from blockferry.engine.config import DType
from blockferry.engine.kv.plan import Planner
from blockferry.engine.request import SamplingParams
from blockferry.engine.worker.worker import Worker
from blockferry.kernels.cpu_amx import has_amx

FAMILIES = ("llama", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3")
NUM_OUTPUT = 40
NUM_DRAFTS = 3
PROMPTS = [make_prompt(seed, length) for seed, length in enumerate((5, 21, 33, 30, 12, 3, 40))]
OPTIONS = EngineOptions(max_model_len=96, memory_bytes=1 << 23, block_size=8, planner=Planner.UNIFORM)


def sampled(**changes: object) -> SamplingParams:
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=NUM_OUTPUT, num_logprobs=4)
    return dataclasses.replace(params, **changes)  # type: ignore[arg-type]  # names and types are the tests'


SAMPLINGS = [
    sampled(temperature=0.0),
    sampled(),
    sampled(top_k=7, seed=5),
    sampled(top_p=0.8, temperature=1.2),
    sampled(min_p=0.05, top_k=40, temperature=1.5),
    sampled(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={5: 2.0, 9: -3.0}),
    sampled(temperature=0.0, frequency_penalty=0.5, min_tokens=20, stop_token_ids=tuple(range(3, 60))),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ground:
    """A family's worker, and what it says without drafts."""

    worker: Worker
    driver: DraftDriver
    plain: list[Generated]

    def drafts_of(self, is_right: list[bool]) -> Drafts:
        """Drafts of which those marked are right, at places that differ from step to step."""
        truths = [one.known for one in self.plain]

        def propose(number: int, known: list[int]) -> list[int]:
            truth = truths[number]
            following = truth[len(known) : len(known) + NUM_DRAFTS]
            marks = [is_right[(len(known) + place) % len(is_right)] for place in range(NUM_DRAFTS)]
            return [token if mark else (token + 1) % VOCAB_SIZE for token, mark in zip(following, marks)]

        return propose


def make_ground(path: Path, options: EngineOptions) -> Ground:
    worker = start_worker(path, options)
    driver = DraftDriver(worker, options.plan(path).ledger, chunk=16)
    return Ground(worker=worker, driver=driver, plain=driver.run(PROMPTS, SAMPLINGS, num_output=NUM_OUTPUT))


@pytest.fixture(scope="module", params=FAMILIES)
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    made = make_ground(tiny_families.checkpoint(request.param, tmp_path_factory), OPTIONS)
    yield made
    made.worker.close()


DRAFTERS = {"right": [True], "wrong": [False], "partly right": [True, True, False, True, False]}


@pytest.mark.parametrize("is_right", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_drafts_change_no_token_and_no_log_probability(ground: Ground, is_right: list[bool]) -> None:
    made = ground.driver.run(PROMPTS, SAMPLINGS, ground.drafts_of(is_right), num_output=NUM_OUTPUT)

    assert [one.output for one in made] == [one.output for one in ground.plain]
    for one, plain in zip(made, ground.plain, strict=True):
        assert_same_logprobs(one, plain)


def assert_same_logprobs(one: Generated, plain: Generated) -> None:
    assert one.logprob_positions == plain.logprob_positions
    for entry, expected in zip(one.logprobs, plain.logprobs, strict=True):
        assert entry.token_ids[0] == expected.token_ids[0]
        np.testing.assert_allclose(entry.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "count"), [("right", 1 + NUM_DRAFTS), ("wrong", 1)])
def test_a_step_yields_as_many_tokens_as_drafts_are_right_and_one(ground: Ground, name: str, count: int) -> None:
    made = ground.driver.run(PROMPTS, SAMPLINGS, ground.drafts_of(DRAFTERS[name]), num_output=NUM_OUTPUT)

    for one in made:
        # the first token is the prompt's, the last step is cut to what is still wanted
        assert set(one.steps[1:-1]) == {count}


@pytest.mark.skipif(not has_amx(), reason="whose products of a row do not depend on the rows beside it")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_on_tiles_the_numbers_are_those_of_decode_steps_bit_for_bit(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = dataclasses.replace(OPTIONS, dtype=DType.BFLOAT16)
    ground = make_ground(tiny_families.checkpoint(family, tmp_path_factory), options)

    made = ground.driver.run(PROMPTS, SAMPLINGS, ground.drafts_of(DRAFTERS["partly right"]), num_output=NUM_OUTPUT)
    ground.worker.close()

    assert [one.output for one in made] == [one.output for one in ground.plain]
    for one, plain in zip(made, ground.plain, strict=True):
        for entry, expected in zip(one.logprobs, plain.logprobs, strict=True):
            np.testing.assert_array_equal(entry.logprobs, expected.logprobs)
