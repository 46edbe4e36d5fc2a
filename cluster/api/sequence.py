"""One sequence from engine tokens to text that may be shown: detokenised, stop strings applied, counted.

RequestOutput --absorb--> Delta      a pure step per output: no sockets, no waiting
SequenceRun.deltas()                 drives it against the engine and aborts what is left unfinished
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from blockferry.cluster.api.client import EngineClient, RequestOutput
from blockferry.cluster.api.detokenizer import Detokenizer
from blockferry.cluster.api.errors import ApiError, from_engine
from blockferry.cluster.api.stop_strings import StopMatcher
from blockferry.cluster.metrics import SequenceTimes, ServerMetrics
from blockferry.engine.errors import BlockferryError
from blockferry.engine.request import FinishReason, Request, RequestStats, TokenLogprobs

ABORT_TIMEOUT_S = 1.0  # how long an answer that is complete may wait for its statistics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """A generated token with its log probabilities and the place of its text in the sequence's text."""

    logprobs: TokenLogprobs
    text_offset: int  # characters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one sequence gained: text, and the tokens behind it where log probabilities were asked for."""

    index: int
    text: str
    tokens: Sequence[OutputToken] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    num_output_tokens: int  # so far
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string or stop token, if it was not an EOS
    stats: RequestStats | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends a sequence's text besides the engine."""

    stops: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    includes_stop: bool = False


class SequenceText:
    """Turns one sequence's outputs into deltas. Owns its detokenizer and held-back text."""

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer, rules: StopRules) -> None:
        self._index = index
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(rules.stops)
        self._rules = rules
        self._num_chars = 0
        self._held_tokens: list[OutputToken] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.num_output_tokens = 0

    def absorb(self, output: RequestOutput) -> Delta | None:
        """The next delta, or None when there is nothing to show yet."""
        self._prompt_logprobs.extend(output.prompt_logprobs)
        stop_token_id = output.stop_token_id
        text, stop = "", None
        for position, token_id in enumerate(output.token_ids):
            if stop_token_id == token_id and position == len(output.token_ids) - 1 and not self._rules.includes_stop:
                piece = ""
            else:
                piece = self._detokenizer.push(token_id)
            if output.logprobs:
                token = OutputToken(logprobs=output.logprobs[position], text_offset=self._num_chars)
                self._held_tokens.append(token)
            self.num_output_tokens += 1
            self._num_chars += len(piece)
            shown, stop = self._show(piece)
            text += shown
            if stop is not None:
                return self._last(text, FinishReason.STOP, stop, output.stats)
        if output.finish_reason is None:
            # also without text (half a character, held back): a client may count events or wait for the first
            return self._delta(text) if output.token_ids else None
        shown, stop = self._show(self._detokenizer.flush())
        if stop is not None:
            return self._last(text + shown, FinishReason.STOP, stop, output.stats)
        text += shown + self._matcher.flush()
        stop_reason = None if stop_token_id in self._rules.eos_token_ids else stop_token_id
        return self._last(text, output.finish_reason, stop_reason, output.stats)

    def _show(self, piece: str) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string that it ran into."""
        if self.num_output_tokens <= self._min_tokens:
            return piece, None
        match = self._matcher.push(piece)
        if match.stop is not None and self._rules.includes_stop:
            return match.text + match.stop, match.stop
        return match.text, match.stop

    def _delta(self, text: str) -> Delta:
        """A delta of `text`. Tokens wait until there is text; prompt log probabilities go at once."""
        tokens: list[OutputToken] = []
        if text:
            tokens, self._held_tokens = self._held_tokens, tokens
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return Delta(
            index=self._index,
            text=text,
            tokens=tokens,
            prompt_logprobs=prompt_logprobs,
            num_output_tokens=self.num_output_tokens,
        )

    def _last(self, text: str, reason: FinishReason, stop: int | str | None, stats: RequestStats | None) -> Delta:
        tokens, self._held_tokens = self._held_tokens, []
        return dataclasses.replace(
            self._delta(text), tokens=tokens, finish_reason=reason.value, stop_reason=stop, stats=stats
        )


class SequenceRun:
    """One sequence on its way through the engine."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics, request: Request, text: SequenceText) -> None:
        self._engine = engine
        self._metrics = metrics
        self._request = request
        self._text = text

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Submit and yield until the last delta. Leaving early aborts the request. Raises ApiError."""
        times = SequenceTimes(self._metrics, num_prompt_tokens=self._request.num_input_tokens)
        is_running = True
        try:
            outputs = self._engine.submit(self._request)
            async for output in outputs:
                is_running = output.finish_reason is None
                if output.finish_reason is FinishReason.ERROR:
                    raise ApiError(f"the engine failed: {output.error}", status=503, code="engine_failed")
                num_before = self._text.num_output_tokens
                delta = self._text.absorb(output)
                times.on_tokens(self._text.num_output_tokens - num_before, time.monotonic())
                if delta is None:
                    continue
                reason = delta.finish_reason
                if reason is None:
                    yield delta
                    continue
                if is_running:  # a stop string, which the engine knows nothing of
                    is_running = False
                    await self._engine.abort(self._request.handle)
                    delta = dataclasses.replace(delta, stats=await _stats_of_aborted(outputs))
                times.on_finish(reason, delta.stats)
                yield delta
                return
            raise ApiError("the engine ended the stream without a result", status=500, code="engine_failed")
        except BlockferryError as error:
            is_running = False
            raise from_engine(error) from error
        finally:
            if is_running:
                await self._engine.abort(self._request.handle)
            times.close()


async def _stats_of_aborted(outputs: AsyncIterator[RequestOutput]) -> RequestStats | None:
    """What an aborted request cost, from its last output; None when the engine takes too long to tell."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            async for output in outputs:
                if output.finish_reason is not None:
                    return output.stats
    return None
