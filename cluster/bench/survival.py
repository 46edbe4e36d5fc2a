"""`bench survival`: what becomes of streaming requests when a process of a deployment is killed under them.

For each victim in turn: streams are started, the process is killed once half of them have begun, and everything is
followed until the deployment is whole again. Knows neither Ray nor processes: victims know how to die.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import aiohttp

from blockferry.cluster.bench.load import Endpoint, find_model
from blockferry.cluster.bench.report import Report, Result
from blockferry.cluster.bench.serve import FIRST_RANDOM_ID
from blockferry.cluster.bench.survival_load import Client, Fate, Stream, count_fates

NUM_EVENTS_BEFORE = 4  # of a stream, before it counts as begun
_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalConfig:
    """How much is asked of a deployment while it is broken."""

    num_streams: int = 24
    num_prompts: int = 8
    prompt_tokens: int = 96
    output_tokens: int = 96
    limit_s: float = 60.0  # of one stream, and of becoming whole again
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name, value, high in (
            ("streams", self.num_streams, 1024),
            ("prompt_tokens", self.prompt_tokens, 100_000),
            ("output_tokens", self.output_tokens, 100_000),
        ):
            if not 1 <= value <= high:
                raise ValueError(f"{name}={value} is outside 1 .. {high}; choose a value within")
        if self.output_tokens < 2 * NUM_EVENTS_BEFORE:
            raise ValueError(f"output_tokens={self.output_tokens} ends before anything can be killed; use 8 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A process to be killed. Both callables are called on another thread."""

    name: str
    kill: Callable[[], None]
    is_replaced: Callable[[], bool]  # whether another one does its work, and everybody else is there


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One victim's death and what followed; seconds count from the kill."""

    victim: str
    num_begun: int  # streams that had sent tokens
    fates: Mapping[Fate, int]
    errors: Mapping[str, int]
    answering_s: float  # until a new request was answered
    whole_s: float  # until every wanted instance served again
    longest_pause_s: float  # within a stream that ended exactly


async def run_survival(
    config: SurvivalConfig,
    url: str,
    victims: Iterable[Victim],
    on_victim: Callable[[str], None] = lambda _name: None,
) -> list[Blow]:
    """Kill one victim after the other, once the one before is replaced; each is taken when it is its turn.

    Raises ValueError when the deployment does not answer before anything was killed, TimeoutError when it is not
    whole within limit_s.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        card = await find_model(session, f"{url}/v1", "")
        run = _Run(config, session, Endpoint(url=f"{url}/v1", model=card["id"]))
        prompts = _prompts(config, card)
        expected = await run.expected(prompts)
        blows = []
        for number, victim in enumerate(victims):
            on_victim(victim.name)
            draw = random.Random(config.seed + number)
            chosen = [draw.randrange(len(prompts)) for _ in range(config.num_streams)]
            streams = [Stream(prompt=prompts[one], expected=expected[one]) for one in chosen]
            blows.append(await run.strike(victim, streams))
        return blows


class _Run:
    """One deployment under attack."""

    def __init__(self, config: SurvivalConfig, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._config = config
        self._client = Client(
            session=session, endpoint=endpoint, max_tokens=config.output_tokens, limit_s=config.limit_s
        )
        self._probe = dataclasses.replace(self._client, max_tokens=1, limit_s=5.0)

    async def expected(self, prompts: Sequence[list[int]]) -> list[str]:
        """The fault-free texts. Raises ValueError when there are none."""
        streams = [Stream(prompt=prompt, expected="") for prompt in prompts]
        await asyncio.gather(*map(self._client.run, streams))
        for stream in streams:
            if not stream.is_done or stream.error:
                raise ValueError(f"a request failed before anything was killed: {stream.error or 'it broke off'}")
        return [stream.text for stream in streams]

    async def strike(self, victim: Victim, streams: Sequence[Stream]) -> Blow:
        """Kill a victim in the middle of streams, and wait until all of them have ended and all is whole."""
        tasks = [asyncio.create_task(self._client.run(stream)) for stream in streams]
        deadline_s = time.monotonic() + self._config.limit_s
        while sum(stream.num_events >= NUM_EVENTS_BEFORE for stream in streams) * 2 < len(streams):
            if time.monotonic() > deadline_s or all(task.done() for task in tasks):
                raise ValueError(f"half of {len(streams)} streams did not begin within {self._config.limit_s:g} s")
            await asyncio.sleep(0.002)
        num_begun = sum(stream.num_events > 0 for stream in streams)
        await asyncio.to_thread(victim.kill)
        killed_s = time.monotonic()
        answering_s, whole_s, _ = await asyncio.gather(
            self._until_answered(streams[0].prompt, killed_s), self._until_replaced(victim, killed_s), _all(tasks)
        )
        exact = [stream for stream in streams if stream.fate is Fate.EXACT]
        errors: dict[str, int] = {}
        for stream in streams:
            if stream.error:
                errors[stream.error] = errors.get(stream.error, 0) + 1
        return Blow(
            victim=victim.name,
            num_begun=num_begun,
            fates=count_fates(streams),
            errors=errors,
            answering_s=answering_s,
            whole_s=whole_s,
            longest_pause_s=max((stream.longest_pause_s for stream in exact), default=0.0),
        )

    async def _until_answered(self, prompt: Sequence[int], killed_s: float) -> float:
        """Seconds until a request that came after the kill was answered."""
        while True:
            stream = Stream(prompt=prompt, expected="")
            await self._probe.run(stream)
            elapsed_s = time.monotonic() - killed_s
            if stream.is_done and not stream.error:
                return elapsed_s
            if elapsed_s > self._config.limit_s:
                raise TimeoutError(f"no request was answered within {self._config.limit_s:g} s: {stream.error}")
            await asyncio.sleep(_LOOK_S)

    async def _until_replaced(self, victim: Victim, killed_s: float) -> float:
        while not await asyncio.to_thread(victim.is_replaced):
            if time.monotonic() - killed_s > self._config.limit_s:
                raise TimeoutError(f"{victim.name} was not replaced within {self._config.limit_s:g} s")
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - killed_s


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


def _prompts(config: SurvivalConfig, card: Mapping[str, Any]) -> list[list[int]]:
    draw = random.Random(config.seed)
    size = int(card["vocab_size"])
    first = min(FIRST_RANDOM_ID, size // 2)
    return [[draw.randrange(first, size) for _ in range(config.prompt_tokens)] for _ in range(config.num_prompts)]


def report_of(blows: Sequence[Blow]) -> Report:
    """The shared shape of benchmarks."""
    results = []
    for blow in blows:
        params = {"victim": blow.victim}
        results += [
            Result(name=f"streams_{fate}", params=params, unit="1", runs=[count]) for fate, count in blow.fates.items()
        ]
        results += [
            Result(name=name, params=params, unit="s", runs=[value])
            for name, value in (
                ("answering", blow.answering_s),
                ("whole", blow.whole_s),
                ("longest_pause", blow.longest_pause_s),
            )
        ]
    columns = (*(f"streams_{fate}" for fate in Fate), "answering", "whole", "longest_pause")
    return Report(command="bench survival", results=results, columns=columns)


def markdown_of(config: SurvivalConfig, blows: Sequence[Blow]) -> str:
    """The same as a page for docs/."""
    lines = [
        "| killed | streams | begun | exact | error | cut off | hung | wrong | answers again after | whole again after "
        "| longest pause of an exact stream |",
        "| --- |" + " --- |" * 10,
    ]
    for blow in blows:
        fates = " | ".join(str(blow.fates[fate]) for fate in Fate)
        lines.append(
            f"| {blow.victim} | {config.num_streams} | {blow.num_begun} | {fates} | {blow.answering_s:.1f} s "
            f"| {blow.whole_s:.1f} s | {blow.longest_pause_s:.1f} s |"
        )
    errors = [f"- {blow.victim}: {count} x `{error}`" for blow in blows for error, count in blow.errors.items()]
    return "\n".join([*lines, *(["", "Errors that clients saw:", "", *errors] if errors else []), ""])
