"""`bench serve --trace`: a trace's requests at their times, and how much of what a cache could spare was spared.

Talks HTTP only, so it measures any server that tells cached tokens in `usage`; what only our own status knows
(deployment_rows) is asked of a deployment that the command brought up itself.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from blockferry.cluster.bench.drafts import ask_counts, draft_rows
from blockferry.cluster.bench.load import Answer, Endpoint, Prompt, ask, find_model
from blockferry.cluster.bench.pacing import Pace, send_all
from blockferry.cluster.bench.report import ParamValue, Result
from blockferry.cluster.bench.serve import FIRST_RANDOM_ID, progress_of, rows_of, warm_up
from blockferry.cluster.bench.trace import (
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    fitting,
    ideal_hit_tokens,
    prompts_of,
    read_trace,
    scaled,
)

MAX_AT_A_TIME = 1024
IDLE_TIMEOUT_S = 30.0
_WARM_UP_ID = 1 << 40  # of blocks that are in no trace
_POLL_S = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """One replay of one trace."""

    base_url: str  # http://host:port
    trace: Path
    model: str = ""  # the first one that is served
    block_tokens: int = TRACE_BLOCK_TOKENS  # that stand for 512 of the trace
    speed: float = 1.0
    limit: int = 1000  # requests
    seed: int = 0
    max_duration_s: float = 600.0
    label: str = ""  # of the deployment, where several are compared

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 1 <= self.block_tokens <= TRACE_BLOCK_TOKENS:
            raise ValueError(f"block_tokens={self.block_tokens} is outside 1 .. {TRACE_BLOCK_TOKENS}")
        if not 1e-3 <= self.speed <= 1e6:
            raise ValueError(f"speed={self.speed} is outside 0.001 .. 1,000,000")
        if not 1 <= self.limit <= 1_000_000:
            raise ValueError(f"limit={self.limit} is outside 1 .. 1,000,000 requests")

    @property
    def params(self) -> dict[str, ParamValue]:
        """What the results are reported under."""
        return {
            "router": self.label or None,
            "trace": self.trace.stem,
            "block_tokens": self.block_tokens,
            "speed": self.speed,
            "limit": self.limit,
        }


async def replay(config: ReplayConfig, *, console: Console | None = None) -> list[Result]:
    """Send the trace's requests; rates, latencies and hit rates.

    Raises ValueError for a file that is no trace, a server that cannot be reached or that answers nothing.
    """
    every = [
        scaled(one, block_tokens=config.block_tokens, speed=config.speed)
        for one in read_trace(config.trace, limit=config.limit)
    ]
    timeout = aiohttp.ClientTimeout(total=config.max_duration_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        card = await find_model(session, f"{config.base_url}/v1", config.model)
        requests = fitting(every, max_model_len=card.get("max_model_len") or 1 << 30)
        if not requests:
            raise ValueError(f"no prompt fits max_model_len={card['max_model_len']}; make blocks shorter")
        endpoint = Endpoint(url=f"{config.base_url}/v1", model=card["id"])
        drafts_before = await ask_counts(session, endpoint.url)
        started_s = time.perf_counter()
        answers = await _send(config, requests, card, functools.partial(ask, session, endpoint), console)
        duration_s = time.perf_counter() - started_s
        drafts = draft_rows(drafts_before, await ask_counts(session, endpoint.url), config.params)
    failures = [answer.error for answer in answers if answer.error]
    if len(failures) == len(answers):
        raise ValueError(f"no request succeeded at {config.base_url}: {failures[0]}")
    if failures:
        (console or Console(stderr=True)).print(f"{len(failures)} requests failed, the first one: {failures[0]}")
    return [
        *rows_of(answers, duration_s=duration_s, params=config.params),
        Result(name="skipped_requests", params=config.params, unit="1", runs=[len(every) - len(requests)]),
        *hit_rows(requests, answers, config),
        *drafts,
    ]


async def _send(
    config: ReplayConfig,
    requests: Sequence[TraceRequest],
    card: Mapping[str, Any],
    send: Callable[[Prompt], Any],
    console: Console | None,
) -> list[Answer]:
    vocab_size = int(card.get("vocab_size") or 0)
    if not vocab_size:
        raise ValueError("the server does not tell its vocabulary size in /v1/models, of which prompts are drawn")
    token_range = (min(FIRST_RANDOM_ID, vocab_size // 2), vocab_size)
    make = functools.partial(prompts_of, block_tokens=config.block_tokens, token_range=token_range, seed=config.seed)
    first = dataclasses.replace(requests[0], hash_ids=(_WARM_UP_ID,), num_prompt_tokens=1, num_output_tokens=2)
    prompts = make(requests)
    with progress_of(console or Console(stderr=True)) as progress:
        await warm_up(make([first]), send, progress)
        bar = progress.add_task(f"{config.trace.stem} {config.label}".strip(), total=len(prompts))

        async def send_and_show(prompt: Prompt) -> Answer:
            answer: Answer = await send(prompt)
            progress.advance(bar)
            return answer

        pace = Pace(
            arrivals_s=[request.arrival_s for request in requests],
            num_slots=MAX_AT_A_TIME,
            max_duration_s=config.max_duration_s,
        )
        return await send_all(prompts, send_and_show, pace)


def hit_rows(requests: Sequence[TraceRequest], answers: Sequence[Answer], config: ReplayConfig) -> list[Result]:
    """Prompt tokens found in caches, of all and of what one endless cache would have found; none if nobody says."""
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    ideal = ideal_hit_tokens(requests, block_tokens=config.block_tokens)
    cached = [answer.num_cached_tokens for answer in answers if answer.num_cached_tokens is not None]
    values = {"ideal_hit_rate": ideal / num_prompt_tokens}
    if cached:
        values["prefix_hit_rate"] = sum(cached) / num_prompt_tokens
        if ideal:
            values["hit_ratio_of_ideal"] = sum(cached) / ideal
    return [Result(name=name, params=config.params, unit="1", runs=[value]) for name, value in values.items()]


def wait_until_idle(status: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Our own deployment's status once nothing runs, every block is free and its ledgers have been checked since.

    Or the last one after IDLE_TIMEOUT_S: deployment_rows() shows what is still held.
    """
    num_audits = status()["num_audits"]
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        found = status()
        is_checked = not found["num_unfinished"] and found["num_audits"] > num_audits
        if (is_checked and not _num_used_blocks(found)) or time.monotonic() > deadline_s:
            return found
        time.sleep(_POLL_S)


def deployment_rows(before: Mapping[str, Any], after: Mapping[str, Any], config: ReplayConfig) -> list[Result]:
    """What each instance did between two statuses, and what it holds when nothing runs."""
    rows = []
    earlier = {one["instance_id"]: one for one in before["instances"]}
    for one in after["instances"]:
        was = earlier[one["instance_id"]]
        num_queried = one["num_queried_tokens"] - was["num_queried_tokens"]
        num_hit = one["num_hit_tokens"] - was["num_hit_tokens"]
        values = {
            "queried_tokens": num_queried,
            "missed_tokens": num_queried - num_hit,
            "used_blocks_at_end": one["num_blocks"] - one["num_free_blocks"],
        }
        params = {**config.params, "instance": one["instance_id"]}
        rows += [Result(name=name, params=params, unit="1", runs=[value]) for name, value in values.items()]
    num_audits = after["num_audits"] - before["num_audits"]
    return [*rows, Result(name="integrity_checks", params=config.params, unit="1", runs=[num_audits])]


def _num_used_blocks(status: Mapping[str, Any]) -> int:
    return sum(one["num_blocks"] - one["num_free_blocks"] for one in status["instances"])
