"""Drafts in real deployments: what is answered is what the model writes without them, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_client import parse_events
from support.cluster import Completion, LiveDeployment, complete, live_deployment, wait_until_idle
from support.local_engine import EngineOptions, LocalEngine, make_request, start_worker
from support.tiny_families import byte_models, byte_prompt, make_prompt, one_thread
from support.tiny_mtp import Likeness, build_mtp
from support.tiny_tokenizers import byte_level

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_OUTPUT = 60
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT),
    "sampled": SamplingParams(temperature=0.7, top_p=0.95, seed=11, max_tokens=NUM_OUTPUT),
    "penalised": SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, max_tokens=NUM_OUTPUT),
}
TEXT = """
model: {{path: {path}, dtype: float32, max_model_len: 256}}
cache: {{num_blocks: 120, block_size: 16}}
speculation: {speculation}
api: {{port: 0}}
instances: {instances}
"""
MIXED = "[{role: mixed, replicas: 2, resources: {num_cpus: 0.5}}]"
APART = "[{role: prefill, resources: {num_cpus: 0.5}}, {role: decode, resources: {num_cpus: 0.5}}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A deployment that drafts, what it is asked, and what is written without drafts, by sampling."""

    live: LiveDeployment
    prompts: Sequence[Sequence[int]]
    expected: Mapping[str, list[list[int]]]


def by_ngrams(_folder: Path) -> tuple[Path, str, list[list[int]]]:
    """A model with recurrent states; it knows a text by heart, which follows what it will write next."""
    prompts = [byte_prompt(60, first=first + 60) + byte_prompt(60, first=first) for first in (100, 200, 300)]
    return byte_models()["bamba"], "{method: ngram}", prompts


def by_a_head(folder: Path) -> tuple[Path, str, list[list[int]]]:
    """A head that is right about a part of what it drafts."""
    made = build_mtp("llama", folder, likeness=Likeness.SOME)
    speculation = f"{{method: mtp, head: {made.head_path}}}"
    return made.path, speculation, [make_prompt(seed, 50) for seed in range(3)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((by_ngrams, MIXED), id="mixed, n-grams"),
        pytest.param((by_a_head, APART), id="apart, a head", marks=pytest.mark.ucx),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    make, instances = request.param
    folder = tmp_path_factory.mktemp("speculation")
    original, speculation, prompts = make(folder)
    model = folder / "model"
    shutil.copytree(original, model)
    byte_level()._backend.save(str(model / "tokenizer.json"))
    text = TEXT.format(path=model, speculation=speculation, instances=instances)
    with live_deployment(text, folder, with_api=True) as live:
        yield Case(live=live, prompts=prompts, expected=without_drafts(model, prompts))


def without_drafts(model: Path, prompts: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    options = EngineOptions()
    engine = LocalEngine(model, options, start_worker(model, options))

    def run(sampling: SamplingParams) -> list[list[int]]:
        requests = [make_request(engine.next_handle(), prompt, NUM_OUTPUT) for prompt in prompts]
        return engine.run([dataclasses.replace(one, sampling=sampling) for one in requests])

    with one_thread():
        return {name: run(sampling) for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_without_drafts(case: Case, name: str) -> None:
    done = case.live.complete(case.prompts, SAMPLINGS[name])
    assert [one.token_ids for one in done] == case.expected[name]
    drafted = sum(one.stats.num_drafted_tokens for one in done if one.stats is not None)
    accepted = sum(one.stats.num_accepted_tokens for one in done if one.stats is not None)
    assert 0 < accepted < drafted


def ask(case: Case, **body: Any) -> httpx.Response:
    asked = {"prompt": case.prompts[0], "max_tokens": NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True, **body}
    answer = httpx.post(f"{case.live.running.url}/v1/completions", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def test_streams_bring_several_tokens_at_once_and_the_whole_text(case: Case) -> None:
    whole = ask(case).json()
    assert whole["choices"][0]["text"] == byte_level().decode(case.expected["greedy"][0])
    events = parse_events(ask(case, stream=True, logprobs=0, stream_options={"include_usage": True}).text)
    assert "".join(one["choices"][0]["text"] for one in events[:-1]) == whole["choices"][0]["text"]
    assert sum(len(one["choices"][0]["logprobs"]["tokens"]) for one in events[:-1]) == NUM_OUTPUT
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == NUM_OUTPUT
    assert len(events) < NUM_OUTPUT


def test_answers_end_at_their_last_token_wherever_drafts_end(case: Case) -> None:
    columns = ask(case, logprobs=0, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["tokens"]
    for num_tokens in range(20, 26):
        body = ask(case, logprobs=0, return_tokens_as_token_ids=True, max_tokens=num_tokens).json()
        assert body["choices"][0]["logprobs"]["tokens"] == columns[:num_tokens]
        assert body["usage"]["completion_tokens"] == num_tokens


def test_answers_end_at_a_stop_string_wherever_drafts_end(case: Case) -> None:
    text = ask(case).json()["choices"][0]["text"]
    for place in range(10, 16):
        stop = text[place : place + 3]
        choice = ask(case, stop=stop).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text.split(stop)[0], "stop")


def test_counters_are_shown(case: Case) -> None:
    ask(case)
    counts = [one["speculation"] for one in case.live.status()["instances"] if one["role"] != "prefill"]
    assert sum(one["num_accepted"] for one in counts) > 0
    assert all(one["num_drafted"] == sum(one["drafted_per_position"]) for one in counts)
    page = httpx.get(f"{case.live.running.url}/metrics", timeout=60).text
    assert 'blockferry:spec_decode_num_accepted_tokens_per_pos_total{engine="' in page


def test_an_instance_that_dies_costs_no_token(case: Case) -> None:
    victim = case.live.running.instances.get("mixed-0")
    if victim is None:
        pytest.skip("there is no other instance to go on")

    async def kill_amid(client: ZmqEngineClient) -> list[Completion]:
        tasks = [
            asyncio.create_task(complete(client, prompt, SAMPLINGS[name]))
            for name in SAMPLINGS
            for prompt in case.prompts
        ]
        while not (await client.status())["instances"][0]["num_running"]:
            await asyncio.sleep(0.002)
        os.kill(victim.places[0].pid, signal.SIGKILL)
        return await asyncio.gather(*tasks)

    done = case.live.ask(kill_amid)
    assert [one.token_ids for one in done] == [answer for name in SAMPLINGS for answer in case.expected[name]]
    assert any(one.stats.num_resumes for one in done if one.stats is not None)
    wait_until_idle(case.live)
