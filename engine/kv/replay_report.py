"""What a replay of recorded cases found, in the shape that `blockferry kv replay --json` prints.

Values only; replay_planning.py and the replay of traces make them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """One case. mismatch says in full what is here and what was recorded; None where all agrees."""

    family: str
    mismatch: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCount:
    """How many cases of a family there are, and how many agree."""

    cases: int
    matched: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """A whole file's. Families are in the order of their first case."""

    file: str
    level: str  # "contract" or "strict"
    families: Mapping[str, FamilyCount]
    first_mismatch: str | None
    note: str | None = None  # on what the level means for this file

    @property
    def cases(self) -> int:
        """Cases of all families."""
        return sum(count.cases for count in self.families.values())

    @property
    def matched(self) -> int:
        """Those that agree."""
        return sum(count.matched for count in self.families.values())

    def as_json(self) -> dict[str, object]:
        """The document of `kv replay --json`."""
        return {
            "file": self.file,
            "level": self.level,
            "note": self.note,
            "cases": self.cases,
            "matched": self.matched,
            "families": {name: dataclasses.asdict(count) for name, count in self.families.items()},
            "first_mismatch": self.first_mismatch,
        }


def summarize(outcomes: Iterable[CaseOutcome], *, file: str, level: str, note: str | None = None) -> ReplayReport:
    """Count outcomes per family, and keep the first mismatch."""
    results: dict[str, list[bool]] = {}
    first_mismatch = None
    for outcome in outcomes:
        results.setdefault(outcome.family, []).append(outcome.mismatch is None)
        first_mismatch = first_mismatch or outcome.mismatch
    return ReplayReport(
        file=file,
        level=level,
        families={name: FamilyCount(cases=len(hits), matched=sum(hits)) for name, hits in results.items()},
        first_mismatch=first_mismatch,
        note=note,
    )
