"""A request's prompt in any of its forms to token ids, checked against the model.

Long texts are tokenized on a thread, so that one of them does not stall the others' streams.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blockferry.cluster.api.errors import ApiError, shown
from blockferry.cluster.api.schemas import ChatMessage
from blockferry.cluster.api.served_model import ServedModel
from blockferry.engine.request import Int32Array

MAX_PROMPTS = 1024
INLINE_CHARS = 8192  # about a millisecond of tokenizing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: its ids, and its text when it came as text."""

    token_ids: Int32Array  # [num_prompt_tokens], at least one
    text: str | None = None


async def read_prompts(value: Any, model: ServedModel, *, add_special_tokens: bool) -> list[Prompt]:
    """Take apart `prompt` of a completion request. Raises ApiError."""
    if isinstance(value, str):
        return [await from_text(value, model, add_special_tokens=add_special_tokens)]
    if not isinstance(value, list):
        raise _wrong(value, "prompt")
    if not value:
        raise ApiError("prompt=[] is empty; send at least one token or one string", param="prompt", code="empty_prompt")
    if isinstance(value[0], int):
        return [from_token_ids(value, model, param="prompt")]
    if len(value) > MAX_PROMPTS:
        raise ApiError(
            f"prompt holds {len(value)} prompts, the limit is {MAX_PROMPTS}; send several requests", param="prompt"
        )
    prompts = []
    for index, entry in enumerate(value):
        param = f"prompt.{index}"
        if isinstance(entry, str):
            prompts.append(await from_text(entry, model, add_special_tokens=add_special_tokens, param=param))
        elif isinstance(entry, list):
            prompts.append(from_token_ids(entry, model, param=param))
        else:
            raise _wrong(entry, param)
    return prompts


async def from_text(text: str, model: ServedModel, *, add_special_tokens: bool, param: str = "prompt") -> Prompt:
    """Tokenize a text. Raises ApiError when it is empty or longer than the model."""
    token_ids = await tokenize(text, model, add_special_tokens=add_special_tokens, param=param)
    if not token_ids:
        raise ApiError(f"{param}={shown(text)} has no tokens; send at least one", param=param, code="empty_prompt")
    check_length(len(token_ids), model, param)
    return Prompt(token_ids=np.array(token_ids, np.int32), text=text)


async def tokenize(text: str, model: ServedModel, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text that might fit the model. Raises ApiError on texts that cannot, without tokenizing."""
    at_least = model.tokenizer.min_tokens_of(text)
    if at_least > model.max_prompt_tokens:
        check_length(at_least, model, param)
    if len(text) <= INLINE_CHARS:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def from_token_ids(ids: list[Any], model: ServedModel, *, param: str) -> Prompt:
    """Check ids that a client made itself. Raises ApiError."""
    if not ids:
        raise ApiError(f"{param}=[] is empty; send at least one token", param=param, code="empty_prompt")
    check_length(len(ids), model, param)
    check_token_ids(ids, model.vocab_size, param)
    return Prompt(token_ids=np.array(ids, np.int32))


def check_token_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Refuse anything but ids of this vocabulary."""
    for index, token_id in enumerate(ids):
        if type(token_id) is int and 0 <= token_id < vocab_size:
            continue
        where = f"{param}.{index}"
        if type(token_id) is not int:
            raise ApiError(f"{where}={shown(token_id)} is not a token id; send integers", param=where)
        raise ApiError(f"{where}={token_id} is outside the vocabulary, 0..{vocab_size - 1}", param=where)


def check_length(num_tokens: int, model: ServedModel, param: str) -> None:
    """Refuse a prompt longer than the model."""
    if num_tokens > model.max_prompt_tokens:
        what = "context" if model.encoder_decoder is None else "encoder's context"
        raise ApiError(
            f"{param} has at least {num_tokens} tokens, the model's {what} is {model.max_prompt_tokens}; shorten it",
            param=param,
            code="context_length_exceeded",
        )


async def from_messages(
    messages: Sequence[ChatMessage],
    model: ServedModel,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
    variables: Mapping[str, Any] | None,
) -> Prompt:
    """Render and tokenize a conversation. Raises ApiError."""
    if model.encoder_decoder is not None:
        raise ApiError(
            f"model {model.name!r} is an encoder-decoder, which holds no conversations; use /v1/completions, whose "
            "prompt its encoder reads",
            param="messages",
            code="no_chat",
        )
    template = model.tokenizer.chat_template
    if template is None:
        raise ApiError(
            f"model {model.name!r} has no chat template; use /v1/completions or set api.chat_template",
            param="messages",
            code="no_chat_template",
        )
    plain = [{"role": message.role, "content": message.text} for message in messages]
    for entry, message in zip(plain, messages):
        if message.name is not None:
            entry["name"] = message.name
    try:
        text = template.render(plain, add_generation_prompt=add_generation_prompt, variables=variables or {})
    except ValueError as error:
        raise ApiError(str(error), param="messages", code="chat_template_error") from error
    if continue_final_message:
        text = _cut_after_final(text, plain[-1]["content"])
    return await from_text(text, model, add_special_tokens=add_special_tokens, param="messages")


def _cut_after_final(text: str, content: str) -> str:
    """Drop what the template puts after the last message, so that the model goes on with it."""
    start = text.rfind(content.strip()) if content.strip() else -1
    if start < 0:
        raise ApiError(
            "continue_final_message: the chat template changes or drops the last message; it cannot be continued",
            param="continue_final_message",
        )
    return text[: start + len(content.strip())]


def _wrong(value: object, param: str) -> ApiError:
    return ApiError(f"{param}={shown(value)}: send a string, a list of token ids, or a list of these", param=param)
