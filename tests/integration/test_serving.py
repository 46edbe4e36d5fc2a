"""A real prefill/decode deployment behind HTTP: the openai client, clients that vanish, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.cluster import MODEL, LiveDeployment, live_deployment, smollm2_dir, wait_until_idle
from support.strangers import Port, ports

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

DEPLOYMENT = f"""
model: {{name: {MODEL}, dtype: float32, max_model_len: 2048}}
cache: {{num_blocks: 800}}
instances: [{{role: prefill}}, {{role: decode}}]
api: {{port: 0}}
"""
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
NUM_STREAMS = 64


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    smollm2_dir()
    with live_deployment(DEPLOYMENT, Path(tmp_path_factory.mktemp("serving")), with_api=True) as deployment:
        yield deployment


@pytest.fixture
def client(live: LiveDeployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.running.url}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def test_openai_client_gets_the_demos_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_openai_client_streams_the_demos_answer(client: openai.OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    with client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, **options
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].usage.completion_tokens == 8


def test_openai_client_completes_lists_of_prompts_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["1, 1, 2, 3, 5, 8,", "Once upon a time"], max_tokens=5, temperature=0, logprobs=2, n=2
    )
    assert len(answer.choices) == 4
    assert all(len(choice.logprobs.token_logprobs) == 5 for choice in answer.choices)


def test_workers_of_one_host_listen_only_where_ray_does(live: LiveDeployment) -> None:
    tcp: dict[str, list[Port]] = {"WorkerActor": [], "SchedulerActor": []}
    for port in ports():
        if port.actor in tcp and isinstance(port.address, tuple):
            tcp[port.actor].append(port)
    assert len(tcp["SchedulerActor"]) == 1, "of Ray, in every process"
    by_process = Counter(port.pid for port in tcp["WorkerActor"])
    assert list(by_process.values()) == [1, 1], tcp


async def use_and_vanish(http: httpx.AsyncClient, draw: random.Random, i: int) -> None:
    """Stream a completion, and leave after a random time unless lucky."""
    body = {"model": MODEL, "prompt": f"Story number {i}: " + "word " * draw.randrange(300), "max_tokens": 60}
    patience_s = draw.choice([None, *[draw.uniform(0.05, 8.0)] * 3])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                assert answer.status_code == 200
                lines = [line async for line in answer.aiter_lines() if line]
                assert lines[-1] == "data: [DONE]"


def test_disconnects_leave_every_block_free(live: LiveDeployment) -> None:
    async def crowd() -> None:
        draw = random.Random(0)
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(base_url=live.running.url, timeout=300, limits=limits) as http:
            await asyncio.gather(*(use_and_vanish(http, draw, i) for i in range(NUM_STREAMS)))

    asyncio.run(crowd())
    status = wait_until_idle(live)  # audited: the scheduler runs check_integrity() and dies on a corrupt ledger
    for instance in status["instances"]:
        assert instance["num_free_blocks"] == instance["num_blocks"] == 799, instance
        assert instance["num_running"] == 0, instance
    assert all(count == 0 for count in status["handoffs"].values()), status["handoffs"]


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ({"model": MODEL, "prompt": ""}, 400, "prompt"),
        ({"model": MODEL, "prompt": [1] * 3000}, 400, "2048"),
        ({"model": "gpt-9", "prompt": "x"}, 404, "gpt-9"),
        ({"model": MODEL, "prompt": "x", "temperature": -3}, 400, "temperature"),
        ({"model": MODEL, "prompt": "x", "max_tokens": 10**9}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": "x", "flavour": "mint"}, 400, "flavour"),
        ({"model": MODEL, "prompt": [99999999]}, 400, "99999999"),
    ],
)
def test_bad_requests_name_what_was_wrong(live: LiveDeployment, body: dict[str, Any], code: int, word: str) -> None:
    answer = httpx.post(f"{live.running.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == code, answer.text
    assert word in answer.json()["error"]["message"]


def test_a_body_that_is_not_utf8_is_refused_and_the_server_goes_on(live: LiveDeployment) -> None:
    answer = httpx.post(f"{live.running.url}/v1/completions", content=b'{"model": "\xff\xfe"}', timeout=60)
    assert answer.status_code == 400, answer.text
    assert httpx.get(f"{live.running.url}/health", timeout=60).status_code == 200
