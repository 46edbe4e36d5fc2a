"""Several kinds of cache served prefill/decode by processes: tokens are those of transformers, nothing stays behind."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.cluster import LiveDeployment, complete, live_deployment, stream, wait_until_idle
from support.tiny_families import FAMILIES, build, make_prompt, reference_tokens
from support.tiny_tokenizers import save_letters

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]

PAIR = "instances: [{role: prefill}, {role: decode}]\n"
UNEQUAL = (
    "instances: [{role: prefill, tensor_parallel: 2, cache: {block_size: 16}}, "
    "{role: decode, cache: {block_size: 32, layout: LBNHC}}]\n"
)
DEPLOYMENTS = {
    "gemma3_text": PAIR,  # windows
    "deepseek_v3": PAIR + "connector: {mode: pull}\n",  # latents, experts
    "qwen3_next": UNEQUAL,  # states, experts
}
NUM_OUTPUT = 20
PROMPTS = [make_prompt(seed, num_tokens) for seed, num_tokens in enumerate((5, 70, 33))]
PROMPTS.append(PROMPTS[1][:40] + make_prompt(9, 60))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT)
NUM_ABANDONED = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running deployment and what its model should say."""

    answers: list[list[int]]  # to PROMPTS
    live: LiveDeployment


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hybrid")
    name = request.param
    path = build(FAMILIES[name], folder)
    save_letters(path)
    answers = [reference_tokens(path, prompt, NUM_OUTPUT) for prompt in PROMPTS]
    model = f"model: {{path: {path}, dtype: float32, max_model_len: 256}}\n"
    limits = "scheduler: {max_num_seqs: 8, max_num_batched_tokens: 48}\ncache: {memory: 8MiB}\napi: {port: 0}\n"
    with live_deployment(model + limits + DEPLOYMENTS[name], folder, with_api=True) as live:
        yield Served(answers=answers, live=live)


async def abandon(client: ZmqEngineClient, seed: int) -> None:
    """Leave after a few tokens of a long answer."""
    outputs = stream(client, make_prompt(seed, 60), SamplingParams(temperature=0.0, max_tokens=150))
    num_tokens = 0
    async for output in outputs:
        assert output.finish_reason is None, output
        num_tokens += len(output.token_ids)
        if num_tokens > seed % 3:
            break
    await outputs.aclose()  # type: ignore[attr-defined]  # submit() is an async generator


def ask_among_leavers(live: LiveDeployment) -> list[list[int]]:
    """What all prompts are answered while as many other requests are aborted mid-stream."""

    async def use(client: ZmqEngineClient) -> list[list[int]]:
        leaving = [asyncio.create_task(abandon(client, 100 + number)) for number in range(NUM_ABANDONED)]
        answers = await asyncio.gather(*(complete(client, prompt, GREEDY) for prompt in PROMPTS))
        await asyncio.gather(*leaving)
        return [answer.token_ids for answer in answers]

    return live.ask(use)


def test_answers_are_those_of_transformers_cold_and_warm_and_all_blocks_come_back(served: Served) -> None:
    assert ask_among_leavers(served.live) == served.answers
    assert ask_among_leavers(served.live) == served.answers

    status = wait_until_idle(served.live)  # the scheduler dies on a corrupt ledger
    for instance in status["instances"]:
        assert instance["num_free_blocks"] == instance["num_blocks"], instance
    assert sum(instance["num_hit_tokens"] for instance in status["instances"]) > 0
    assert all(count == 0 for count in status["handoffs"].values()), status["handoffs"]
    assert status["transfers"]["num_bytes"] > 0
    assert status["healthy"], status["reason"]


def test_completions_continue_token_ids_as_transformers_does(served: Served) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    answer = httpx.post(f"{served.live.running.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens = [
        [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        for choice in answer.json()["choices"]
    ]
    assert tokens == served.answers
