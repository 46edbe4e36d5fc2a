"""All sequences of one HTTP request: built, run side by side, and aborted together.

prompts x n  ->  SequenceRun 0, 1, ...  ->  one stream of deltas, told apart by their index
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from blockferry.cluster.api.client import EngineClient
from blockferry.cluster.api.errors import ApiError, shown
from blockferry.cluster.api.prompts import Prompt
from blockferry.cluster.api.schemas import SamplingFields
from blockferry.cluster.api.sequence import Delta, SequenceRun, SequenceText, StopRules
from blockferry.cluster.api.served_model import ServedModel
from blockferry.cluster.metrics import ServerMetrics
from blockferry.engine.request import Request, SamplingParams

MAX_SEQUENCES = 1024  # of one HTTP request
QUEUE_DELTAS = 64  # waiting for a slow client, per HTTP request


class ActiveRequests:
    """Ids of the HTTP requests being answered; one id cannot be used twice at a time."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    @contextlib.contextmanager
    def hold(self, request_id: str) -> Iterator[None]:
        """Own an id. Raises ApiError while another request has it."""
        if request_id in self._ids:
            raise ApiError(
                f"request_id={shown(request_id)} is in use by a running request; choose another",
                param="request_id",
                code="duplicate_request_id",
            )
        self._ids.add(request_id)
        try:
            yield
        finally:
            self._ids.discard(request_id)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApiState:
    """What every handler needs. One per server."""

    engine: EngineClient
    model: ServedModel
    metrics: ServerMetrics
    active: ActiveRequests = dataclasses.field(default_factory=ActiveRequests)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One HTTP request's sequences, not yet started: index = prompt * num_choices + choice."""

    request_id: str
    created_s: int
    prompts: Sequence[Prompt]
    num_choices: int  # per prompt
    runs: Sequence[SequenceRun]

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that sequence `index` continues."""
        return self.prompts[index // self.num_choices]


SamplingBuilder = Callable[[int], SamplingParams]


def build(
    state: ApiState,
    fields: SamplingFields,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingBuilder],
    *,
    request_id: str,
) -> Generation:
    """Make the requests of all sequences; `samplings` has one builder per prompt. Raises ApiError."""
    num_choices = fields.n or 1
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise ApiError(
            f"{len(prompts)} prompts x n={num_choices} are {len(prompts) * num_choices} sequences, "
            f"the limit is {MAX_SEQUENCES}; send several requests",
            param="n",
        )
    model = state.model
    rules = StopRules(
        stops=tuple(fields.stop or ()),
        eos_token_ids=model.eos_token_ids,
        includes_stop=fields.include_stop_str_in_output,
    )
    runs: list[SequenceRun] = []
    for prompt, sampling in zip(prompts, samplings):
        context = model.context_of(prompt.token_ids)[-8:].tolist()  # enough for any detokenizer's start
        for choice in range(num_choices):
            request = _request(state, fields, prompt, sampling(choice), f"{request_id}-{len(runs)}")
            detokenizer = model.tokenizer.detokenizer(context, skip_special_tokens=fields.skip_special_tokens)
            text = SequenceText(len(runs), request, detokenizer, rules)
            runs.append(SequenceRun(state.engine, state.metrics, request, text))
    return Generation(
        request_id=request_id, created_s=int(time.time()), prompts=prompts, num_choices=num_choices, runs=runs
    )


def _request(
    state: ApiState, fields: SamplingFields, prompt: Prompt, sampling: SamplingParams, request_id: str
) -> Request:
    return Request(
        request_id=request_id,
        handle=state.engine.next_handle(),
        prompt_token_ids=state.model.context_of(prompt.token_ids),
        sampling=sampling,
        arrival_s=time.monotonic(),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        # a cached prefix is not computed, so it would have no log probabilities
        skip_reading_prefix_cache=sampling.num_prompt_logprobs is not None,
        encoder_token_ids=state.model.encoder_input(prompt.token_ids),
    )


def new_request_id(prefix: str, *, asked: str | None, header: str | None) -> str:
    """The client's id (body before X-Request-Id header) or a random one, with the endpoint's prefix."""
    return f"{prefix}-{asked or header or uuid.uuid4().hex}"


def merged(runs: Sequence[SequenceRun]) -> AsyncGenerator[Delta, None]:
    """Deltas of all sequences as they come. Closing the iterator aborts what still runs."""
    return runs[0].deltas() if len(runs) == 1 else _merged(runs)


async def _merged(runs: Sequence[SequenceRun]) -> AsyncGenerator[Delta, None]:
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(QUEUE_DELTAS)
    tasks = [asyncio.create_task(_pump(run, queue)) for run in runs]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(run: SequenceRun, queue: asyncio.Queue[Delta | BaseException | None]) -> None:
    """Move one sequence's deltas into the queue; its failure travels there too."""
    try:
        async with contextlib.aclosing(run.deltas()) as deltas:
            async for delta in deltas:
                await queue.put(delta)
    except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
        await queue.put(error)
    else:
        await queue.put(None)


async def collect(generation: Generation) -> list[Delta]:
    """Run every sequence to its end, one delta for all of it. Cancelling it aborts them. Raises ApiError."""
    parts: list[list[Delta]] = [[] for _ in generation.runs]
    async with contextlib.aclosing(merged(generation.runs)) as deltas:
        async for delta in deltas:
            parts[delta.index].append(delta)
    return [_joined(deltas) for deltas in parts]


def _joined(deltas: Sequence[Delta]) -> Delta:
    """The last delta, with what all of them showed."""
    return dataclasses.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        prompt_logprobs=[entry for delta in deltas for entry in delta.prompt_logprobs],
    )
