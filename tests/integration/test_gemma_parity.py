"""Gemma 3 270M with its real weights: prompts longer than its window continue as transformers says, in float32.

Mixed and handed over from prefill to decode, with a cold and a warm cache.
"""

import pydoc_data.topics
from pathlib import Path

import pytest
import torch
import transformers
from support.local_engine import EngineOptions, LocalEngine, start_worker
from support.local_pair import LocalPair

from blockferry.cluster.fetch import is_fetched, model_dir

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]
MODEL = "gemma3-270m"
NUM_OUTPUT = 24
WINDOW = 512
OPTIONS = EngineOptions(max_model_len=1280, max_num_batched_tokens=256, memory_bytes=1 << 28)


@pytest.fixture(scope="module")
def folder() -> Path:
    assert is_fetched(MODEL), f"run `blockferry fetch-model {MODEL}` before the tests that are marked `full`"
    return model_dir(MODEL)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Two far beyond the window, of which one begins as the other, and a short one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "".join(pydoc_data.topics.topics[name] for name in ("lambda", "assert", "class", "with"))
    token_ids = tokenizer(text)["input_ids"]
    prompts = [token_ids[:1100], token_ids[:700], token_ids[:40]]
    assert len(prompts[0]) > 2 * WINDOW
    return prompts


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_OUTPUT)
        answers.append(output[0].tolist()[len(prompt) :])
    return answers


def test_mixed_instance_continues_as_transformers_does(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = LocalEngine(folder, OPTIONS, start_worker(folder, OPTIONS))

    assert engine.generate(prompts, NUM_OUTPUT) == expected
    num_hit_tokens = engine.kv.stats().num_hit_tokens
    assert engine.generate(prompts, NUM_OUTPUT) == expected
    assert engine.kv.stats().num_hit_tokens > num_hit_tokens + 2 * WINDOW


def test_handed_over_sequences_continue_as_transformers_does(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = LocalPair(folder, OPTIONS)
    try:
        assert pair.generate(prompts, NUM_OUTPUT) == expected
        assert pair.generate(prompts, NUM_OUTPUT) == expected
    finally:
        pair.close()
    assert pair.num_ferried_bytes > 0
