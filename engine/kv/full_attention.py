"""Full attention: every token of a sequence is read as long as the sequence lives."""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.hit_rules import Count, Presence, Retention
from blockferry.engine.request import BoolArray, Int32Array


class FullRule:
    """The HitRule of full attention: a hit needs every block from the head on, so any prefix of a hit is one."""

    @property
    def drops_blocks(self) -> bool:
        """None ever."""
        return False

    @property
    def resumes_inside(self) -> bool:
        """A block serves any head of its tokens."""
        return True

    def needs_blocks(self, tokens_per_block: int) -> bool:
        """Always."""
        del tokens_per_block
        return True

    def can_end(self, presence: Presence, lengths: Int32Array) -> BoolArray:
        """Lengths up to the longest, less what a draft computes again."""
        can_end: BoolArray = lengths <= _longest(presence) - presence.num_draft_tokens
        can_end[0] = True
        return can_end

    def first_column(self, num_tokens: int, tokens_per_block: int) -> int:
        """All columns hold blocks."""
        del num_tokens, tokens_per_block
        return 0

    def tail_length(self, presence: Presence, num_tokens: int) -> int:
        """A block holds all tokens of its tail, so it serves any shorter length too: the longest tail is taken."""
        column = num_tokens // presence.tokens_per_block
        if column < _num_leading(presence.blocks):
            return (column + 1) * presence.tokens_per_block
        return _longest(presence)

    def num_skipped(self, num_computed: Count) -> Count:
        """Nothing goes."""
        return num_computed * 0

    def first_skippable(self, num_prompt_tokens: int, tokens_per_block: int) -> int:
        """The first column on."""
        del num_prompt_tokens, tokens_per_block
        return 0

    def kept_columns(
        self, columns: Int32Array, boundaries: Int32Array, *, tokens_per_block: int, retention: Retention
    ) -> None:
        """Everything is kept."""
        del columns, boundaries, tokens_per_block, retention


def _num_leading(blocks: BoolArray) -> int:
    return len(blocks) if blocks.all() else int(np.argmin(blocks))


def _longest(presence: Presence) -> int:
    whole = _num_leading(presence.blocks) * presence.tokens_per_block
    inside = presence.tails[(presence.tails > whole) & (presence.tails < whole + presence.tokens_per_block)]
    return int(inside[-1]) if len(inside) else whole
