"""A small real EngineClient in one process: deterministic tokens, real time, aborts, queues and failures."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from support import tiny_tokenizers

from blockferry.cluster.api.client import RequestOutput
from blockferry.cluster.api.served_model import ServedModel
from blockferry.engine.errors import InstanceFailed, QueueFull, RequestRejected
from blockferry.engine.request import FinishReason, Request, RequestStats, SamplingParams, TokenLogprobs

Reply = Callable[[Request], list[int]]


def echo_reply(request: Request) -> list[int]:
    """The prompt, over and over, rotated by the seed."""
    prompt = request.prompt_token_ids.tolist()
    start = (request.sampling.seed or 0) % len(prompt)
    rotated = prompt[start:] + prompt[:start]
    return (rotated * (request.sampling.max_tokens // len(prompt) + 1))[: request.sampling.max_tokens]


class TinyEngine:
    """Answers with `reply(request)`, `num_at_once` tokens every `delay_s`; the reply's stop tokens count.

    A request runs until its last output or its abort: leaving the iterator alone does not end it.
    """

    def __init__(
        self, reply: Reply = echo_reply, *, delay_s: float = 0.0, max_queue_len: int = 1000, num_at_once: int = 1
    ) -> None:
        self.reply = reply
        self.delay_s = delay_s
        self.num_at_once = num_at_once  # as when drafts are accepted
        self.num_drafts = 0  # of which num_at_once - 1 tokens were drafted and accepted each
        self.max_queue_len = max_queue_len
        self.fail_after: int | None = None  # tokens of each sequence until the engine fails
        self.is_reachable = True
        self.submitted: list[Request] = []
        self.running: dict[int, asyncio.Event] = {}
        self.aborted: list[int] = []
        self._last_handle = 0

    def next_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    async def submit(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.submitted.append(request)
        if request.request_id.startswith("cmpl-reject"):
            raise RequestRejected(request.request_id, "prompt needs 99 blocks, the pool has 10; shorten the prompt")
        if len(self.running) >= self.max_queue_len:
            raise QueueFull(request.request_id, f"{self.max_queue_len} requests wait already; retry later")
        aborted = self.running[request.handle] = asyncio.Event()
        async for output in self._outputs(request, aborted):
            if output.finish_reason is not None:
                self.running.pop(request.handle, None)
            yield output

    async def _outputs(self, request: Request, aborted: asyncio.Event) -> AsyncIterator[RequestOutput]:
        sampling = request.sampling
        if sampling.num_prompt_logprobs is not None:
            entries = [_logprobs(i, sampling.num_prompt_logprobs) for i in request.prompt_token_ids.tolist()[1:]]
            yield RequestOutput(handle=request.handle, prompt_logprobs=entries)
        reply, stop_token_id = _until_stop(self.reply(request), sampling)
        num_tokens = len(reply)
        for start in range(0, num_tokens, self.num_at_once):
            token_ids = reply[start : start + self.num_at_once]
            num_sent = start + len(token_ids)
            if self.fail_after in range(start, num_sent):
                self.running.clear()
                raise InstanceFailed("decode0", "worker died")
            if await _wait(aborted, self.delay_s):
                yield RequestOutput(handle=request.handle, finish_reason=FinishReason.ABORT)
                return
            self.num_drafts += 1
            is_last = num_sent == num_tokens
            num_top = sampling.num_logprobs
            yield RequestOutput(
                handle=request.handle,
                token_ids=token_ids,
                logprobs=[] if num_top is None else [_logprobs(token_id, num_top) for token_id in token_ids],
                finish_reason=_reason(stop_token_id) if is_last else None,
                stop_token_id=stop_token_id if is_last else None,
                stats=_stats(request, num_sent) if is_last else None,
            )
        if not num_tokens:
            yield RequestOutput(handle=request.handle, finish_reason=FinishReason.LENGTH, stats=_stats(request, 0))

    async def abort(self, handle: int) -> None:
        event = self.running.pop(handle, None)
        if event is not None:
            self.aborted.append(handle)
            event.set()

    def _draft_counts(self) -> dict[str, Any]:
        counts = [self.num_drafts] * (self.num_at_once - 1)
        return {
            "speculation": {"drafted_per_position": counts, "accepted_per_position": counts},
            "speculation_num_drafts": self.num_drafts,
            "speculation_num_drafted": sum(counts),
            "speculation_num_accepted": sum(counts),
        }

    async def status(self) -> dict[str, Any]:
        if not self.is_reachable:
            raise TimeoutError("the scheduler does not answer")
        instance = {
            "instance_id": "mixed0",
            "role": "mixed",
            "num_running": len(self.running),
            "num_waiting": 0,
            "usage": 0.25,
            "num_preemptions": 3,
            "num_queried_tokens": 100,
            "num_hit_tokens": 40,
        }
        if self.num_at_once > 1:
            instance |= self._draft_counts()
        return {"is_serving": True, "instances": [instance], "prefix_cache": {"hit_rate": 0.4}}


def _until_stop(reply: list[int], sampling: SamplingParams) -> tuple[list[int], int | None]:
    """The tokens that are sent, and the stop token that is their last."""
    reply = reply[: sampling.max_tokens]
    for position, token_id in enumerate(reply):
        if token_id in sampling.stop_token_ids and position >= sampling.min_tokens:
            return reply[: position + 1], token_id
    return reply, None


def _reason(stop_token_id: int | None) -> FinishReason:
    return FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP


async def _wait(aborted: asyncio.Event, delay_s: float) -> bool:
    """Sleep as long as a step takes; True when the request was aborted meanwhile."""
    try:
        await asyncio.wait_for(aborted.wait(), delay_s)
    except TimeoutError:
        return False
    return True


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    ids = [token_id, *((token_id + 1 + step) % 90 + 3 for step in range(num_top))]
    values = [-0.5, *(-0.25 - step for step in range(num_top))]
    return TokenLogprobs(token_ids=np.array(ids, np.int32), logprobs=np.array(values, np.float32), rank=2)


def _stats(request: Request, num_output_tokens: int) -> RequestStats:
    return RequestStats(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=num_output_tokens,
        num_cached_tokens=1,
        num_preemptions=0,
        queued_s=0.001,
        prefill_s=0.01,
        transfer_s=0.002,
        transfer_bytes=4096,
        transfer_blocks=2,
        transfer_saved_bytes=0,
    )


def served_model(**changes: Any) -> ServedModel:
    """The byte-level tiny tokenizer as a model of 256 tokens' context."""
    tokenizer = tiny_tokenizers.byte_level()
    model = ServedModel(
        name="tiny",
        root="tiny",
        max_model_len=256,
        vocab_size=tokenizer.num_tokens,
        eos_token_ids=(tiny_tokenizers.EOS_ID,),
        default_sampling={},
        tokenizer=tokenizer,
    )
    return dataclasses.replace(model, **changes)


def text_reply(text: str, *, with_eos: bool = True) -> Reply:
    """Always answers `text`, then EOS."""
    ids = tiny_tokenizers.byte_level().encode(text, add_special_tokens=False)
    return lambda request: ids + ([tiny_tokenizers.EOS_ID] if with_eos else [])
