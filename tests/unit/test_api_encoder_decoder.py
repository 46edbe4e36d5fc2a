"""An encoder-decoder behind the HTTP API: the prompt is its encoder's input, and its decoder starts by itself."""

import asyncio

import pytest
from support.api_client import ApiClient
from support.tiny_engine import TinyEngine, served_model

from blockferry.cluster.api.served_model import EncoderDecoder
from blockferry.cluster.generate import GenerateOptions, PromptStyle, generate
from blockferry.engine.errors import ModelLoadError, RequestRejected

START, FORCED = 2, 7
BART = {"is_encoder_decoder": True, "max_position_embeddings": 12, "decoder_start_token_id": START}
SUMMARISER = EncoderDecoder(max_input_tokens=12, decoder_prompt=(START, FORCED))
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def client() -> ApiClient:
    return ApiClient(encoder_decoder=SUMMARISER, max_model_len=10)


async def test_prompt_goes_to_the_encoder_and_the_decoder_starts_by_itself(client):
    await client.complete(prompt=PROMPT, max_tokens=3)
    (request,) = client.engine.submitted
    assert request.encoder_token_ids.tolist() == PROMPT
    assert request.prompt_token_ids.tolist() == [START, FORCED]


async def test_prompt_of_a_decoder_goes_to_no_encoder():
    client = ApiClient()
    await client.complete(prompt=PROMPT, max_tokens=3)
    (request,) = client.engine.submitted
    assert request.encoder_token_ids is None
    assert request.prompt_token_ids.tolist() == PROMPT


async def test_usage_counts_the_encoders_tokens_as_the_prompts(client):
    body = await client.complete(prompt=PROMPT, max_tokens=3)
    assert body["usage"]["prompt_tokens"] == len(PROMPT)


async def test_answer_has_the_decoders_context_for_itself(client):
    body = await client.complete(prompt=list(range(3, 15)), ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 10 - 2
    status, error = await client.error(prompt=PROMPT, max_tokens=9)
    assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_prompt_longer_than_the_encoder_is_refused(client):
    status, error = await client.error(prompt=list(range(3, 16)))
    assert status == 400
    assert error["message"] == "prompt has at least 13 tokens, the model's encoder's context is 12; shorten it"


async def test_conversation_is_refused(client):
    status, error = await client.error("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert (status, error["code"]) == (400, "no_chat")
    assert "use /v1/completions, whose prompt its encoder reads" in error["message"]


async def test_echo_is_refused(client):
    status, error = await client.error(prompt=PROMPT, echo=True)
    assert (status, error["param"]) == (400, "echo")


@pytest.mark.parametrize(
    ("generation", "decoder_prompt"),
    [
        ({}, (START,)),
        ({"forced_bos_token_id": 0}, (START, 0)),
        ({"decoder_start_token_id": 1, "forced_bos_token_id": None}, (1,)),
    ],
)
def test_decoder_starts_as_config_and_generation_config_say(generation, decoder_prompt):
    found = EncoderDecoder.read(BART, generation)
    assert found == EncoderDecoder(max_input_tokens=12, decoder_prompt=decoder_prompt)


def test_decoder_without_a_start_is_refused():
    with pytest.raises(ModelLoadError, match="decoder_start_token_id=null is no token id"):
        EncoderDecoder.read({**BART, "decoder_start_token_id": None}, {})


def test_other_models_are_no_encoder_decoders():
    assert EncoderDecoder.read({"max_position_embeddings": 12, "bos_token_id": 1}, {}) is None


def answer(style: PromptStyle) -> TinyEngine:
    """`blockferry generate` of one prompt."""
    engine = TinyEngine()
    options = GenerateOptions(max_tokens=2, temperature=0.0, style=style)
    asyncio.run(generate(engine, served_model(encoder_decoder=SUMMARISER), ["The dog"], options))
    return engine


def test_generate_gives_its_prompts_to_the_encoder():
    (request,) = answer(PromptStyle.RAW).submitted
    assert request.prompt_token_ids.tolist() == [START, FORCED]
    assert len(request.encoder_token_ids) > 0


def test_generate_as_chat_is_refused():
    with pytest.raises(RequestRejected, match="is an encoder-decoder, which holds no conversations"):
        answer(PromptStyle.CHAT)
