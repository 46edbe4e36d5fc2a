"""Small trained hybrids write real words, so that a wrong state or window shows: tokens of transformers, in float32."""

import dataclasses
from pathlib import Path

import pytest
from support.local_engine import EngineOptions, LocalEngine, start_worker
from support.local_pair import LocalPair
from support.tiny_families import byte_models, byte_prompt, reference_tokens

pytestmark = pytest.mark.slow
OPTIONS = EngineOptions(max_model_len=512, max_num_batched_tokens=96)
NUM_OUTPUT = 48
MODELS = byte_models()


def prompts() -> list[list[int]]:
    """Beyond every window, two of them with a common beginning."""
    return [byte_prompt(330), byte_prompt(200), byte_prompt(120, first=5000)]


def expected(path: Path) -> list[list[int]]:
    return [reference_tokens(path, prompt, NUM_OUTPUT) for prompt in prompts()]


@pytest.mark.parametrize("name", MODELS)
def test_text_is_the_same_cold_warm_and_handed_over(name: str) -> None:
    path = MODELS[name]
    answers = expected(path)
    assert all(len(set(answer)) >= 6 for answer in answers)
    engine = LocalEngine(path, OPTIONS, start_worker(path, OPTIONS))
    assert engine.generate(prompts(), NUM_OUTPUT) == answers
    assert engine.generate(prompts(), NUM_OUTPUT) == answers
    assert engine.kv.stats().num_hit_tokens > 0

    pair = LocalPair(path, OPTIONS)
    try:
        assert pair.generate(prompts(), NUM_OUTPUT) == answers
        assert pair.generate(prompts(), NUM_OUTPUT) == answers
    finally:
        pair.close()


@pytest.mark.parametrize("budget", [95, 14, 16])  # the rest of the prefix is one chunk, or ends in one of one token
def test_prompt_of_one_token_more_than_what_is_computed_beside_it(budget: int) -> None:
    options = dataclasses.replace(OPTIONS, max_num_batched_tokens=budget + 1)
    path = MODELS["gemma3_text"]
    engine = LocalEngine(path, options, start_worker(path, options))
    engine.generate([byte_prompt(80)], 1)
    both = [byte_prompt(96), byte_prompt(97)]
    assert engine.generate(both, 8) == [reference_tokens(path, prompt, 8) for prompt in both]
    assert engine.kv.stats().num_hit_tokens >= 80 + 96
