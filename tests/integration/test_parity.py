"""Greedy float32 output equals transformers token for token, in every deployment shape, cold and warm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import MODEL, LiveDeployment, live_deployment, smollm2_dir
from support.parity import ParityPrompt, Reference, parity_prompts

from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL_YAML = f"model: {{name: {MODEL}, dtype: float32, max_model_len: 2048}}\n"
SHAPES = {
    "mixed": "instances: [{role: mixed}]\ncache: {num_blocks: 600}\n",
    "pd": "instances: [{role: prefill}, {role: decode}]\ncache: {num_blocks: 600}\n",
    "pd-pull": "instances: [{role: prefill}, {role: decode}]\nconnector: {mode: pull}\ncache: {num_blocks: 600}\n",
    "tp2": "instances: [{role: mixed, tensor_parallel: 2}]\ncache: {num_blocks: 600}\n",
    "pp2": "instances: [{role: mixed, pipeline_parallel: 2}]\ncache: {num_blocks: 600}\n",
    "pd-tp2": "instances: [{role: prefill, tensor_parallel: 2}, {role: decode, tensor_parallel: 2}]\n"
    "cache: {num_blocks: 600}\n",
}
# Pools so small that the prompts preempt one another: the longest prompt and little more fits.
TINY_POOLS = {
    "mixed": "instances: [{role: mixed}]\nscheduler: {max_num_batched_tokens: 64}\n",
    "pd": "instances: [{role: prefill}, {role: decode}]\n",
}
NUM_TOKENS = 24
SHORT_NAMES = ("raw0", "raw3", "raw6", "raw7", "chat0", "chat1", "prose300")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(smollm2_dir())


@pytest.fixture(scope="module", params=SHAPES)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    with live_deployment(MODEL_YAML + SHAPES[request.param], Path(tmp_path_factory.mktemp("parity"))) as deployment:
        yield deployment


@pytest.fixture(params=TINY_POOLS)
def tiny_pool(request: pytest.FixtureRequest) -> str:
    return TINY_POOLS[request.param]


def check_cold_then_warm(live: LiveDeployment, reference: Reference, prompts: list[ParityPrompt]) -> None:
    expected = {prompt.name: reference.greedy(prompt.token_ids, num_tokens=NUM_TOKENS) for prompt in prompts}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    for cache in ("cold", "warm"):
        completions = live.complete([prompt.token_ids for prompt in prompts], sampling)
        answers = {prompt.name: one.token_ids for prompt, one in zip(prompts, completions, strict=True)}
        wrong = [name for name, token_ids in answers.items() if token_ids != expected[name]]
        assert wrong == [], (cache, {name: (answers[name], expected[name]) for name in wrong})


@pytest.mark.full
def test_twenty_prompts_equal_transformers(live: LiveDeployment, reference: Reference) -> None:
    check_cold_then_warm(live, reference, parity_prompts(reference.tokenizer))


def test_short_prompts_equal_transformers(live: LiveDeployment, reference: Reference) -> None:
    prompts = [prompt for prompt in parity_prompts(reference.tokenizer) if prompt.name in SHORT_NAMES]
    check_cold_then_warm(live, reference, prompts)


def check_under_preemption(yaml: str, folder: Path, reference: Reference, prompts: list[ParityPrompt]) -> None:
    num_tokens = 64  # enough decoding to run out of blocks
    with live_deployment(MODEL_YAML + yaml, folder) as live:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        completions = live.complete([prompt.token_ids for prompt in prompts], sampling)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == reference.greedy(prompt.token_ids, num_tokens=num_tokens), prompt.name
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
    prompts = [prompt for prompt in parity_prompts(reference.tokenizer) if prompt.name in SHORT_NAMES]
    check_under_preemption(tiny_pool + "cache: {num_blocks: 30}\n", tmp_path, reference, prompts)
