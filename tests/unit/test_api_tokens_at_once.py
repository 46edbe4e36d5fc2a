"""However many tokens of a request come at once, as with accepted drafts, clients get the same answer."""

import pytest
from support.api_client import ApiClient
from support.tiny_engine import TinyEngine, echo_reply, text_reply
from support.tiny_tokenizers import byte_level

TEXT = "naïve 你好 😀 one two STOP three, and STOPPED again"
AT_ONCE = [2, 3, 4, 9, 100]
BODIES = {
    "plain": {},
    "length": {"max_tokens": 7},
    "stop string": {"stop": "STOP"},
    "stop string over tokens": {"stop": ["two ST", "again"]},
    "stop string that is shown": {"stop": "STOP", "include_stop_str_in_output": True},
    "stop string after min_tokens": {"stop": "STOP", "min_tokens": 30},
    "stop string that only begins": {"stop": "STOPPER"},
    "stop token": {"stop_token_ids": byte_level().encode(" two", add_special_tokens=False)[:1]},
    "logprobs": {"logprobs": 2, "stop": "STOP"},
    "echo": {"logprobs": 1, "echo": True, "max_tokens": 6},
    "two choices": {"n": 2, "max_tokens": 9},
}


def engine(num_at_once: int) -> TinyEngine:
    return TinyEngine(text_reply(TEXT), num_at_once=num_at_once)


def answer_of(body):
    return {"choices": body["choices"], "usage": body["usage"]}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_whole_answer_is_the_same(body):
    asked = {"prompt": "x", "max_tokens": 100, **body}
    expected = answer_of(await ApiClient(engine(1)).complete(**asked))
    for num_at_once in AT_ONCE:
        assert answer_of(await ApiClient(engine(num_at_once)).complete(**asked)) == expected


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_stream_is_the_same_once_joined(body):
    asked = {"prompt": "x", "max_tokens": 100, **body}
    expected = answer_of(await ApiClient(engine(1)).complete(**asked))
    for num_at_once in (1, *AT_ONCE):
        events = await ApiClient(engine(num_at_once)).stream(**asked, stream_options={"include_usage": True})
        assert joined(events) == expected, num_at_once


def joined(events):
    choices = {}
    for event in events:
        for piece in event["choices"]:
            whole = choices.setdefault(piece["index"], {**piece, "text": "", "logprobs": None})
            assert whole["finish_reason"] is None or whole["text"] == "", "a choice went on after its end"
            whole["text"] += piece["text"]
            whole["finish_reason"], whole["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            if piece["logprobs"] is not None:
                before = whole["logprobs"] or {name: [] for name in piece["logprobs"]}
                whole["logprobs"] = {name: before[name] + values for name, values in piece["logprobs"].items()}
    return {"choices": [choices[index] for index in sorted(choices)], "usage": events[-1]["usage"]}


async def test_tokens_that_come_at_once_are_one_event():
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await ApiClient(TinyEngine(echo_reply, num_at_once=3)).stream(
        prompt=[5, 6, 7], max_tokens=8, logprobs=0, stream_options=options
    )
    assert [event["usage"]["completion_tokens"] for event in events] == [3, 6, 8, 8]
    assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in events[:-1]] == [3, 3, 2]


async def test_text_after_a_stop_string_is_never_sent_and_the_request_ended():
    tiny = engine(20)
    events = await ApiClient(tiny).stream(prompt="x", max_tokens=100, stop="STOP")
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT.split("STOP")[0]
    assert (events[-1]["choices"][0]["finish_reason"], events[-1]["choices"][0]["stop_reason"]) == ("stop", "STOP")
    assert tiny.aborted == [1]


async def test_tokens_after_a_stop_string_are_not_counted():
    client = ApiClient(engine(20))
    body = await client.complete(prompt="x", max_tokens=100, stop="STOP")
    page = (await client.get("/metrics")).text
    assert f'generation_tokens_total{{model_name="tiny"}} {body["usage"]["completion_tokens"]}.0' in page


async def test_a_chat_stream_is_the_same_once_joined():
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "stop": "STOP"}
    texts = set()
    for num_at_once in (1, *AT_ONCE):
        events = await ApiClient(engine(num_at_once)).stream("/v1/chat/completions", **asked)
        texts.add("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
    assert texts == {TEXT.split("STOP")[0]}
