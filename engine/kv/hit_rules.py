"""What a cache type must find to resume a sequence, and what it may drop: the seam that each type's file implements.

Pure functions of which blocks are present and of counters; owns no state.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeVar

import numpy as np

from blockferry.engine.request import BoolArray, Int32Array

Count = TypeVar("Count", int, Int32Array)
"""One count, or an array of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What the prefix cache holds of one sequence for groups that are always asked together.

    A block is present when every group of them holds it.
    """

    blocks: BoolArray  # [N]: whole block n is present
    tails: Int32Array  # [T] ascending: lengths that end inside a block and are present, tokens
    tokens_per_block: int
    num_draft_tokens: int  # past the end of a hit, present but to be computed again; 0 unless a draft group

    def has_runs(self, stops: Int32Array, counts: Int32Array) -> BoolArray:
        """Whether blocks [stop - count, stop) are all present, for each of stops [K] and counts [K]; shape [K]."""
        runs = np.zeros(len(self.blocks) + 1, np.int32)  # per stop, how many blocks before it have no gap
        ends = np.arange(1, len(self.blocks) + 1, dtype=np.int32)
        runs[1:] = ends - np.maximum.accumulate(np.where(self.blocks, 0, ends))
        is_known = stops <= len(self.blocks)
        has_runs: BoolArray = is_known & (runs[np.where(is_known, stops, 0)] >= counts)
        return has_runs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which hits of a sparse type will be asked for, and so what is worth caching. Lengths in tokens."""

    alignment: int  # hits have multiples of it
    interval: int | None  # None: every aligned length; n > 0: multiples of n; 0: none but the boundaries
    has_draft: bool  # a hit needs one block past its end


class HitRule(Protocol):
    """One cache type's answer to "what must be there, and what may go"."""

    @property
    def drops_blocks(self) -> bool:
        """Whether blocks ever fall out of reach or are not worth caching."""

    @property
    def resumes_inside(self) -> bool:
        """Whether a hit may end inside a block."""

    def needs_blocks(self, tokens_per_block: int) -> bool:
        """Whether a hit of the type ever needs a block; if not, the type is not asked."""

    def can_end(self, presence: Presence, lengths: Int32Array) -> BoolArray:
        """Whether a hit may have each of lengths [K] (ascending from 0, multiples of the alignment); shape [K]."""

    def first_column(self, num_tokens: int, tokens_per_block: int) -> int:
        """First column that a hit of num_tokens brings a block for; null before it."""

    def tail_length(self, presence: Presence, num_tokens: int) -> int:
        """Length under which the block is found that a hit of num_tokens, not whole blocks, ends in."""

    def num_skipped(self, num_computed: Count) -> Count:
        """Tokens before which none after num_computed ever reads; may be negative."""

    def first_skippable(self, num_prompt_tokens: int, tokens_per_block: int) -> int:
        """First column that may ever go; 0 but where the prompt is kept."""

    def kept_columns(
        self, columns: Int32Array, boundaries: Int32Array, *, tokens_per_block: int, retention: Retention
    ) -> BoolArray | None:
        """Which of columns [C] can ever serve a hit; None: all. boundaries [C, B]: lengths always kept, 0 for none."""
