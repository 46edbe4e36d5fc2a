"""Measures an OpenAI endpoint as its users see it: random prompts, closed or open loop, latencies and rates.

    closed loop   `concurrency` clients, each sends its next request when the last one has ended
    open loop     requests arrive by a Poisson process of `rate_per_s`, however slow the answers are

Talks HTTP only, so it measures any server alike. Bounded in requests and in time. Definitions are those of
vLLM's serving benchmark: TTFT from send to first event, TPOT = (E2E - TTFT) / (tokens - 1), ITL between events.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blockferry.cluster.bench.drafts import ask_counts, draft_rows
from blockferry.cluster.bench.load import Answer, Endpoint, Prompt, ask, find_model
from blockferry.cluster.bench.pacing import Pace, Sender, send_all
from blockferry.cluster.bench.report import ParamValue, Plot, Report, Result

FIRST_RANDOM_ID = 256  # below are the special tokens of most vocabularies
MAX_PROMPTS = 1_000_000
PLOTTED = ("output_throughput", "total_throughput", "ttft", "tpot", "e2e")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig:
    """One measurement. Lengths are uniform in length * (1 - range_ratio) .. length * (1 + range_ratio)."""

    base_url: str  # http://host:port or http://host:port/v1
    model: str = ""  # the first one that is served
    num_prompts: int = 64
    num_warmup: int = 2
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    concurrency: int | None = 8  # at most so many requests at a time; None: no limit (with a rate only)
    rate_per_s: float | None = None  # None: closed loop
    seed: int = 0
    vocab_size: int | None = None  # None: from the server's model card, which only ours tells
    max_duration_s: float = 600.0
    api_key: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_range("num_prompts", self.num_prompts, 1, MAX_PROMPTS)
        _check_range("num_warmup", self.num_warmup, 0, MAX_PROMPTS)
        _check_range("input_len", self.input_len, 1, MAX_PROMPTS)
        _check_range("output_len", self.output_len, 1, MAX_PROMPTS)
        _check_range("range_ratio", self.range_ratio, 0, 0.99)
        _check_range("max_duration_s", self.max_duration_s, 1, 86400)
        if self.rate_per_s is not None:
            _check_range("rate_per_s", self.rate_per_s, 1e-3, 1e6)
        if self.concurrency is not None:
            _check_range("concurrency", self.concurrency, 1, 65536)
        elif self.rate_per_s is None:
            raise ValueError("concurrency=None has no limit and needs rate_per_s; give one of them")

    @property
    def url(self) -> str:
        """Base URL that ends in /v1."""
        base = self.base_url.rstrip("/")
        return base if base.endswith("/v1") else base + "/v1"

    @property
    def params(self) -> dict[str, ParamValue]:
        """What the results are reported under."""
        return {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "concurrency": self.concurrency,
            "rate_per_s": self.rate_per_s,
            "num_prompts": self.num_prompts,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The answers of one measurement and the seconds from its first request to its last answer."""

    config: ServeBenchConfig
    answers: Sequence[Answer]
    duration_s: float
    drafts: Sequence[Result] = ()  # rows on what was drafted meanwhile

    @property
    def succeeded(self) -> list[Answer]:
        """Answers that came whole."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def num_output_tokens(self) -> int:
        """Of all answers that came whole."""
        return sum(answer.num_output_tokens for answer in self.succeeded)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all answers that came whole."""
        return sum(answer.num_prompt_tokens for answer in self.succeeded)


CeilingRows = Callable[[Measured], Sequence[Result]]


async def run_serve_bench(
    configs: Sequence[ServeBenchConfig],
    *,
    num_runs: int = 1,
    console: Console | None = None,
    ceiling: CeilingRows | None = None,
) -> Report:
    """Measure one configuration after the other, num_runs times each, with a progress bar on `console` (or stderr).

    Every run draws prompts of its own. `ceiling` may add rows that compare a measurement with what the machine
    could do at best. Raises ValueError when a server cannot be reached or none of its answers comes whole.
    """
    results: list[Result] = []
    with progress_of(console or Console(stderr=True)) as progress:
        for config in configs:
            runs = []
            for run in range(num_runs):
                measured = await _measure(dataclasses.replace(config, seed=config.seed + run), progress)
                runs.append([*summarise(measured), *(ceiling(measured) if ceiling is not None else ())])
            results.extend(_merge(runs))
    return Report(command="bench serve", results=results)


def _merge(runs: Sequence[Sequence[Result]]) -> list[Result]:
    """The same rows of several runs as one row each."""
    merged = {(row.name, tuple(row.params.items())): row for row in runs[0]}
    for rows in runs[1:]:
        for row in rows:
            key = (row.name, tuple(row.params.items()))
            merged[key] = dataclasses.replace(row, runs=[*merged[key].runs, *row.runs]) if key in merged else row
    return list(merged.values())


async def _measure(config: ServeBenchConfig, progress: Progress) -> Measured:
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = aiohttp.ClientTimeout(total=config.max_duration_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        card = await find_model(session, config.url, config.model)
        endpoint = Endpoint(url=config.url, model=card["id"])
        prompts = random_prompts(config, config.vocab_size or card.get("vocab_size"))
        send = functools.partial(ask, session, endpoint)
        await warm_up(prompts[: config.num_warmup], send, progress)
        label = f"{config.concurrency or 'all'} at a time" if config.rate_per_s is None else f"{config.rate_per_s:g}/s"
        bar = progress.add_task(f"{config.input_len} in, {config.output_len} out, {label}", total=config.num_prompts)

        async def send_and_show(prompt: Prompt) -> Answer:
            answer = await send(prompt)
            progress.advance(bar)
            return answer

        drafts_before = await ask_counts(session, config.url)
        start_s = time.perf_counter()
        pace = Pace(
            arrivals_s=_arrivals_s(config),
            num_slots=config.concurrency or config.num_prompts,
            max_duration_s=config.max_duration_s,
        )
        answers = await send_all(prompts[config.num_warmup :], send_and_show, pace)
        duration_s = time.perf_counter() - start_s
        drafts = draft_rows(drafts_before, await ask_counts(session, config.url), config.params)
        measured = Measured(config=config, answers=answers, duration_s=duration_s, drafts=drafts)
    if not measured.succeeded:
        raise ValueError(f"no request succeeded at {config.url}: {measured.answers[0].error}")
    return measured


async def warm_up(prompts: Sequence[Prompt], send: Sender, progress: Progress) -> None:
    """Raises ValueError at the first failure: a server that refuses these refuses all."""
    bar = progress.add_task("warm-up", total=len(prompts), visible=bool(prompts))
    for prompt in prompts:
        answer = await send(prompt)
        if answer.error:
            raise ValueError(f"the warm-up request failed: {answer.error}")
        progress.advance(bar)


def _arrivals_s(config: ServeBenchConfig) -> Iterator[float]:
    """When each request is due; at once in the closed loop, where slots set the pace."""
    draw = np.random.default_rng((config.seed, 1))
    arrival_s = 0.0
    while True:
        arrival_s += 0.0 if config.rate_per_s is None else float(draw.exponential(1 / config.rate_per_s))
        yield arrival_s


def random_prompts(config: ServeBenchConfig, vocab_size: int | None) -> list[Prompt]:
    """Warm-up and measured prompts; no two share a prefix, so a prefix cache helps nobody. Raises ValueError."""
    if vocab_size is None:
        raise ValueError("the server does not tell its vocabulary size; give vocab_size or a tokenizer")
    draw = np.random.default_rng(config.seed)
    first = min(FIRST_RANDOM_ID, vocab_size // 2)

    def length(mean: int) -> int:
        low, high = round(mean * (1 - config.range_ratio)), round(mean * (1 + config.range_ratio))
        return int(draw.integers(max(low, 1), max(high, 1) + 1))

    return [
        Prompt(
            token_ids=draw.integers(first, vocab_size, length(config.input_len)).tolist(),
            num_output_tokens=length(config.output_len),
        )
        for _ in range(config.num_warmup + config.num_prompts)
    ]


def summarise(measured: Measured) -> list[Result]:
    """Rows of one measurement: rates, then mean, median and p99 of each latency, then what was drafted."""
    rows = rows_of(measured.answers, duration_s=measured.duration_s, params=measured.config.params)
    return [*rows, *measured.drafts]


def rows_of(every: Sequence[Answer], *, duration_s: float, params: Mapping[str, ParamValue]) -> list[Result]:
    """Rates of the answers that came whole, then mean, median and p99 of each latency."""
    answers = [answer for answer in every if not answer.error]
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    num_output_tokens = sum(answer.num_output_tokens for answer in answers)
    latencies = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [value for answer in answers if (value := answer.tpot_s) is not None],
        "itl": [gap_s for answer in answers for gap_s in answer.itl_s],
        "e2e": [answer.e2e_s for answer in answers],
    }
    rates = {
        "output_throughput": (num_output_tokens / duration_s, "tok/s"),
        "prompt_throughput": (num_prompt_tokens / duration_s, "tok/s"),
        "total_throughput": ((num_output_tokens + num_prompt_tokens) / duration_s, "tok/s"),
        "request_throughput": (len(answers) / duration_s, "req/s"),
        "duration": (duration_s, "s"),
        "failed_requests": (float(len(every) - len(answers)), "1"),
    }
    rows = [Result(name=name, params=params, unit=unit, runs=[value]) for name, (value, unit) in rates.items()]
    for name, values_s in latencies.items():
        if values_s:
            for statistic, value_s in _statistics(values_s).items():
                rows.append(
                    Result(name=name, params={**params, "statistic": statistic}, unit="ms", runs=[value_s * 1e3])
                )
    return rows


def _statistics(values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values)
    return {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "p99": float(np.percentile(array, 99)),
    }


def plot_of(configs: Sequence[ServeBenchConfig], path: Path) -> Plot:
    """Throughput and latencies over what varies between the configurations."""
    x = "concurrency" if all(config.rate_per_s is None for config in configs) else "rate_per_s"
    return Plot(path=path, x=x, series="statistic", names=PLOTTED, title="Throughput and latency of the server")


def progress_of(console: Console) -> Progress:
    """Bars of a benchmark that sends requests."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside {low} .. {high}; choose a value within")
