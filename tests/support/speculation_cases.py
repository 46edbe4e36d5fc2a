"""The combinations in which every family must answer with drafts as it does without, and who drafts in them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from support.covering import Row, cover
from support.known_drafts import KnownDrafts
from support.local_engine import EngineOptions
from support.parity_cases import GROWING, NAMES, WORKLOAD, Workload, preempting_pool

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.kv.plan import Planner
from blockferry.engine.worker.proposers import make_proposer
from blockferry.engine.worker.worker import MakeProposer

MARKS = (True, True, False, True, True, True, True, False, False)  # which drafts of known sequences are right
FACTORS: dict[str, tuple[object, ...]] = {
    "family": NAMES,
    "drafts": ("known", "ngram"),
    "num_tokens": (3, 1, 5),
    "is_adaptive": (True, False),
    "planner": (None, Planner.UNIFORM, Planner.SLAB),
    "chunk": (48, 17, 128),
    "pressure": ("none", "preempts"),
    "caching": (True, False),
}


def ngram(num_tokens: int = 3, *, is_adaptive: bool = False) -> SpeculationConfig:
    """Drafts from single tokens that recur, of which there are many and few are right."""
    return SpeculationConfig(
        method=DraftMethod.NGRAM, num_tokens=num_tokens, min_ngram=1, max_ngram=3, is_adaptive=is_adaptive
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCase:
    """One combination."""

    family: str
    options: EngineOptions
    drafts: str  # known: by MARKS; ngram
    preempts: bool

    @property
    def name(self) -> str:
        options, speculation = self.options, self.options.speculation
        assert speculation is not None
        parts = [self.family, self.drafts + str(speculation.num_tokens), "adaptive" if speculation.is_adaptive else ""]
        parts += [options.planner or "auto", f"chunk{options.max_num_batched_tokens}"]
        parts += ["tight" if self.preempts else "ample", "cached" if options.enable_caching else "uncached"]
        return "-".join(part for part in parts if part)

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return GROWING if self.preempts else WORKLOAD

    def sized(self, path: Path) -> EngineOptions:
        """The options, with the pool that the case wants."""
        return preempting_pool(self.options, path) if self.preempts else self.options

    def proposer(self, path: Path) -> MakeProposer:
        """Who drafts."""
        return KnownDrafts(self.workload.sequences(path), MARKS).of if self.drafts == "known" else make_proposer


def quick_cases() -> list[SpeculationCase]:
    """Every family with drafts of which most are right; and a few that are preempted."""
    common = {"drafts": "known", "num_tokens": 3, "planner": None}
    ample = [{name: values[index % len(values)] for name, values in FACTORS.items()} for index in range(len(NAMES))]
    tight = {"pressure": "preempts", "chunk": 48, "is_adaptive": True, "caching": True}
    made = [_case({**row, **common, "pressure": "none"}) for row in ample]
    return made + [_case({**common, **tight, "family": name}) for name in ("llama", "gemma2", "lfm2")]


@functools.cache
def all_cases() -> list[SpeculationCase]:
    """A covering array: every pair of choices."""
    return [_case(row) for row in cover(FACTORS)]


def _case(row: Row) -> SpeculationCase:
    options = EngineOptions(
        planner=row["planner"],  # type: ignore[arg-type]  # a Planner or None by FACTORS
        max_num_batched_tokens=row["chunk"],  # type: ignore[arg-type]  # an int by FACTORS
        enable_caching=bool(row["caching"]),
        max_model_len=128,
        speculation=ngram(row["num_tokens"], is_adaptive=bool(row["is_adaptive"])),  # type: ignore[arg-type]  # an int
    )
    return SpeculationCase(
        family=str(row["family"]),
        options=options,
        drafts=str(row["drafts"]),
        preempts=row["pressure"] == "preempts",
    )
