"""Chunked local attention: a token reads the tokens of its own chunk before it."""

from __future__ import annotations

import dataclasses

from blockferry.engine.kv.hit_rules import Count, Presence, Retention
from blockferry.engine.kv.reach import ChunkReach, cdiv
from blockferry.engine.request import BoolArray, Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """The HitRule of chunks: a hit needs the blocks from the start of the chunk that the next token is in.

    At the end of a chunk nothing is needed, so that such a length is always a hit, were there no other groups.
    """

    reach: ChunkReach

    @property
    def drops_blocks(self) -> bool:
        """Blocks fall out of reach."""
        return True

    @property
    def resumes_inside(self) -> bool:
        """Hits are whole blocks."""
        return False

    def needs_blocks(self, tokens_per_block: int) -> bool:
        """Always."""
        del tokens_per_block
        return True

    def can_end(self, presence: Presence, lengths: Int32Array) -> BoolArray:
        """Where all blocks since the chunk's start (and a draft's after the end) are present."""
        num_draft_blocks = cdiv(presence.num_draft_tokens, presence.tokens_per_block)
        ends = lengths // presence.tokens_per_block
        starts = self.num_skipped(lengths) // presence.tokens_per_block
        last = ends + num_draft_blocks
        can_end = presence.has_runs(last, last - starts)
        can_end[0] = True
        return can_end

    def first_column(self, num_tokens: int, tokens_per_block: int) -> int:
        """Columns of earlier chunks are null."""
        return self.num_skipped(num_tokens) // tokens_per_block

    def tail_length(self, presence: Presence, num_tokens: int) -> int:
        """Hits of chunks are whole blocks."""
        raise AssertionError((presence.tokens_per_block, num_tokens))

    def num_skipped(self, num_computed: Count) -> Count:
        """Tokens of earlier chunks."""
        return num_computed // self.reach.chunk * self.reach.chunk

    def first_skippable(self, num_prompt_tokens: int, tokens_per_block: int) -> int:
        """The first column on."""
        del num_prompt_tokens, tokens_per_block
        return 0

    def kept_columns(
        self, columns: Int32Array, boundaries: Int32Array, *, tokens_per_block: int, retention: Retention
    ) -> None:
        """Everything is kept."""
        del columns, boundaries, tokens_per_block, retention
