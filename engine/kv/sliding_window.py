"""Sliding-window attention: the next token reads the last `window` tokens, itself included."""

from __future__ import annotations

import dataclasses

import numpy as np

from blockferry.engine.kv.hit_rules import Count, Presence, Retention
from blockferry.engine.kv.reach import WindowReach, cdiv
from blockferry.engine.request import BoolArray, Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """The HitRule of a window: a hit needs the blocks that hold the window - 1 tokens before its end.

    columns:    null | null | block | block |  <- next token
                                            ^ end of the hit
    A window of one token needs none.
    """

    reach: WindowReach

    @property
    def drops_blocks(self) -> bool:
        """Blocks fall out of reach."""
        return True

    @property
    def resumes_inside(self) -> bool:
        """Hits are whole blocks."""
        return False

    def needs_blocks(self, tokens_per_block: int) -> bool:
        """Whether any block is ever needed."""
        return self._num_needed(tokens_per_block) > 0

    def can_end(self, presence: Presence, lengths: Int32Array) -> BoolArray:
        """Where enough blocks without a gap, or all from the head on, come before the end (and a draft's after it)."""
        num_draft_blocks = cdiv(presence.num_draft_tokens, presence.tokens_per_block)
        ends = lengths // presence.tokens_per_block
        needed = np.minimum(self._num_needed(presence.tokens_per_block), ends) + num_draft_blocks
        can_end = presence.has_runs(ends + num_draft_blocks, needed)
        can_end[0] = True
        return can_end

    def first_column(self, num_tokens: int, tokens_per_block: int) -> int:
        """Columns before the window are null."""
        return max(0, num_tokens // tokens_per_block - self._num_needed(tokens_per_block))

    def tail_length(self, presence: Presence, num_tokens: int) -> int:
        """Hits of a window are whole blocks."""
        raise AssertionError((presence.tokens_per_block, num_tokens))

    def num_skipped(self, num_computed: Count) -> Count:
        """Tokens below the window."""
        return num_computed - self.reach.num_retained_tokens

    def first_skippable(self, num_prompt_tokens: int, tokens_per_block: int) -> int:
        """The first column on."""
        del num_prompt_tokens, tokens_per_block
        return 0

    def kept_columns(
        self, columns: Int32Array, boundaries: Int32Array, *, tokens_per_block: int, retention: Retention
    ) -> BoolArray | None:
        """The blocks of a window before each length that hits will have."""
        num_draft_blocks = int(retention.has_draft)
        needed = self._num_needed(tokens_per_block) + num_draft_blocks
        segment = retention.alignment if retention.interval is None else retention.interval
        per_segment = segment // tokens_per_block
        kept = np.zeros(len(columns), np.bool_)
        if per_segment:
            if needed >= per_segment:
                return None
            from_start = columns - num_draft_blocks
            kept |= (from_start >= 0) & (from_start % per_segment >= per_segment - needed)
        if retention.interval is not None:
            ends = boundaries // retention.alignment * retention.alignment // tokens_per_block + num_draft_blocks
            within = (columns[:, None] >= ends - needed) & (columns[:, None] < ends) & (boundaries > 0)
            kept |= within.any(axis=1)
        return kept

    def _num_needed(self, tokens_per_block: int) -> int:
        return cdiv(self.reach.window - 1, tokens_per_block)
