"""How long the parts of steps take, summed up over steps. Owns the sums; reads a clock, a few times a step."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping


class StepPart(enum.StrEnum):
    """What a rank does in a step, in this order."""

    FORWARD = "forward"  # rows and inputs brought up to date, layers
    SAMPLING = "sampling"  # language-model head, draws, comparison with drafts
    DRAFTING = "drafting"  # proposals for the next step


class StepClock:
    """Called by the worker's model thread; others may read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._since_s = 0.0
        self._seconds = dict.fromkeys(StepPart, 0.0)

    def begin(self) -> None:
        """A step begins."""
        self._since_s = self._clock()

    def end(self, part: StepPart) -> None:
        """A part is over, and the next one begins."""
        now_s = self._clock()
        self._seconds[part] += now_s - self._since_s
        self._since_s = now_s

    def seconds(self) -> Mapping[StepPart, float]:
        """Of every part since the last reset; a copy."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Begin to sum anew."""
        self._seconds = dict.fromkeys(StepPart, 0.0)
