"""POST /v1/completions, against a tiny engine that echoes prompts."""

import pytest
from support.api_client import ApiClient
from support.tiny_engine import TinyEngine, text_reply
from support.tiny_tokenizers import EOS_ID, byte_level

PROMPT = "The capital of France"


async def test_a_completion_has_openai_s_shape():
    body = await ApiClient().complete(prompt=PROMPT, max_tokens=5)
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "The capital of FranceThe"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == 9


async def test_sixteen_tokens_are_the_default():
    client = ApiClient()
    body = await client.complete(prompt=PROMPT)
    assert body["usage"]["completion_tokens"] == 16


async def test_the_default_shrinks_to_what_fits():
    body = await ApiClient(max_model_len=10).complete(prompt=PROMPT)
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("prompt", [[1, 5, 9], [[1, 5, 9]]])
async def test_token_id_prompts_reach_the_engine_unchanged(prompt):
    client = ApiClient()
    await client.complete(prompt=prompt)
    assert client.engine.submitted[0].prompt_token_ids.tolist() == [1, 5, 9]


async def test_choices_of_several_prompts_are_numbered_prompt_first():
    body = await ApiClient().complete(prompt=["The", "dog"], n=2, max_tokens=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == texts[1] == "The"
    assert texts[2] == texts[3] != "The"
    assert body["usage"]["prompt_tokens"] == sum(
        len(byte_level().encode(t, add_special_tokens=False)) for t in ("The", "dog")
    )


async def test_choices_draw_with_different_seeds():
    client = ApiClient()
    await client.complete(prompt=PROMPT, n=3, seed=7)
    assert [request.sampling.seed for request in client.engine.submitted] == [7, 8, 9]


async def test_echo_shows_prompt_and_continuation():
    body = await ApiClient().complete(prompt=PROMPT, echo=True, max_tokens=1)
    assert body["choices"][0]["text"] == PROMPT + "The"


async def test_echo_of_token_ids_decodes_them():
    ids = byte_level().encode(PROMPT, add_special_tokens=False)
    body = await ApiClient().complete(prompt=ids, echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == PROMPT
    assert body["usage"]["completion_tokens"] == 0


async def test_echo_with_logprobs_scores_the_prompt():
    client = ApiClient()
    body = await client.complete(prompt=PROMPT, echo=True, max_tokens=1, logprobs=1)
    columns = body["choices"][0]["logprobs"]
    assert columns["tokens"] == ["The", " capital", " of", " France", "The"]
    assert columns["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert columns["top_logprobs"][0] is None
    assert columns["top_logprobs"][1][" capital"] == -0.5
    assert columns["text_offset"] == [0, 3, 11, 14, 21]
    assert client.engine.submitted[0].skip_reading_prefix_cache


async def test_streamed_echo_comes_first_and_once():
    events = await ApiClient().stream(prompt=PROMPT, echo=True, max_tokens=2, logprobs=0)
    texts = [event["choices"][0]["text"] for event in events]
    assert texts == [PROMPT + "The", " capital"]
    assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == 5


async def test_logprobs_follow_the_text():
    body = await ApiClient().complete(prompt=PROMPT, max_tokens=3, logprobs=2)
    columns = body["choices"][0]["logprobs"]
    assert columns["tokens"] == ["The", " capital", " of"]
    assert columns["text_offset"] == [0, 3, 11]
    assert all(len(top) == 3 for top in columns["top_logprobs"])


async def test_tokens_can_be_named_by_id():
    body = await ApiClient().complete(prompt=[5, 6], max_tokens=2, logprobs=0, return_tokens_as_token_ids=True)
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]


async def test_stream_and_whole_answer_agree():
    client = ApiClient(TinyEngine(text_reply("naïve 你好 😀 and so on")))
    whole = await client.complete(prompt=PROMPT, max_tokens=100)
    events = await client.stream(prompt=PROMPT, max_tokens=100)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


async def test_the_usage_chunk_comes_last_when_asked_for():
    events = await ApiClient().stream(prompt=PROMPT, max_tokens=2, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in events[:-1])


async def test_continuous_usage_counts_up():
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await ApiClient().stream(prompt=PROMPT, max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


async def test_a_stop_string_across_tokens_ends_text_and_engine():
    engine = TinyEngine(text_reply("one two STOP three"))
    body = await ApiClient(engine).complete(prompt=PROMPT, max_tokens=50, stop="STOP")
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one two ", "stop", "STOP")
    assert engine.aborted == [1]
    assert not engine.running


async def test_a_stream_never_shows_a_stop_string():
    engine = TinyEngine(text_reply("one two STOP three"))
    events = await ApiClient(engine).stream(prompt=PROMPT, max_tokens=50, stop=["two ST", "STOP"])
    assert "".join(event["choices"][0]["text"] for event in events) == "one "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_can_be_included():
    engine = TinyEngine(text_reply("one two STOP three"))
    body = await ApiClient(engine).complete(prompt="x", max_tokens=50, stop="STOP", include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "one two STOP"


async def test_stop_strings_wait_for_min_tokens():
    engine = TinyEngine(text_reply("aXbXc"))
    body = await ApiClient(engine).complete(prompt="x", max_tokens=50, stop="X", min_tokens=3)
    assert body["choices"][0]["text"] == "aXb"


async def test_eos_ends_the_text_and_is_not_shown():
    body = await ApiClient(TinyEngine(text_reply("fine"))).complete(prompt=PROMPT, max_tokens=50)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("fine", "stop", None)


async def test_ignore_eos_takes_eos_off_the_stop_tokens():
    client = ApiClient()
    await client.complete(prompt=PROMPT, ignore_eos=True, stop_token_ids=[9])
    await client.complete(prompt=PROMPT, stop_token_ids=[9])
    assert [request.sampling.stop_token_ids for request in client.engine.submitted] == [(9,), (9, EOS_ID)]


async def test_a_stop_token_is_the_stop_reason():
    body = await ApiClient().complete(prompt=[5, 6, 7], stop_token_ids=[7])
    assert body["choices"][0]["stop_reason"] == 7
    assert body["choices"][0]["text"] == byte_level().decode([5, 6])


async def test_every_sampling_parameter_reaches_the_engine():
    client = ApiClient()
    await client.complete(
        prompt=PROMPT,
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"11": -100},
        logprobs=4,
        priority=-1,
        cache_salt="tenant",
        request_id="mine",
    )
    request = client.engine.submitted[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0.5)
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (40, 0.9, 0.1, 3)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, -0.3)
    assert (dict(sampling.logit_bias), sampling.num_logprobs) == ({11: -100.0}, 4)
    assert (request.priority, request.cache_salt, request.request_id) == (-1, "tenant", "cmpl-mine-0")


async def test_the_model_s_own_defaults_apply_where_the_request_is_silent():
    client = ApiClient(default_sampling={"temperature": 0.6, "top_k": 20})
    await client.complete(prompt=PROMPT)
    await client.complete(prompt=PROMPT, temperature=0)
    assert [r.sampling.temperature for r in client.engine.submitted] == [0.6, 0.0]
    assert [r.sampling.top_k for r in client.engine.submitted] == [20, 20]
