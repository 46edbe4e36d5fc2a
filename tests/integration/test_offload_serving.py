"""Deployments with pools too small for what returns: tokens are those of transformers, and no file stays behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster import LiveDeployment, live_deployment, wait_until_idle
from support.tiny_families import FAMILIES, build, make_prompt, reference_tokens
from support.tiny_tokenizers import save_letters

from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT)
PROMPTS = [make_prompt(seed, 100) for seed in range(6)]
OFFLOAD = "offload: {{cpu_gib: 0.0004, min_load_tokens: 16, disk: {{path: {folder}, gib: 0.02}}}}"
DEPLOYMENTS = {
    "gemma3_text": "instances: [{role: mixed, tensor_parallel: 2, cache: {memory: 128KiB}, %s}]\n",
    "llama": "instances: [{role: mixed, pipeline_parallel: 2, cache: {memory: 256KiB}, %s}]\n",
    "qwen3_next": "instances: [{role: prefill, cache: {memory: 256KiB}, %s}, {role: decode}]\n",
}


def tier_files(live: LiveDeployment) -> list[str]:
    name = live.running.config.name
    return [path.name for path in Path("/dev/shm").glob("blockferry-tier-*") if name in path.name]


def ask_one_by_one(live: LiveDeployment, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Each when the one before has ended and what it left is stored."""
    answers = []
    for prompt in prompts:
        answers += live.complete([prompt], GREEDY)
        time.sleep(0.1)
    return answers


@pytest.fixture(params=DEPLOYMENTS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LiveDeployment, list[list[int]]]]:
    path = build(FAMILIES[request.param], tmp_path)
    save_letters(path)
    answers = [reference_tokens(path, prompt, NUM_OUTPUT) for prompt in PROMPTS]
    model = f"model: {{path: {path}, dtype: float32, max_model_len: 128}}\n"
    limits = "scheduler: {max_num_seqs: 8, max_num_batched_tokens: 48}\ncache: {memory: 8MiB}\napi: {port: 0}\n"
    offload = OFFLOAD.format(folder=tmp_path / "disk")
    with live_deployment(model + limits + DEPLOYMENTS[request.param] % offload, tmp_path) as live:
        yield live, answers
    assert tier_files(live) == []
    assert not list((tmp_path / "disk").iterdir())


def test_what_the_pool_let_go_comes_back(served: tuple[LiveDeployment, list[list[int]]]) -> None:
    live, answers = served
    first, *_ = live.running.workers.values()
    assert len(tier_files(live)) == len(first)
    for _ in range(3):
        outcomes = ask_one_by_one(live, PROMPTS)
        assert [one.token_ids for one in outcomes] == answers
    assert sum(one.stats.num_loaded_tokens for one in outcomes if one.stats is not None) > 0
    assert [one.token_ids for one in live.complete(PROMPTS, GREEDY)] == answers
    status = wait_until_idle(live)
    tiers = status["instances"][0]["tiers"]
    assert tiers["num_loaded_tokens"] > 0, tiers
    assert tiers["memory_loaded_blocks"] + tiers["disk_loaded_blocks"] > 0, tiers
    assert tiers["disk_stored_blocks"] > 0, tiers
    assert tiers["num_failed_jobs"] == 0, tiers
    assert all(one["num_free_blocks"] == one["num_blocks"] for one in status["instances"])
