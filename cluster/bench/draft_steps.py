"""`bench draft-steps`: what a request alone gains by drafts, who drafts and how many, and where its steps' time goes.

In one process, without Ray or HTTP, so that little else is measured. All ways to draft take turns at every prompt, the
one without drafts among them, so that noise hits all; answers end where the model ends them. A run is one round over
all prompts: its tokens together over its time. Besides those who draft there is an oracle: it knows the answer and puts
it, wrong with a given probability, in the place of what was proposed at full cost. It shows what a better head would
bring.

    rate              of the tokens after the first
    ratio             of rate, to that without drafts in the same round
    tokens            of a step: accepted drafts and one
    step              ms
    forward, sampling, drafting, control     ms of a step; control is the scheduler and the wire
    held_1, ...       share of the drafts verified at that position that were accepted
    unequal           answers that are not those without drafts
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from blockferry.cluster.api.errors import ApiError
from blockferry.cluster.api.prompts import from_messages, from_text
from blockferry.cluster.api.schemas import ChatMessage
from blockferry.cluster.api.served_model import ServedModel
from blockferry.cluster.bench.draft_ways import Oracle, drafting_by, name_of
from blockferry.cluster.bench.local_instance import Decoded, LocalInstance, Redraft, as_proposed
from blockferry.cluster.bench.report import ParamValue, Report, Result
from blockferry.cluster.bench.speculation import PROMPTS
from blockferry.cluster.deployment import Deployment
from blockferry.engine.config import SpeculationConfig
from blockferry.engine.request import Int32Array, SamplingParams
from blockferry.engine.worker.step_clock import StepPart

OFF, CONTROL = "off", "control"
COLUMNS = ("rate", "ratio", "tokens", "step", *StepPart, CONTROL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftStepsConfig:
    """What to measure."""

    ways: Sequence[SpeculationConfig]
    oracle_shares: Sequence[float] = ()  # of drafts that are right, at any position; at the cost of the last source
    prompts: Sequence[str] = PROMPTS
    output_len: int = 96  # tokens at most
    num_runs: int = 3  # rounds over all prompts
    temperature: float = 0.0
    seed: int = 0
    is_cpu_time: bool = False  # of this process, which others disturb less; means something with one thread only

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.prompts or not self.ways:
            raise ValueError("there are no prompts, or no ways to draft; give at least one of each")
        wrong = [share for share in self.oracle_shares if not 0 <= share <= 1]
        if wrong:
            raise ValueError(f"an oracle that is right with probability {wrong[0]} cannot be; use 0 .. 1")


OnRound = Callable[[int, int], None]


def run_draft_steps_bench(
    deployment: Deployment, config: DraftStepsConfig, on_round: OnRound = lambda *_: None
) -> Report:
    """Measure a deployment of one instance, whose weights are loaded once for every way; its own `speculation` is not.

    on_round(number, total) is called before each prompt; the first one warms up. Raises ValueError, ConfigError,
    ModelLoadError.
    """
    model = ServedModel.load(deployment.config.model)
    prompts = _encode(model, config.prompts)
    off, cases = _make_cases(deployment, config)
    total = config.num_runs * len(prompts)
    for number in range(total + 1):
        on_round(number, total)
        sampling = SamplingParams(
            temperature=config.temperature,
            seed=config.seed + number,
            max_tokens=config.output_len,
            stop_token_ids=model.eos_token_ids,
        )
        prompt = prompts[number % len(prompts)]
        plain = off.decode(prompt, sampling)
        for case in cases[::1] if number % 2 else cases[::-1]:
            case.decode(prompt, sampling, plain.token_ids)
    shared = {"output_len": config.output_len, "temperature": config.temperature}
    results = [result for case in (off, *cases) for result in case.results(off, shared, len(prompts))]
    most = max(way.num_tokens for way in config.ways)
    return Report(command="bench draft-steps", results=results, columns=(*COLUMNS, *map(_held, range(most))))


def _encode(model: ServedModel, texts: Sequence[str]) -> list[Int32Array]:
    """As a user's message; as it is where the model has no chat template. Raises ValueError."""

    async def encode(text: str) -> Int32Array:
        if model.tokenizer.chat_template is None:
            return (await from_text(text, model, add_special_tokens=True)).token_ids
        prompt = await from_messages(
            [ChatMessage(role="user", content=text)],
            model,
            add_generation_prompt=True,
            continue_final_message=False,
            add_special_tokens=False,  # the template writes them
            variables=None,
        )
        return prompt.token_ids

    try:
        return [asyncio.run(encode(text)) for text in texts]
    except ApiError as error:
        raise ValueError(str(error)) from None


def _make_cases(deployment: Deployment, config: DraftStepsConfig) -> tuple[_Case, list[_Case]]:
    """The way without drafts, and all others."""
    clock = time.process_time if config.is_cpu_time else time.perf_counter
    off = _Case({"method": OFF}, LocalInstance(drafting_by(deployment, None), clock))
    cases = []
    for way in config.ways:
        instance = LocalInstance(drafting_by(deployment, way), clock)
        params: Mapping[str, ParamValue] = {"drafts": way.num_tokens, "adaptive": way.is_adaptive}
        cases.append(_Case({"method": name_of(way), **params}, instance))
        if name_of(way) == name_of(config.ways[-1]):
            cases += [_Case({"method": f"{share:g}", **params}, instance, share) for share in config.oracle_shares]
    return off, cases


class _Case:
    """One way to draft, and what was measured of it."""

    def __init__(
        self, params: Mapping[str, ParamValue], instance: LocalInstance, oracle_share: float | None = None
    ) -> None:
        self._params = params
        self._instance = instance
        self._oracle_share = oracle_share
        self._decoded: list[Decoded] = []

    def decode(self, prompt: Int32Array, sampling: SamplingParams, answer: Sequence[int] = ()) -> Decoded:
        """Answer a prompt whose answer is known to an oracle. Raises ValueError where there is nothing to time."""
        redraft: Redraft = as_proposed
        if self._oracle_share is not None:
            redraft = Oracle(self._oracle_share, prompt, answer)
        decoded = self._instance.decode(prompt, sampling, redraft)
        if not decoded.num_steps:
            raise ValueError(f"a prompt of {len(prompt)} tokens was answered in one step; use another prompt")
        self._decoded.append(decoded)
        return decoded

    def results(self, off: _Case, shared: Mapping[str, ParamValue], num_prompts: int) -> list[Result]:
        """Everything measured but the first answer; ratios to the way without drafts."""
        decoded, plain = self._decoded[1:], off._decoded[1:]
        rounds, others = (_rounds(answers, num_prompts) for answers in (decoded, plain))
        rows = {
            "rate": ("tok/s", [one.rate for one in rounds]),
            "ratio": ("1", [one.rate / other.rate for one, other in zip(rounds, others, strict=True)]),
            "tokens": ("1", [one.num_tokens / one.num_steps for one in rounds]),
            "step": ("ms", [1e3 * one.total_s / one.num_steps for one in rounds]),
        }
        for part in StepPart:
            rows[part.value] = ("ms", [1e3 * one.part_s[part] / one.num_steps for one in rounds])
        rows[CONTROL] = ("ms", [1e3 * (one.total_s - sum(one.part_s.values())) / one.num_steps for one in rounds])
        for place in range(len(decoded[0].drafted)):
            drafted, accepted = (
                int(sum(counts)) for counts in zip(*((d.drafted[place], d.accepted[place]) for d in decoded))
            )
            if drafted:
                rows[_held(place)] = ("1", [accepted / drafted])
        unequal = sum(one.token_ids != other.token_ids for one, other in zip(decoded, plain, strict=True))
        rows["unequal"] = ("1", [float(unequal)])
        params = {**self._params, **shared}
        return [Result(name=name, params=params, unit=unit, runs=runs) for name, (unit, runs) in rows.items()]


def _held(place: int) -> str:
    return f"held_{place + 1}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Every prompt answered once, added up."""

    num_tokens: int
    num_steps: int
    total_s: float
    part_s: Mapping[StepPart, float]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.total_s


def _rounds(decoded: Sequence[Decoded], num_prompts: int) -> list[_Round]:
    return [_added_up(decoded[first : first + num_prompts]) for first in range(0, len(decoded), num_prompts)]


def _added_up(answers: Sequence[Decoded]) -> _Round:
    return _Round(
        num_tokens=sum(one.num_timed_tokens for one in answers),
        num_steps=sum(one.num_steps for one in answers),
        total_s=sum(one.total_s for one in answers),
        part_s={part: sum(one.part_s[part] for one in answers) for part in StepPart},
    )
