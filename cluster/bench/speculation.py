"""`bench speculation`: what drafts bring a request that runs alone, against the same deployment without them.

Both are asked in turn for the same answers, so that noise hits both; answers end where the model ends them, because
what it would write after its end is no text that anybody asks for. Talks HTTP only; the deployments are given.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import aiohttp

from blockferry.cluster.bench.drafts import ask_counts, draft_rows
from blockferry.cluster.bench.load import Answer, Endpoint, Prompt, ask, find_model
from blockferry.cluster.bench.report import ParamValue, Report, Result
from blockferry.cluster.deployment import Deployment
from blockferry.engine.config import InstanceConfig
from blockferry.engine.errors import ConfigError

logger = logging.getLogger(__name__)

PLAIN, DRAFTING = "plain", "drafting"
MAX_ROUNDS = 10_000
_REQUEST_TIMEOUT_S = 300.0
PROMPTS = (
    "What is the difference between a comet and an asteroid?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number, and explain each line.",
    "List five things to check before a long car journey, with a reason for each.",
    "Repeat this sentence three times, each on a line of its own: The ferry leaves at noon and comes back at dusk.",
    "Summarise in two sentences: Honey bees live in colonies of up to sixty thousand. A colony has one queen, who lays "
    "all of its eggs, some hundreds of drones, and workers, who clean, nurse, build, guard and at last forage. A "
    "forager that has found flowers tells the others by a dance, whose angle and length say where they are.",
    "Give me a recipe for vegetable soup for four people.",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationBenchConfig:
    """What to ask."""

    prompts: Sequence[str] = PROMPTS  # of a user, or text to continue where the model has no chat template
    output_len: int = 128  # tokens at most
    num_runs: int = 1  # of every prompt
    time_limit_s: float = 600.0  # no round starts after it

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.prompts:
            raise ValueError("there are no prompts; give at least one")
        for name, value, low in (("output_len", self.output_len, 2), ("num_runs", self.num_runs, 1)):
            if not low <= value <= MAX_ROUNDS:
                raise ValueError(f"{name}={value} is outside {low} .. {MAX_ROUNDS}; choose a value within")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt."""

    plain: Answer
    drafting: Answer

    @property
    def speed_up(self) -> float:
        """Of the tokens after the first."""
        return _tokens_per_s(self.drafting) / _tokens_per_s(self.plain)


OnRound = Callable[[int, int], None]


def speculation_deployments(drafting: Deployment) -> dict[str, Deployment]:
    """A deployment and the same without drafts, by the names of the results. Raises ConfigError."""
    config = drafting.config
    if config.instances[0].scheduler.speculation is None:
        raise ConfigError(
            "--config",
            f"{config.name!r} has no `speculation`, nothing is drafted; add that section, or use smollm2-mtp-cpu.yaml",
        )
    api = dataclasses.replace(config.api, host="127.0.0.1", port=0, keys=())
    found = {}
    for name, shapes in ((PLAIN, tuple(map(_without_drafts, config.instances))), (DRAFTING, config.instances)):
        changed = dataclasses.replace(config, name=f"bench-{name}-{os.getpid()}", instances=shapes, api=api)
        found[name] = dataclasses.replace(drafting, config=changed)
    return found


def _without_drafts(instance: InstanceConfig) -> InstanceConfig:
    return dataclasses.replace(instance, scheduler=dataclasses.replace(instance.scheduler, speculation=None))


async def run_speculation_bench(
    config: SpeculationBenchConfig, urls: Mapping[str, str], on_round: OnRound = lambda *_: None
) -> Report:
    """Ask the servers at urls[PLAIN] and urls[DRAFTING], which do not end in /v1, in turn.

    `on_round(number, total)` is called before each round; one before them is not counted. Raises ValueError when a
    request fails.
    """
    deadline_s = time.monotonic() + config.time_limit_s
    pairs: list[Pair] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)) as session:
        askers = {name: await _Asker.find(session, f"{url}/v1") for name, url in urls.items()}
        prompts = [await askers[PLAIN].encode(text, config.output_len) for text in config.prompts]
        await _ask_both(askers, prompts[0], (PLAIN, DRAFTING))
        before = await ask_counts(session, askers[DRAFTING].endpoint.url)
        total = config.num_runs * len(prompts)
        for number in range(total):
            if time.monotonic() > deadline_s:
                logger.warning("%d of %d rounds were not begun within %g s", total - number, total, config.time_limit_s)
                break
            on_round(number + 1, total)
            order = (PLAIN, DRAFTING) if number % 2 else (DRAFTING, PLAIN)
            pairs.append(await _ask_both(askers, prompts[number % len(prompts)], order))
        after = await ask_counts(session, askers[DRAFTING].endpoint.url)
    params: Mapping[str, ParamValue] = {"output_len": config.output_len}
    drafts = draft_rows(before, after, {"deployment": DRAFTING, **params})
    return Report(command="bench speculation", results=[*_rows(pairs, params), *drafts])


async def _ask_both(askers: Mapping[str, _Asker], prompt: Prompt, order: Sequence[str]) -> Pair:
    answers = {name: await askers[name].answer(prompt) for name in order}
    return Pair(plain=answers[PLAIN], drafting=answers[DRAFTING])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asker:
    """A server and how to ask it."""

    session: aiohttp.ClientSession
    endpoint: Endpoint

    @classmethod
    async def find(cls, session: aiohttp.ClientSession, url: str) -> _Asker:
        """Raises ValueError when it does not answer."""
        card = await find_model(session, url, "")
        return cls(session=session, endpoint=Endpoint(url=url, model=card["id"]))

    async def encode(self, text: str, num_output_tokens: int) -> Prompt:
        """As a user's message; as it is where the model has no chat template. Raises ValueError."""
        url = f"{self.endpoint.url.removesuffix('/v1')}/tokenize"
        for body in ({"messages": [{"role": "user", "content": text}]}, {"prompt": text}):
            async with self.session.post(url, json=body) as response:
                if response.status == 200:
                    token_ids: list[int] = (await response.json())["tokens"]
                    return Prompt(token_ids=token_ids, num_output_tokens=num_output_tokens, ignores_eos=False)
                reason = await response.text()
        raise ValueError(f"{url} does not tokenize a prompt: {reason[:300]}")

    async def answer(self, prompt: Prompt) -> Answer:
        """Raises ValueError when the request fails or has too few tokens to be timed."""
        answer = await ask(self.session, self.endpoint, prompt)
        if answer.error:
            raise ValueError(f"a request to {self.endpoint.url} failed: {answer.error}")
        if not answer.itl_s or answer.e2e_s <= answer.ttft_s:
            raise ValueError(f"an answer of {answer.num_output_tokens} tokens came at once; ask for longer ones")
        return answer


def _rows(pairs: Sequence[Pair], params: Mapping[str, ParamValue]) -> Iterator[Result]:
    for name in (PLAIN, DRAFTING):
        answers = [pair.plain if name == PLAIN else pair.drafting for pair in pairs]
        of = {"deployment": name, **params}
        yield Result(name="decode_rate", params=of, unit="tok/s", runs=[_tokens_per_s(one) for one in answers])
        yield Result(name="ttft", params=of, unit="ms", runs=[one.ttft_s * 1e3 for one in answers])
        yield Result(
            name="output_tokens", params=of, unit="tok", runs=[float(one.num_output_tokens) for one in answers]
        )
    of = {"deployment": DRAFTING, **params}
    yield Result(name="speed_up", params=of, unit="1", runs=[pair.speed_up for pair in pairs])
    if pairs:
        plain, drafting = (
            _tokens_per_s(*answers) for answers in zip(*((p.plain, p.drafting) for p in pairs), strict=True)
        )
        yield Result(name="overall_speed_up", params=of, unit="1", runs=[drafting / plain])
    unequal = sum(pair.plain.text != pair.drafting.text for pair in pairs)
    yield Result(name="unequal_answers", params=of, unit="1", runs=[float(unequal)])


def _tokens_per_s(*answers: Answer) -> float:
    """Tokens after the first of all of them, per second of theirs."""
    return sum(one.num_output_tokens - 1 for one in answers) / sum(one.e2e_s - one.ttft_s for one in answers)
