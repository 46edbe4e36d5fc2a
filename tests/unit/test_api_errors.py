"""Every bad request gets a clear 4xx in OpenAI's shape, and the server goes on."""

import pytest
from support.api_client import ApiClient, refusal
from support.tiny_engine import TinyEngine

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

BAD_VALUES = [
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": 10**30}, "max_tokens", "256"),
    ({"max_tokens": "5"}, "max_tokens", '"5"'),
    ({"max_tokens": True}, "max_tokens", "true"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "3"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": 1e9}, "temperature", "100"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.01}, "top_p", "1.01"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "2"),
    ({"n": 0}, "n", "0"),
    ({"n": 100000}, "n", "128"),
    ({"seed": 1 << 64}, "seed", str(1 << 64)),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"logprobs": 1000}, "logprobs", "20"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "101"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    ({"logit_bias": {"x": 1}}, "logit_bias", '"x"'),
    ({"stop": ["a", ""]}, "stop.1", '""'),
    ({"stop": ["a"] * 65}, "stop", "64"),
    ({"stop": 7}, "stop", "7"),
    ({"stop_token_ids": [400]}, "stop_token_ids.0", "392"),
    ({"priority": 1 << 40}, "priority", str(1 << 40)),
    ({"cache_salt": ""}, "cache_salt", '""'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"best_of": 3}, "best_of", "3"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"no_such_field": 1}, "no_such_field", "unknown"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    ({"prompt": ""}, "prompt", '""'),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt.0", "empty"),
    ({"prompt": ["ok", ""]}, "prompt.1", '""'),
    ({"prompt": [1, "a"]}, "prompt.1", '"a"'),
    ({"prompt": [-1]}, "prompt.0", "-1"),
    ({"prompt": [400]}, "prompt.0", "392"),
    ({"prompt": [10**30]}, "prompt.0", "392"),
    ({"prompt": {"a": 1}}, "prompt", "string"),
    ({"prompt": [None]}, "prompt.0", "null"),
    ({"prompt": [True, False]}, "prompt.0", "true"),
    ({"prompt": ["x"] * 1025}, "prompt", "1024"),
    ({"prompt": ["x"] * 100, "n": 100}, "n", "1024"),
]


@pytest.mark.parametrize(("body", "param", "part"), BAD_VALUES, ids=[str(i) for i in range(len(BAD_VALUES))])
async def test_bad_values_are_refused_by_name(body, param, part):
    client = ApiClient()
    status, error = await client.error(**{"prompt": "hi", **body})
    assert (status, error["param"]) == (400, param)
    assert part in error["message"]
    assert not client.engine.submitted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("prediction", {"type": "content", "content": "x"}),
        ("store", True),
    ],
)
async def test_features_that_are_missing_are_refused_by_name(field, value):
    status, error = await ApiClient().error(CHAT, messages=MESSAGES, **{field: value})
    assert (status, error["param"], error["code"]) == (400, field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "at least 1"),
        ("hi", "array"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": None}], "null"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "tool_calls"),
        ([{"role": "user", "content": "x", "colour": "red"}], "colour"),
    ],
)
async def test_bad_messages_are_refused(messages, part):
    status, error = await ApiClient().error(CHAT, messages=messages)
    assert status == 400
    assert part in error["message"]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff\xfe{}", "not UTF-8: byte 0xff at offset 0"),
        (b'{"prompt": "\xc3\x28"}', "offset 12"),
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1, 2]", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"prompt": "x", "temperature": NaN}', "finite"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
    ],
    ids=["bom", "utf8", "open", "empty", "list", "string", "nan", "surrogate", "deep"],
)
async def test_broken_bodies_are_refused(content, part):
    status, error = refusal(await ApiClient().post("/v1/completions", content=content))
    assert status == 400
    assert part in error["message"]


async def test_an_unknown_model_is_404():
    status, error = await ApiClient().error(model="gpt-9", prompt="x")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in error["message"]
    assert "tiny" in error["message"]


@pytest.mark.parametrize("prompt", ["The dog " * 200, [5] * 257, "x" * 1_000_000])
async def test_a_prompt_longer_than_the_model_names_both_lengths(prompt):
    status, error = await ApiClient().error(prompt=prompt)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "256" in error["message"]


async def test_prompt_and_max_tokens_must_fit_together():
    status, error = await ApiClient().error(prompt=[5] * 250, max_tokens=7)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "at most 6" in error["message"]


async def test_a_body_that_is_too_long_is_413():
    response = await ApiClient().post("/v1/completions", content=b" " * ((32 << 20) + 1))
    assert refusal(response)[0] == 413


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_can_never_run_is_400(is_stream):
    status, error = await ApiClient().error(prompt="x", request_id="reject", stream=is_stream)
    assert (status, error["code"]) == (400, "request_rejected")
    assert "99 blocks" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(is_stream):
    client = ApiClient(TinyEngine(max_queue_len=0))
    response = await client.post("/v1/completions", {"prompt": "x", "stream": is_stream})
    assert refusal(response)[0] == 429
    assert response.headers["retry-after"] == "1"


async def test_a_lost_instance_is_503_and_the_server_goes_on():
    client = ApiClient()
    client.engine.fail_after = 2
    status, error = await client.error(prompt="x")
    assert (status, error["type"]) == (503, "service_unavailable_error")
    assert "decode0" in error["message"]
    client.engine.fail_after = None
    assert await client.complete(prompt="x")


async def test_an_engine_failure_in_a_stream_is_an_event():
    client = ApiClient()
    client.engine.fail_after = 2
    response = await client.post("/v1/completions", {"prompt": "x", "stream": True})
    events = [event for event in response.text.split("\n\n") if event]
    assert response.status_code == 200
    assert len(events) == 3
    assert '"service_unavailable_error"' in events[-1]


async def test_unknown_paths_and_methods_have_the_error_shape():
    client = ApiClient()
    assert refusal(await client.get("/v1/nothing"))[0] == 404
    assert refusal(await client.get("/v1/completions"))[0] == 405
    assert refusal(await client.get("/v1/models/other"))[0] == 404
