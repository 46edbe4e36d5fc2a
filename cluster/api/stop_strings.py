r"""Stop strings over a stream of text pieces that break anywhere.

    text so far   "...the answer\nUs"      stop "\nUser:"
    released      "...the answer"          nothing from which a stop string could still grow is let go
    held back                   "\nUs"     released later, or dropped when the stop completes

The result depends on the characters only, never on how they were cut into pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """Text that may be shown after a piece, and the stop string that it completed, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back the tail of one sequence's text that may turn out to be a stop string.

    The stop string that completes first ends the text; of two that complete with the same character the
    longer one does, so that the shorter text is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> StopMatch:
        """Add a piece of text; returns what may be shown now. Cost is linear in piece and held text."""
        if not self._stops:
            return StopMatch(text=piece)
        text = self._held + piece
        best_end = best_start = len(text) + 1
        best: str | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if (end, start) < (best_end, best_start):
                best_end, best_start, best = end, start, stop
        if best is not None:
            self._held = ""
            return StopMatch(text=text[:best_start], stop=best)
        cut = len(text) - self._held_length(text)
        self._held = text[cut:]
        return StopMatch(text=text[:cut])

    def flush(self) -> str:
        """The text still held back, when the sequence ended without a stop string."""
        text, self._held = self._held, ""
        return text

    def _held_length(self, text: str) -> int:
        """Length of the longest tail of `text` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
