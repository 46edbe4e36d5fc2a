"""POST /v1/chat/completions: a conversation, answered."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from blockferry.cluster.api.generation import ApiState, Generation, build, collect, merged, new_request_id
from blockferry.cluster.api.logprobs import chat_logprobs
from blockferry.cluster.api.prompts import from_messages
from blockferry.cluster.api.sampling import room_for, sampling_of
from blockferry.cluster.api.schemas import ChatRequest
from blockferry.cluster.api.sequence import Delta
from blockferry.cluster.api.streaming import DONE, event
from blockferry.cluster.api.usage import StreamUsage, UsageCounter


async def prepare(state: ApiState, body: ChatRequest, *, header_id: str | None) -> ChatCompletion:
    """Check everything that can be checked and build the sequences. Raises ApiError."""
    model = state.model
    model.check_name(body.model)
    prompt = await from_messages(
        body.messages,
        model,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        variables=body.chat_template_kwargs,
    )
    max_tokens = room_for(body, model, num_prompt_tokens=len(prompt.token_ids), default=None)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, model, max_tokens=max_tokens, num_logprobs=num_logprobs)
    request_id = new_request_id("chatcmpl", asked=body.request_id, header=header_id)
    return ChatCompletion(state, body, build(state, body, [prompt], [sampling], request_id=request_id))


class ChatCompletion:
    """One chat request on its way to a response."""

    def __init__(self, state: ApiState, body: ChatRequest, generation: Generation) -> None:
        self._state = state
        self._body = body
        self._generation = generation
        self._usage = UsageCounter(generation)
        self._role = "assistant" if body.add_generation_prompt else body.messages[-1].role

    async def respond(self) -> dict[str, Any]:
        """The whole response object. Raises ApiError."""
        with self._state.active.hold(self._generation.request_id):
            results = await collect(self._generation)
        for delta in results:
            self._usage.add(delta)
        choices = [
            self._choice(delta, {"message": {"role": self._role, "content": delta.text, "refusal": None}})
            for delta in results
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Raises ApiError."""
        head = self._head("chat.completion.chunk")
        usage = StreamUsage(self._body.stream_options, self._usage)
        introduced: set[int] = set()
        with self._state.active.hold(self._generation.request_id):
            async with contextlib.aclosing(merged(self._generation.runs)) as deltas:
                async for delta in deltas:
                    self._usage.add(delta)
                    if delta.index not in introduced:
                        introduced.add(delta.index)
                        yield event({**head, "choices": [self._introduction(delta.index)], **usage.of_chunk()})
                    choice = self._choice(delta, {"delta": _content(delta)})
                    yield event({**head, "choices": [choice], **usage.of_chunk()})
        for last in usage.final_chunks():
            yield event({**head, **last})
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": kind,
            "created": self._generation.created_s,
            "model": self._state.model.name,
        }

    def _introduction(self, index: int) -> dict[str, Any]:
        """The chunk that opens a choice."""
        delta = {"role": self._role, "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        has_logprobs = bool(self._body.logprobs)
        return {
            "index": delta.index,
            **content,
            "logprobs": chat_logprobs(delta.tokens, self._state.model.tokenizer) if has_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }


def _content(delta: Delta) -> dict[str, Any]:
    """A delta's text; the end of a choice needs none."""
    return {"content": delta.text} if delta.text or delta.finish_reason is None else {}
