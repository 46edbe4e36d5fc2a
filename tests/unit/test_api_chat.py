"""POST /v1/chat/completions, against a tiny engine."""

from support.api_client import ApiClient
from support.tiny_engine import TinyEngine, text_reply
from support.tiny_tokenizers import byte_level

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def _prompt(client):
    return byte_level().decode(client.engine.submitted[-1].prompt_token_ids.tolist(), skip_special_tokens=False)


async def test_an_answer_has_openai_s_shape():
    body = await ApiClient(TinyEngine(text_reply("Paris."))).chat("Where?")
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_the_template_makes_the_prompt():
    client = ApiClient()
    await client.chat("Where?", max_tokens=1)
    assert _prompt(client) == "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"


async def test_text_parts_are_joined():
    client = ApiClient()
    await client.chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], max_tokens=1)
    assert "user\na\nb<|im_end|>" in _prompt(client)


async def test_the_rest_of_the_context_is_the_default_length():
    client = ApiClient()
    await client.chat("Where?")
    request = client.engine.submitted[0]
    assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)


async def test_max_completion_tokens_wins_over_max_tokens():
    client = ApiClient()
    await client.chat("Where?", max_tokens=9, max_completion_tokens=3)
    assert client.engine.submitted[0].sampling.max_tokens == 3


async def test_a_final_message_can_be_continued():
    client = ApiClient()
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 1}
    await client.post(CHAT, body)
    assert _prompt(client).endswith("assistant\nThe answer is")


async def test_a_stream_opens_with_the_role_and_ends_with_the_reason():
    client = ApiClient(TinyEngine(text_reply("One two.")))
    events = await client.stream(CHAT, messages=MESSAGES)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "One two."
    assert deltas[-1] == {}
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_every_choice_of_a_stream_opens_once():
    events = await ApiClient().stream(CHAT, messages=MESSAGES, n=3, max_tokens=2)
    openings = [e["choices"][0]["index"] for e in events if e["choices"][0]["delta"].get("role")]
    assert sorted(openings) == [0, 1, 2]


async def test_logprobs_carry_bytes_and_the_top_ones():
    client = ApiClient(TinyEngine(text_reply("😀", with_eos=False)))
    body = await client.chat("x", logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "😀"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["logprob"] == -0.5


async def test_streamed_logprobs_are_complete():
    client = ApiClient(TinyEngine(text_reply("😀 ok", with_eos=False)))
    whole = await client.chat("x", logprobs=True)
    events = await client.stream(CHAT, messages=[{"role": "user", "content": "x"}], logprobs=True)
    streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == whole["choices"][0]["logprobs"]["content"]


async def test_fields_that_ask_for_nothing_are_accepted():
    await ApiClient().chat(
        "x",
        max_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        user="me",
        metadata={"a": "b"},
        stop=None,
        logit_bias=None,
    )


async def test_an_old_answer_can_be_sent_back_with_its_empty_fields():
    answer = {"role": "assistant", "content": "Hello.", "refusal": None, "tool_calls": None, "annotations": []}
    response = await ApiClient().post(CHAT, {"messages": [*MESSAGES, answer, *MESSAGES], "max_tokens": 1})
    assert response.status_code == 200
