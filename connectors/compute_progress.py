"""How far this rank's model thread is: which layers of which step are computed, for transfers that wait for them.

Written by the model thread, read by the transfer thread, which may ask to be woken. Knows step numbers and layer ids
only. Every read and write is one assignment, which needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ALL_LAYERS = 1 << 30


class StepMark(NamedTuple):
    """A layer of a step; marks compare in the order in which they are computed."""

    step_id: int
    layer_id: int


_NOTHING = StepMark(-1, ALL_LAYERS)


class ComputeProgress:
    """A mark that the model thread moves."""

    def __init__(self) -> None:
        self._reached = _NOTHING
        self._awaited: StepMark | None = None
        self._wake: Callable[[], None] = _nobody

    # --- the model thread

    def reach(self, step_id: int, layer_id: int = ALL_LAYERS) -> None:
        """Layers up to layer_id are computed and their caches written; without one, the whole step."""
        self._reached = StepMark(step_id, layer_id)
        awaited = self._awaited
        if awaited is not None and awaited <= self._reached:
            self._wake()

    def reset(self) -> None:
        """Steps are numbered anew. While none is computed, and no transfer waits for one."""
        self._reached = _NOTHING

    # --- the transfer thread

    def has_reached(self, mark: StepMark) -> bool:
        """Whether a layer of a step is computed."""
        return mark <= self._reached

    def await_mark(self, mark: StepMark | None, wake: Callable[[], None]) -> None:
        """Have wake() called from when on the mark is reached; None: not any more. Ask has_reached() after this."""
        self._wake = wake
        self._awaited = mark


def _nobody() -> None:
    pass
