"""The table of families and what the parity suite has shown of each: cells are recorded by tests that passed.

`pytest --parity-table FILE` writes it between two marks in a Markdown file; without the option nothing is kept.
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
    "P/D unequal sides",
    "offload",
    "drafts",
)
MISSING = "**missing**"
BEGIN, END = "<!-- parity table -->", "<!-- end of parity table -->"


def write_table(file: Path, cells: Iterable[tuple[str, str]], families: Iterable[str]) -> None:
    """Put a table of all families and features in place of what lies between the file's marks.

    What no test has shown says so. Raises ValueError for a file without the marks.
    """
    shown = set(cells)
    lines = ["| family | " + " | ".join(FEATURES) + " |", "| --- |" + " --- |" * len(FEATURES)]
    for family in families:
        marks = ["yes" if (family, feature) in shown else MISSING for feature in FEATURES]
        lines.append(f"| {family} | " + " | ".join(marks) + " |")
    text = file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{file} has no lines {BEGIN} and {END} for the table to stand between; add them")
    file.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")
