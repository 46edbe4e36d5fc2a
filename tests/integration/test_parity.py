"""Greedy float32 output equals transformers token for token, in every deployment shape, cold and warm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import LiveDeployment, live_deployment, smollm2_dir
from support.parity import ParityPrompt, Reference, parity_prompts, short_prompts
from support.parity_check import MODEL_YAML, check

from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

SHAPES = {
    "mixed": "instances: [{role: mixed}]\ncache: {num_blocks: 600}\n",
    "pd": "instances: [{role: prefill}, {role: decode}]\ncache: {num_blocks: 600}\n",
    "pd-pull": "instances: [{role: prefill}, {role: decode}]\nconnector: {mode: pull}\ncache: {num_blocks: 600}\n",
    "tp2": "instances: [{role: mixed, tensor_parallel: 2}]\ncache: {num_blocks: 600}\n",
    "pp2": "instances: [{role: mixed, pipeline_parallel: 2}]\ncache: {num_blocks: 600}\n",
    "pd-tp2": "instances: [{role: prefill, tensor_parallel: 2}, {role: decode, tensor_parallel: 2}]\n"
    "cache: {num_blocks: 600}\n",
}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(smollm2_dir())


@pytest.fixture(scope="module", params=SHAPES)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    with live_deployment(MODEL_YAML + SHAPES[request.param], Path(tmp_path_factory.mktemp("parity"))) as deployment:
        yield deployment


def check_cold_then_warm(live: LiveDeployment, reference: Reference, prompts: list[ParityPrompt]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    cold = live.complete([prompt.token_ids for prompt in prompts], sampling)
    check(reference, prompts, cold, NUM_TOKENS)
    warm = live.complete([prompt.token_ids for prompt in prompts], sampling)
    assert [one.token_ids for one in warm] == [one.token_ids for one in cold]
    assert sum(one.stats.num_cached_tokens for one in warm if one.stats is not None) > 0


@pytest.mark.full
def test_twenty_prompts_equal_transformers(live: LiveDeployment, reference: Reference) -> None:
    check_cold_then_warm(live, reference, parity_prompts(reference.tokenizer))


def test_short_prompts_equal_transformers(live: LiveDeployment, reference: Reference) -> None:
    prompts = short_prompts(reference.tokenizer)
    check_cold_then_warm(live, reference, prompts)
