"""Real models write on after any cut what they would have written: greedy, sampled, penalised, handed over."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from support.local_engine import EngineOptions, LocalEngine, make_request, start_worker
from support.local_pair import LocalPair
from support.tiny_families import FAMILIES, build, byte_models, byte_prompt

from blockferry.engine.request import Request, SamplingParams

pytestmark = pytest.mark.slow
NUM_OUTPUT = 14
OPTIONS = EngineOptions(max_model_len=256, max_num_batched_tokens=48)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "nucleus": SamplingParams(temperature=1.2, top_p=0.9, top_k=20, seed=11, logit_bias={101: 3.0, 32: -2.0}),
    "penalised": SamplingParams(
        temperature=0.9, seed=3, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "min_tokens": SamplingParams(temperature=1.0, seed=8, min_tokens=9, stop_token_ids=tuple(range(97, 123))),
}
MODELS = byte_models()


def whole(handle: int, sampling: SamplingParams) -> Request:
    request = make_request(handle, byte_prompt(90), NUM_OUTPUT)
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=NUM_OUTPUT))


def cut(request: Request, handle: int, drawn: list[int]) -> Request:
    return dataclasses.replace(request, handle=handle, output_token_ids=np.array(drawn, np.int32))


def engine(name: str, options: EngineOptions = OPTIONS) -> LocalEngine:
    return LocalEngine(MODELS[name], options, start_worker(MODELS[name], options))


def check_every_cut(system: LocalEngine | LocalPair, sampling: SamplingParams) -> None:
    request = whole(system.next_handle(), sampling)
    (answer,) = system.run([request])
    assert len(set(answer)) > 2, answer
    cuts = [cut(request, system.next_handle(), answer[:num_drawn]) for num_drawn in range(1, len(answer))]
    rests = system.run(cuts)
    assert [answer[: num_drawn + 1] + rest for num_drawn, rest in enumerate(rests)] == [answer] * len(cuts)


@pytest.fixture(scope="module", params=["gemma3_text", "bamba"])
def mixed(request: pytest.FixtureRequest) -> LocalEngine:
    return engine(request.param)


@pytest.fixture(scope="module", params=["gemma3_text", "bamba"])
def pair(request: pytest.FixtureRequest) -> Iterator[LocalPair]:
    pair = LocalPair(MODELS[request.param], OPTIONS)
    yield pair
    pair.close()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answer_cut_after_any_token_goes_on_with_the_same_ones(mixed: LocalEngine, sampling: str) -> None:
    check_every_cut(mixed, SAMPLINGS[sampling])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answer_that_is_handed_over_goes_on_with_the_same_tokens(pair: LocalPair, sampling: str) -> None:
    check_every_cut(pair, SAMPLINGS[sampling])


def test_answer_goes_on_where_nothing_is_cached() -> None:
    check_every_cut(engine("gemma3_text", dataclasses.replace(OPTIONS, enable_caching=False)), SAMPLINGS["penalised"])


def test_log_probabilities_are_of_new_tokens_alone() -> None:
    system = engine("gemma3_text")
    request = whole(system.next_handle(), SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=1))
    (answer,) = system.run([request])
    resumed = cut(request, system.next_handle(), answer[:5])
    system.run([resumed])
    first, second = system.logprobs[request.handle], system.logprobs[resumed.handle]
    assert any(entry.is_prompt for entry in first)
    assert [entry.is_prompt for entry in second] == [False] * (NUM_OUTPUT - 5)
    assert [int(entry.entries[0].token_ids[0]) for entry in second] == answer[5:]


def test_encoder_decoder_goes_on_after_what_its_decoder_had_written(families_folder) -> None:
    path = build(FAMILIES["bart"], families_folder)
    inputs = list(range(5, 40))
    for system in (LocalEngine(path, OPTIONS, start_worker(path, OPTIONS)), LocalPair(path, OPTIONS)):
        request = make_request(system.next_handle(), [2], NUM_OUTPUT, encoder_input=inputs)
        (answer,) = system.run([request])
        cuts = [cut(request, system.next_handle(), answer[:num_drawn]) for num_drawn in (1, 6, 13)]
        assert system.run(cuts) == [answer[1:], answer[6:], answer[13:]]
        if isinstance(system, LocalPair):
            system.close()
