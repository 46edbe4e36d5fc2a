"""Drafts in real deployments: what is answered is what the model writes without them, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_client import parse_events
from support.cluster import Completion, LiveDeployment, complete, live_deployment, wait_until_idle
from support.local_engine import EngineOptions, LocalEngine, make_request, start_worker
from support.tiny_families import byte_models, byte_prompt
from support.tiny_tokenizers import byte_level

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

FAMILY = "gemma3_text"
NUM_OUTPUT = 60
# a text that the model knows by heart, after what it will write next: n-grams find it
PROMPTS = [byte_prompt(60, first=first + 60) + byte_prompt(60, first=first) for first in (100, 200, 300)]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT),
    "sampled": SamplingParams(temperature=0.7, top_p=0.95, seed=11, max_tokens=NUM_OUTPUT),
    "penalised": SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, max_tokens=NUM_OUTPUT),
}
TEXT = """
model: {{path: {model}, dtype: float32, max_model_len: 256}}
cache: {{num_blocks: 120, block_size: 16}}
speculation: {{method: ngram, num_tokens: 3}}
api: {{port: 0}}
instances: {instances}
"""
MIXED = "[{role: mixed, replicas: 2, resources: {num_cpus: 0.5}}]"
APART = "[{role: prefill, resources: {num_cpus: 0.5}}, {role: decode, resources: {num_cpus: 0.5}}]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / FAMILY
    shutil.copytree(byte_models()[FAMILY], folder)
    byte_level()._backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> Mapping[str, list[list[int]]]:
    """What is written without drafts, by sampling: one answer per prompt."""
    options = EngineOptions()
    engine = LocalEngine(model, options, start_worker(model, options))
    answers = {}
    for name, sampling in SAMPLINGS.items():
        requests = [make_request(engine.next_handle(), prompt, NUM_OUTPUT) for prompt in PROMPTS]
        answers[name] = engine.run([dataclasses.replace(one, sampling=sampling) for one in requests])
    return answers


@pytest.fixture(scope="module", params=[MIXED, pytest.param(APART, marks=pytest.mark.ucx)], ids=["mixed", "apart"])
def live(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveDeployment]:
    text = TEXT.format(model=model, instances=request.param)
    with live_deployment(text, Path(tmp_path_factory.mktemp("speculation")), with_api=True) as deployment:
        yield deployment


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_without_drafts(
    live: LiveDeployment, expected: Mapping[str, list[list[int]]], name: str
) -> None:
    done = live.complete(PROMPTS, SAMPLINGS[name])
    assert [one.token_ids for one in done] == expected[name]
    assert name == "penalised" or all(one.stats.num_accepted_tokens > 0 for one in done)


def ask(live: LiveDeployment, **body: Any) -> httpx.Response:
    asked = {"prompt": PROMPTS[0], "max_tokens": NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True, **body}
    answer = httpx.post(f"{live.running.url}/v1/completions", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def test_streams_bring_several_tokens_at_once_and_the_whole_text(
    live: LiveDeployment, expected: Mapping[str, list[list[int]]]
) -> None:
    whole = ask(live).json()
    assert whole["choices"][0]["text"] == byte_level().decode(expected["greedy"][0])
    events = parse_events(ask(live, stream=True, logprobs=0, stream_options={"include_usage": True}).text)
    assert "".join(one["choices"][0]["text"] for one in events[:-1]) == whole["choices"][0]["text"]
    assert sum(len(one["choices"][0]["logprobs"]["tokens"]) for one in events[:-1]) == NUM_OUTPUT
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == NUM_OUTPUT
    assert len(events) < NUM_OUTPUT


@pytest.mark.parametrize("num_tokens", range(20, 26))
def test_an_answer_ends_at_its_last_token_wherever_drafts_end(live: LiveDeployment, num_tokens: int) -> None:
    choice = ask(live).json()["choices"][0]
    assert choice["text"].startswith(ask(live, max_tokens=num_tokens).json()["choices"][0]["text"])
    assert ask(live, max_tokens=num_tokens).json()["usage"]["completion_tokens"] == num_tokens


def test_an_answer_ends_at_a_stop_string_wherever_drafts_end(live: LiveDeployment) -> None:
    text = ask(live).json()["choices"][0]["text"]
    for place in range(20, 26):
        stop = text[place : place + 3]
        choice = ask(live, stop=stop).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text.split(stop)[0], "stop")


def test_counters_are_shown(live: LiveDeployment) -> None:
    ask(live)
    counts = [one["speculation"] for one in live.status()["instances"] if one["role"] != "prefill"]
    assert sum(one["num_accepted"] for one in counts) > 0
    assert all(one["num_drafted"] == sum(one["drafted_per_position"]) for one in counts)
    page = httpx.get(f"{live.running.url}/metrics", timeout=60).text
    assert 'blockferry:spec_decode_num_accepted_tokens_per_pos_total{engine="' in page


def test_an_instance_that_dies_costs_no_token(live: LiveDeployment, expected: Mapping[str, list[list[int]]]) -> None:
    victim = live.running.instances.get("mixed-0")
    if victim is None:
        pytest.skip("there is no other instance to go on")

    async def kill_amid(client: ZmqEngineClient) -> list[Completion]:
        tasks = [
            asyncio.create_task(complete(client, prompt, SAMPLINGS[name])) for name in SAMPLINGS for prompt in PROMPTS
        ]
        while not (await client.status())["instances"][0]["num_running"]:
            await asyncio.sleep(0.002)
        os.kill(victim.places[0].pid, signal.SIGKILL)
        return await asyncio.gather(*tasks)

    done = live.ask(kill_amid)
    assert [one.token_ids for one in done] == [answer for name in SAMPLINGS for answer in expected[name]]
    assert any(one.stats.num_resumes for one in done)
    wait_until_idle(live)
