"""How far a launch is: a value and the callback that takes it. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`done` of `total` ranks, or units of work, have finished the phase."""

    phase: str
    done: int
    total: int
    note: str = ""  # how well it goes


Report = Callable[[Progress], None]
