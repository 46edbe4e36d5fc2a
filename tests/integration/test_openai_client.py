"""The unmodified openai client against a real server on loopback, a tiny engine behind it.

Set BLOCKFERRY_TEST_URL (http://host:port/v1) to run the tests that fit any model against a deployment.
"""

import asyncio
import contextlib
import os
import time

import openai
import pytest
from support.api_server import ApiServer
from support.tiny_engine import TinyEngine

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tiny_server():
    with ApiServer(TinyEngine(delay_s=0.002)) as server:
        yield server


@pytest.fixture(scope="module")
def url(request):
    given = os.environ.get("BLOCKFERRY_TEST_URL")
    return given or request.getfixturevalue("tiny_server").url + "/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_chat_whole(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 12
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_chat_stream_equals_whole(client, model):
    options = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    with client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens


def test_chat_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)


def test_chat_stream_helper_accumulates(client, model):
    with client.chat.completions.stream(model=model, messages=QUESTION, max_tokens=5) as stream:
        for _ in stream:
            pass
        snapshot = stream.current_completion_snapshot
    assert snapshot.choices[0].message.role == "assistant"
    assert snapshot.choices[0].finish_reason in ("stop", "length")


def test_completion_of_strings_and_token_ids(client, model):
    texts = client.completions.create(model=model, prompt=["The capital", "A dog"], max_tokens=3, n=2, temperature=0.5)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=3)
    assert ids.usage.prompt_tokens == 3


def test_completion_echo_scores_the_prompt(client, model):
    answer = client.completions.create(model=model, prompt="The capital of", max_tokens=0, echo=True, logprobs=1)
    columns = answer.choices[0].logprobs
    assert answer.choices[0].text == "The capital of"
    assert columns.token_logprobs[0] is None
    assert all(value <= 0 for value in columns.token_logprobs[1:])
    assert len(columns.tokens) == answer.usage.prompt_tokens


def test_extras_travel_in_extra_body(client, model):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 4}
    answer = client.completions.create(model=model, prompt="One", max_tokens=4, seed=1, extra_body=extra)
    assert answer.usage.completion_tokens == 4


def test_errors_become_the_client_s_exceptions(client, model):
    with pytest.raises(openai.NotFoundError, match="gpt-none"):
        client.completions.create(model="gpt-none", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens=-1"):
        client.completions.create(model=model, prompt="x", max_tokens=-1)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model=model, messages=QUESTION, tools=[tool])
    assert client.completions.create(model=model, prompt="x", max_tokens=1)


async def test_many_streams_at_once(url, model):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:

        async def one(index):
            stream = await client.completions.create(
                model=model, prompt=f"Number {index}", max_tokens=20, stream=True, extra_body={"ignore_eos": True}
            )
            return [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]

        reasons = await asyncio.gather(*(one(index) for index in range(24)))
    assert all(reason[-1] == "length" for reason in reasons)


def test_a_client_that_leaves_aborts_its_request(tiny_server):
    engine = tiny_server.engine
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        num_aborted = len(engine.aborted)
        with client.completions.create(model="tiny", prompt="x", max_tokens=250, stream=True) as stream:
            next(iter(stream))
        with contextlib.suppress(openai.APITimeoutError):
            client.with_options(timeout=0.1).completions.create(model="tiny", prompt="x", max_tokens=250)
    deadline_s = time.monotonic() + 10
    while len(engine.aborted) < num_aborted + 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(engine.aborted) == num_aborted + 2
    assert not engine.running


def test_an_engine_failure_raises_in_the_client():
    engine = TinyEngine(delay_s=0.002)
    engine.fail_after = 3
    with (
        ApiServer(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="decode0"):
            client.completions.create(model="tiny", prompt="x")
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="decode0"):
            list(stream)
