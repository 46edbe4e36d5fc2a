"""The table of families and what the parity suite has shown of each: cells are recorded by tests that passed.

`pytest --parity-table FILE` writes it; without the option nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

RecordCell = Callable[[str, str], None]
"""(family, feature): shown by a test that has come to its end."""

PROPERTY = "parity cell"
FEATURES = (
    "cold and warm cache",
    "chunked prompts",
    "preemption",
    "uniform plan",
    "slab plan",
    "layers outermost",
    "part evicted",
    "TP 2",
    "PP 2",
    "P/D push",
    "P/D pull",
)
MISSING = "**missing**"


def write_table(file: Path, cells: Iterable[tuple[str, str]], families: Iterable[str]) -> None:
    """A Markdown table of all families and features; what no test has shown says so."""
    shown = set(cells)
    lines = ["| family | " + " | ".join(FEATURES) + " |", "| --- |" + " --- |" * len(FEATURES)]
    for family in families:
        marks = ["yes" if (family, feature) in shown else MISSING for feature in FEATURES]
        lines.append(f"| {family} | " + " | ".join(marks) + " |")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
