"""Covering arrays: few rows in which every choice of values for any few factors occurs.

A greedy construction in the manner of Cohen, Dalal, Fredman and Patton, "The AETG system" (1997), over a list of all
rows that are possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, object]


def cover(
    factors: Mapping[str, Sequence[object]], *, strength: int = 2, is_possible: Callable[[Row], bool] = lambda _: True
) -> list[Row]:
    """Rows that hold every combination of `strength` factors' values that a possible row holds; the same every time."""
    names = list(factors)
    rows = [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    rows = [row for row in rows if is_possible(row)]
    combinations = [frozenset(_combinations(row, strength)) for row in rows]
    missing = set().union(*combinations)
    chosen: list[Row] = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(combinations[index] & missing))
        missing -= combinations[best]
        chosen.append(rows[best])
    return chosen


def _combinations(row: Row, strength: int) -> list[tuple[tuple[str, object], ...]]:
    return list(itertools.combinations(row.items(), strength))
