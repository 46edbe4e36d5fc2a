"""The combinations in which every family must give transformers' tokens, and what is asked in each.

Prompts are longer than windows and chunks; the second round finds the first one's prefixes.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from support.covering import Row, cover
from support.local_engine import EngineOptions, LocalEngine, OracleExecutor
from support.tiny_families import FAMILIES, make_prompt, reference_tokens

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.plan import Planner

NAMES = tuple(name for name, family in FAMILIES.items() if not family.has_encoder)
_SHARED_PREFIX = 40
FACTORS: dict[str, tuple[object, ...]] = {
    "family": NAMES,
    "layout": ("BHLNC", "BLHNC", "LBHNC", "LBNHC"),
    "planner": (None, Planner.UNIFORM, Planner.SLAB),
    "block_size": (None, 8, 32),
    "chunk": (128, 17, 48),
    "pressure": ("none", "preempts"),
    "caching": (True, False),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """One combination."""

    family: str
    options: EngineOptions
    preempts: bool

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return GROWING if self.preempts else WORKLOAD

    @property
    def name(self) -> str:
        options = self.options
        parts = [self.family, options.layout, options.planner or "auto", f"b{options.block_size or 0}"]
        parts += [f"chunk{options.max_num_batched_tokens}", "tight" if self.preempts else "ample"]
        return "-".join([*parts, "cached" if options.enable_caching else "uncached"])


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that arrive together, and how far each is continued."""

    prompts: tuple[tuple[int, ...], ...]
    num_output: int

    def expected(self, path: Path) -> list[list[int]]:
        """transformers' continuation of every prompt."""
        return _expected(path, self)

    def sequences(self, path: Path) -> list[list[int]]:
        """Prompts with their continuations."""
        return [[*prompt, *output] for prompt, output in zip(self.prompts, self.expected(path), strict=True)]


def _make_workload() -> Workload:
    """Four prompts, of which two begin alike."""
    made = [make_prompt(seed, length) for seed, length in enumerate((5, 70, 33, 100))]
    made[-1][:_SHARED_PREFIX] = made[1][:_SHARED_PREFIX]
    return Workload(tuple(map(tuple, made)), 20)


WORKLOAD = _make_workload()
GROWING = Workload(tuple(tuple(make_prompt(50 + seed, 10 + seed)) for seed in range(8)), 60)
"""Sequences that outgrow by far what they are admitted with."""


@functools.cache
def _expected(path: Path, workload: Workload) -> list[list[int]]:
    return [reference_tokens(path, prompt, workload.num_output) for prompt in workload.prompts]


def cases(*, strength: int) -> list[ParityCase]:
    """A covering array over all families; combinations that a planner refuses by name are left out."""
    return [_case(row) for row in cover(FACTORS, strength=strength, is_possible=_is_possible)]


def _case(row: Row) -> ParityCase:
    preempts = row["pressure"] == "preempts"
    options = EngineOptions(
        layout=str(row["layout"]),
        planner=row["planner"],  # type: ignore[arg-type]  # a Planner or None by FACTORS
        block_size=row["block_size"],  # type: ignore[arg-type]  # an int or None by FACTORS
        max_num_batched_tokens=row["chunk"],  # type: ignore[arg-type]  # an int by FACTORS
        enable_caching=bool(row["caching"]),
        max_model_len=128,
    )
    return ParityCase(family=str(row["family"]), options=options, preempts=preempts)


def _is_possible(row: Row) -> bool:
    return _is_plannable(str(row["family"]), str(row["layout"]), row["planner"], row["block_size"])  # type: ignore[arg-type]  # by FACTORS


@functools.cache
def _is_plannable(family: str, layout: str, planner: Planner | None, block_size: int | None) -> bool:
    options = EngineOptions(layout=layout, planner=planner, block_size=block_size, max_model_len=128)
    try:
        options.plan_values(FAMILIES[family].make_config().to_dict())
    except ConfigError:
        return False
    return True


def preempting_pool(options: EngineOptions, path: Path) -> EngineOptions:
    """The same with a pool in which sequences outgrow what they were admitted with, if there is such a pool."""
    sequences = GROWING.sequences(path)
    least = smallest_pool(options, path)
    for percent in range(100, 260, 20):
        tight = dataclasses.replace(least, memory_bytes=least.memory_bytes * percent // 100)
        engine = LocalEngine(path, tight, OracleExecutor(sequences))
        engine.generate(GROWING.prompts, GROWING.num_output)
        if engine.instance.num_preemptions:
            return tight
    return least


def smallest_pool(options: EngineOptions, path: Path) -> EngineOptions:
    """The same with a pool that holds one sequence of max_model_len and hardly more."""
    low, high = 0, options.memory_bytes
    while high - low > max(64, high // 50):
        middle = (low + high) // 2
        if _holds_one(dataclasses.replace(options, memory_bytes=middle), path):
            high = middle
        else:
            low = middle
    return dataclasses.replace(options, memory_bytes=high)


def _holds_one(options: EngineOptions, path: Path) -> bool:
    try:
        return options.plan(path).longest == options.max_model_len
    except ConfigError:
        return False
