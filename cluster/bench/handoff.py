"""`bench handoff`: what handing a prompt from prefill to decode costs the one who waits, against a mixed deployment.

One request at a time on idle deployments, every round on all of them in turn, with prompts of random tokens that no
prefix cache knows. The second token is the first that is decoded: with prefill and decode apart it needs the blocks to
have arrived. Talks HTTP only; the deployments are given.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from blockferry.cluster.bench.load import Answer, Endpoint, Prompt, ask, find_model
from blockferry.cluster.bench.report import ParamValue, Report, Result
from blockferry.cluster.bench.serve import FIRST_RANDOM_ID
from blockferry.cluster.metrics import PREFIX

logger = logging.getLogger(__name__)

MIXED, AFTER, OVERLAPPED = "mixed", "pd_after_prefill", "pd_overlapped"
NUM_OUTPUT_TOKENS = 4  # the second is of interest; a few more show that decoding goes on
MAX_TOKENS = 1_000_000
_REQUEST_TIMEOUT_S = 300.0
_METRICS_TIMEOUT_S = 5.0  # until an ended request shows in /metrics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandoffBenchConfig:
    """What to ask."""

    prompt_tokens: int = 1500
    num_runs: int = 9
    num_warmup: int = 2  # rounds before, not counted
    seed: int = 0
    time_limit_s: float = 600.0  # no round starts after it
    is_repeated: bool = False  # one prompt in all rounds, so that prefix caches help

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name, value, low in (
            ("prompt_tokens", self.prompt_tokens, 1),
            ("num_runs", self.num_runs, 1),
            ("num_warmup", self.num_warmup, 0),
        ):
            if not low <= value <= MAX_TOKENS:
                raise ValueError(f"{name}={value} is outside {low} .. {MAX_TOKENS}; choose a value within")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A deployment that is up."""

    name: str  # MIXED, AFTER or OVERLAPPED
    url: str  # without /v1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """One request; what was ferried for it is zero where nothing was."""

    ttft_s: float
    second_token_s: float
    ferried: Mapping[str, float]  # by the names of _FERRIED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """A sum that /metrics of a deployment shows, as a result."""

    metric: str
    unit: str
    factor: float = 1.0  # from the metric's unit


_FERRIED = {
    "transfer_bytes": _Measure(metric="kv_transfer_bytes", unit="B"),
    "exposed_transfer": _Measure(metric="kv_transfer_time_seconds", unit="ms", factor=1e3),
    "saved_bytes": _Measure(metric="kv_transfer_saved_bytes", unit="B"),
}
_ENDED = "request_success"  # the counter of requests that ended
OnRound = Callable[[int, int], None]
_TIMES: Mapping[str, Callable[[_Timing], float]] = {
    "ttft": lambda one: one.ttft_s,
    "second_token": lambda one: one.second_token_s,
}


async def run_handoff_bench(
    config: HandoffBenchConfig, targets: Sequence[Target], on_round: OnRound = lambda *_: None
) -> Report:
    """Measure every target in every round, a different one first each time; ratios are to the first target.

    `on_round(number, total)` is called before each round. Raises ValueError when a request fails.
    """
    timings: dict[str, list[_Timing]] = {target.name: [] for target in targets}
    started_s = time.monotonic()
    total = config.num_warmup + config.num_runs
    draw = np.random.default_rng(config.seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)) as session:
        askers = [await _Asker.find(session, target) for target in targets]
        prompt = askers[0].random_prompt(config.prompt_tokens, draw)
        for number in range(total):
            if number > config.num_warmup and time.monotonic() - started_s > config.time_limit_s:
                logger.warning("%d of %d rounds were not begun within %g s", total - number, total, config.time_limit_s)
                break
            on_round(number + 1, total)
            first = number % len(askers)
            for asker in (*askers[first:], *askers[:first]):
                timing = await asker.measure(prompt)
                if number >= config.num_warmup:
                    timings[asker.target.name].append(timing)
            if not config.is_repeated:
                prompt = askers[0].random_prompt(config.prompt_tokens, draw)
    return Report(command="bench handoff", results=_results(config, timings))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asker:
    """A target and how to ask it."""

    session: aiohttp.ClientSession
    target: Target
    model: str
    vocab_size: int

    @classmethod
    async def find(cls, session: aiohttp.ClientSession, target: Target) -> _Asker:
        """Raises ValueError when it does not answer."""
        card = await find_model(session, f"{target.url}/v1", "")
        return cls(session=session, target=target, model=card["id"], vocab_size=card["vocab_size"])

    def random_prompt(self, num_tokens: int, draw: np.random.Generator) -> Prompt:
        """A prompt that nobody has seen."""
        first = min(FIRST_RANDOM_ID, self.vocab_size // 2)
        token_ids = draw.integers(first, self.vocab_size, num_tokens).tolist()
        return Prompt(token_ids=token_ids, num_output_tokens=NUM_OUTPUT_TOKENS)

    async def measure(self, prompt: Prompt) -> _Timing:
        """Raises ValueError when the request fails or its tokens do not come one by one."""
        before = await self._totals()
        endpoint = Endpoint(url=f"{self.target.url}/v1", model=self.model)
        answer: Answer = await ask(self.session, endpoint, prompt)
        if answer.error:
            raise ValueError(f"a request to {self.target.name} failed: {answer.error}")
        if not answer.itl_s:
            raise ValueError(f"{self.target.name} streamed all {answer.num_output_tokens} tokens at once")
        after = await self._totals_once(before[_ENDED] + 1)
        return _Timing(
            ttft_s=answer.ttft_s,
            second_token_s=answer.ttft_s + answer.itl_s[0],
            ferried={name: after[name] - before[name] for name in _FERRIED if name in after},
        )

    async def _totals_once(self, num_ended: float) -> dict[str, float]:
        """_totals() when so many requests have ended, which may show a moment after the last token."""
        deadline_s = time.monotonic() + _METRICS_TIMEOUT_S
        while (totals := await self._totals())[_ENDED] < num_ended:
            if time.monotonic() > deadline_s:
                raise ValueError(f"{self.target.name} did not count its request within {_METRICS_TIMEOUT_S:g} s")
            await asyncio.sleep(0.02)
        return totals

    async def _totals(self) -> dict[str, float]:
        """Requests that ended and what was ferried for them, since the start."""
        try:
            async with self.session.get(f"{self.target.url}/metrics") as response:
                text = await response.text()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ValueError(f"{self.target.name} does not show its metrics: {error or type(error).__name__}") from None
        wanted = {f"{PREFIX}{one.metric}_sum": (name, one.factor) for name, one in _FERRIED.items()}
        wanted[f"{PREFIX}{_ENDED}_total"] = (_ENDED, 1.0)
        totals = {_ENDED: 0.0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in wanted:
                    name, factor = wanted[sample.name]
                    totals[name] = totals.get(name, 0.0) + sample.value * factor
        return totals


def _results(config: HandoffBenchConfig, timings: Mapping[str, Sequence[_Timing]]) -> list[Result]:
    """Rows of all targets; pairs of one round make the ratios."""
    base: dict[str, ParamValue] = {"prompt_tokens": config.prompt_tokens}
    reference = next(iter(timings.values()))
    rows: list[Result] = []
    for target, measured in timings.items():
        params = {"deployment": target, **base}
        for name, time_of in _TIMES.items():
            rows.append(Result(name=name, params=params, unit="ms", runs=[time_of(one) * 1e3 for one in measured]))
        for name, measure in _FERRIED.items():
            if name in measured[0].ferried and target != MIXED:
                runs = [one.ferried[name] for one in measured]
                rows.append(Result(name=name, params=params, unit=measure.unit, runs=runs))
        if measured is not reference:
            rows += _ratios(params, measured, reference)
    return rows


def _ratios(
    params: Mapping[str, ParamValue], measured: Sequence[_Timing], reference: Sequence[_Timing]
) -> list[Result]:
    rows = []
    for name, time_of in _TIMES.items():
        own, others = [time_of(one) for one in measured], [time_of(one) for one in reference]
        of = {**params, "of": name}
        pairs = [mine / other for mine, other in zip(own, others, strict=True)]
        rows.append(Result(name="ratio", params=of, unit="1", runs=pairs))
        # what a busy machine disturbs least
        rows.append(Result(name="ratio_of_best", params=of, unit="1", runs=[min(own) / min(others)]))
    return rows
