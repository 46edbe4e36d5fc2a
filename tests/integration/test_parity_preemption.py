"""Greedy float32 output equals transformers where requests preempt one another in tiny pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cluster import live_deployment, smollm2_dir
from support.parity import ParityPrompt, Reference, parity_prompts, short_prompts
from support.parity_check import MODEL_YAML, check

from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

# Pools so small that the prompts preempt one another: the longest prompt and little more fits.
TINY_POOLS = {
    "mixed": "instances: [{role: mixed}]\nscheduler: {max_num_batched_tokens: 64}\n",
    "pd": "instances: [{role: prefill}, {role: decode}]\n",
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(smollm2_dir())


@pytest.fixture(params=TINY_POOLS)
def tiny_pool(request: pytest.FixtureRequest) -> str:
    return TINY_POOLS[request.param]


def check_under_preemption(yaml: str, folder: Path, reference: Reference, prompts: list[ParityPrompt]) -> None:
    num_tokens = 64  # enough decoding to run out of blocks
    with live_deployment(MODEL_YAML + yaml, folder) as live:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        completions = live.complete([prompt.token_ids for prompt in prompts], sampling)
    check(reference, prompts, completions, num_tokens)
    assert sum(one.stats.num_preemptions for one in completions if one.stats is not None) > 0


@pytest.mark.full
def test_twenty_prompts_equal_transformers_under_preemption(
    tiny_pool: str, tmp_path: Path, reference: Reference
) -> None:
    prompts = parity_prompts(reference.tokenizer)
    check_under_preemption(tiny_pool + "cache: {num_blocks: 100}\n", tmp_path, reference, prompts)


def test_short_prompts_equal_transformers_under_preemption(
    tiny_pool: str, tmp_path: Path, reference: Reference
) -> None:
    prompts = short_prompts(reference.tokenizer)
    check_under_preemption(tiny_pool + "cache: {num_blocks: 30}\n", tmp_path, reference, prompts)
