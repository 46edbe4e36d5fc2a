"""POST /v1/completions: prompts of text or token ids, continued."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from blockferry.cluster.api.errors import ApiError
from blockferry.cluster.api.generation import ApiState, Generation, build, collect, merged, new_request_id
from blockferry.cluster.api.logprobs import CompletionLogprobs, joined
from blockferry.cluster.api.prompts import read_prompts
from blockferry.cluster.api.sampling import room_for, sampling_of
from blockferry.cluster.api.schemas import CompletionRequest
from blockferry.cluster.api.sequence import Delta
from blockferry.cluster.api.streaming import DONE, event
from blockferry.cluster.api.usage import StreamUsage, UsageCounter

DEFAULT_MAX_TOKENS = 16


async def prepare(state: ApiState, body: CompletionRequest, *, header_id: str | None) -> Completion:
    """Check everything that can be checked and build the sequences. Raises ApiError."""
    model = state.model
    model.check_name(body.model)
    prompts = await read_prompts(body.prompt, model, add_special_tokens=body.add_special_tokens)
    if body.echo and model.encoder_decoder is not None:
        raise ApiError("echo=true: an encoder-decoder does not continue its prompt; leave it out", param="echo")
    samplings = []
    for prompt in prompts:
        num_context_tokens = len(model.context_of(prompt.token_ids))
        max_tokens = room_for(body, model, num_prompt_tokens=num_context_tokens, default=DEFAULT_MAX_TOKENS)
        builder = sampling_of(
            body,
            model,
            max_tokens=max_tokens,
            num_logprobs=body.logprobs,
            num_prompt_logprobs=body.logprobs if body.echo else None,
        )
        samplings.append(builder)
    request_id = new_request_id("cmpl", asked=body.request_id, header=header_id)
    return Completion(state, body, build(state, body, prompts, samplings, request_id=request_id))


class Completion:
    """One completion request on its way to a response."""

    def __init__(self, state: ApiState, body: CompletionRequest, generation: Generation) -> None:
        self._state = state
        self._body = body
        self._generation = generation
        self._usage = UsageCounter(generation)
        self._echoed: set[int] = set()  # sequences whose prompt has been shown
        self._columns = CompletionLogprobs(
            tokenizer=state.model.tokenizer,
            num_top=body.logprobs or 0,
            shows_ids=body.return_tokens_as_token_ids,
        )
        self._head = {
            "id": generation.request_id,
            "object": "text_completion",
            "created": generation.created_s,
            "model": state.model.name,
        }

    async def respond(self) -> dict[str, Any]:
        """The whole response object. Raises ApiError."""
        with self._state.active.hold(self._generation.request_id):
            results = await collect(self._generation)
        for delta in results:
            self._usage.add(delta)
        choices = [self._choice(delta) for delta in results]
        return {**self._head, "choices": choices, "usage": self._usage.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Raises ApiError."""
        usage = StreamUsage(self._body.stream_options, self._usage)
        with self._state.active.hold(self._generation.request_id):
            async with contextlib.aclosing(merged(self._generation.runs)) as deltas:
                async for delta in deltas:
                    self._usage.add(delta)
                    yield event({**self._head, "choices": [self._choice(delta)], **usage.of_chunk()})
        for last in usage.final_chunks():
            yield event({**self._head, **last})
        yield DONE

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """One entry of `choices`; the first of a sequence carries the echo."""
        text = delta.text
        columns = self._output_columns(delta)
        if self._body.echo and delta.index not in self._echoed:
            self._echoed.add(delta.index)
            text = self._prompt_text(delta.index) + text
            if columns is not None:
                ids = self._generation.prompt_of(delta.index).token_ids.tolist()
                columns = joined(self._columns.prompt_columns(ids, delta.prompt_logprobs), columns)
        return {
            "index": delta.index,
            "text": text,
            "logprobs": columns,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _output_columns(self, delta: Delta) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        offset = len(self._prompt_text(delta.index)) if self._body.echo else 0
        return self._columns.columns(delta.tokens, offset=offset)

    def _prompt_text(self, index: int) -> str:
        prompt = self._generation.prompt_of(index)
        if prompt.text is not None:
            return prompt.text
        return self._state.model.tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
