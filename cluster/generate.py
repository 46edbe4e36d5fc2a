"""Answers a list of prompts through an EngineClient, and says what each answer cost.

Knows tokenizers and requests; prints nothing. What HTTP clients get is api/'s business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time
from collections.abc import Sequence
from typing import Any

from blockferry.cluster.api.client import EngineClient
from blockferry.cluster.api.errors import ApiError
from blockferry.cluster.api.prompts import Prompt, from_messages, from_text
from blockferry.cluster.api.schemas import ChatMessage
from blockferry.cluster.api.served_model import ServedModel
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.sockets import Endpoint
from blockferry.engine.config import DeploymentConfig
from blockferry.engine.errors import InstanceFailed, RequestRejected
from blockferry.engine.request import FinishReason, Request, RequestStats, SamplingParams


class PromptStyle(enum.StrEnum):
    """What a prompt's text is."""

    AUTO = "auto"  # chat when the model has a chat template
    CHAT = "chat"  # a user's message
    RAW = "raw"  # text to be continued


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How every prompt is answered."""

    max_tokens: int
    temperature: float
    style: PromptStyle
    seed: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished prompt. Durations in seconds, ttft_s and e2e_s seen from here."""

    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str
    ttft_s: float
    e2e_s: float
    stats: RequestStats

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first per second; 0 when there was at most one."""
        span_s = self.e2e_s - self.ttft_s
        return (len(self.token_ids) - 1) / span_s if len(self.token_ids) > 1 and span_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The entry of `outputs`."""
        metrics = {
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }
        return {
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason.value,
            "error": self.error,
            "metrics": metrics | dataclasses.asdict(self.stats),
        }


async def generate(
    client: EngineClient, model: ServedModel, prompts: Sequence[str], options: GenerateOptions
) -> list[Answer]:
    """Answer all prompts at once, in order. Raises RequestRejected for a prompt that can never run."""
    return list(await asyncio.gather(*(_answer(client, model, prompt, options) for prompt in prompts)))


async def _answer(client: EngineClient, model: ServedModel, prompt: str, options: GenerateOptions) -> Answer:
    encoded = await _encode(model, prompt, options.style)
    handle = client.next_handle()
    request = Request(
        request_id=f"generate-{handle}",
        handle=handle,
        prompt_token_ids=model.context_of(encoded.token_ids),
        encoder_token_ids=model.encoder_input(encoded.token_ids),
        sampling=SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            stop_token_ids=model.eos_token_ids,
        ),
        arrival_s=0.0,  # the scheduler's clock decides
    )
    began_s = time.perf_counter()
    first_s: float | None = None
    token_ids: list[int] = []
    async for output in client.submit(request):
        if output.token_ids and first_s is None:
            first_s = time.perf_counter()
        token_ids += output.token_ids
        last = output
    ended_s = time.perf_counter()
    if last.stats is None:
        raise InstanceFailed("scheduler", last.error)
    assert last.finish_reason is not None, last
    return Answer(
        prompt=prompt,
        prompt_token_ids=encoded.token_ids.tolist(),
        token_ids=token_ids,
        text=model.tokenizer.decode(token_ids),
        finish_reason=last.finish_reason,
        error=last.error,
        ttft_s=(first_s or ended_s) - began_s,
        e2e_s=ended_s - began_s,
        stats=last.stats,
    )


async def _encode(model: ServedModel, prompt: str, style: PromptStyle) -> Prompt:
    has_template = model.tokenizer.chat_template is not None
    try:
        if style is PromptStyle.RAW or (style is PromptStyle.AUTO and not has_template):
            return await from_text(prompt, model, add_special_tokens=True)
        return await from_messages(
            [ChatMessage(role="user", content=prompt)],
            model,
            add_generation_prompt=True,
            continue_final_message=False,
            add_special_tokens=False,  # the template writes them
            variables=None,
        )
    except ApiError as error:
        raise RequestRejected("", str(error)) from None


async def attached(
    endpoint: Endpoint, config: DeploymentConfig, prompts: Sequence[str], options: GenerateOptions
) -> list[Answer]:
    """generate() over a connection of its own to a scheduler. Raises InstanceFailed when it does not answer."""
    model = ServedModel.load(config.model, chat_template=config.api.chat_template)
    client = ZmqEngineClient(endpoint, resume_timeout_s=config.health.resume_timeout_s)
    await client.connect()
    try:
        return await generate(client, model, prompts, options)
    finally:
        client.close()
