"""An HTTP answer is the same whether its request was resumed or not: text, stop strings, log probabilities, usage."""

import pytest
from support.api_client import ApiClient
from support.loops import Fault, running_loops

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.engine.config import DraftMethod, Role, SpeculationConfig

TWO_MIXED = {"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}
PROMPT = list(range(60, 80))
BODY = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}


async def answers(
    *, fails_at: int | None = None, stream: bool = False, speculation: SpeculationConfig | None = None, **body
):
    """What is answered when an instance fails as it is to draw a token; and the server's own account."""
    fault = None if fails_at is None else Fault(fails_at)
    with running_loops(TWO_MIXED, speculation=speculation) as rig:
        for rank in rig.ranks.values():
            rank.executor.says_positions, rank.executor.fault = True, fault
        engine = ZmqEngineClient(rig.endpoint, resume_timeout_s=10.0)
        await engine.connect()
        try:
            client = ApiClient(engine)
            asked = BODY | body
            bodies = [await (client.stream if stream else client.complete)(**asked) for _ in range(2)]
            return bodies, (await client.get("/metrics")).text
        finally:
            engine.close()


def shown(body):
    """Without what differs between any two answers."""
    (choice,) = body["choices"]
    return choice, body["usage"] | {"prompt_tokens_details": None}


@pytest.mark.parametrize("fails_at", [20, 21, 33, 49])
async def test_resumed_answer_is_the_whole_one(fails_at):
    (whole, _), _ = await answers()
    both, metrics = await answers(fails_at=fails_at)
    assert [shown(body) for body in both] == [shown(whole)] * 2
    assert 'request_resumes_total{model_name="tiny"} 1.0' in metrics


async def test_stop_string_is_found_across_the_cut():
    (whole, _), _ = await answers()
    text, offsets = whole["choices"][0]["text"], whole["choices"][0]["logprobs"]["text_offset"]
    stop = text[offsets[12] - 2 : offsets[12] + 2]  # of the token at position 32, and of the one before
    (uncut, _), _ = await answers(stop=stop)
    both, _ = await answers(fails_at=32, stop=stop)
    assert uncut["choices"][0]["finish_reason"] == "stop"
    assert [body["choices"][0]["text"] for body in both] == [uncut["choices"][0]["text"]] * 2


async def test_resumed_stream_has_the_whole_text_and_its_usage():
    (whole, _), _ = await answers()
    both, _ = await answers(fails_at=33, stream=True, stream_options={"include_usage": True})
    for events in both:
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert text == whole["choices"][0]["text"]
        assert events[-1]["usage"]["completion_tokens"] == 30


DRAFTING = SpeculationConfig(method=DraftMethod.NGRAM, num_tokens=3)


@pytest.mark.parametrize("fails_at", [None, 20, 22, 33, 34, 49])
async def test_answers_with_drafts_are_those_without_however_they_are_cut(fails_at):
    (whole, _), _ = await answers()
    both, metrics = await answers(fails_at=fails_at, speculation=DRAFTING)
    assert [shown(body) for body in both] == [shown(whole)] * 2
    assert f'request_resumes_total{{model_name="tiny"}} {float(fails_at is not None)}' in metrics
    accepted = [line for line in metrics.splitlines() if "spec_decode_num_accepted_tokens_total{" in line]
    assert sum(float(line.split()[-1]) for line in accepted) > 0


@pytest.mark.parametrize("num_tokens", range(8, 14))
async def test_drafts_end_where_the_answer_does(num_tokens):
    (whole, _), _ = await answers(max_tokens=num_tokens)
    both, _ = await answers(speculation=DRAFTING, max_tokens=num_tokens)
    assert [shown(body) for body in both] == [shown(whole)] * 2
    stop = len(PROMPT) + num_tokens  # the token at that position
    (whole, _), _ = await answers(stop_token_ids=[stop])
    both, _ = await answers(speculation=DRAFTING, stop_token_ids=[stop])
    assert [shown(body) for body in both] == [shown(whole)] * 2
    assert whole["usage"]["completion_tokens"] == num_tokens + 1


async def test_a_stream_with_drafts_has_several_tokens_in_an_event_and_the_whole_text_though_it_is_cut():
    (whole, _), _ = await answers()
    asked = {"stream": True, "stream_options": {"include_usage": True}, "speculation": DRAFTING}
    both, _ = await answers(fails_at=33, **asked)
    for events in both:
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
        assert events[-1]["usage"]["completion_tokens"] == 30
        assert max(len(event["choices"][0]["logprobs"]["tokens"]) for event in events[:-1]) > 1
