"""Reference sliding-window attention: the whole prompt stays in reach, and a window of what was generated after it."""

from __future__ import annotations

import dataclasses

from blockferry.engine.kv.full_attention import FullRule
from blockferry.engine.kv.hit_rules import Count, Presence, Retention
from blockferry.engine.kv.reach import RetainedPromptReach, cdiv
from blockferry.engine.request import BoolArray, Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetainedPromptRule:
    """The HitRule of a retained prompt: hits are those of full attention; the gap behind the prompt goes.

    columns:  | prompt ... | null (gap) | window |
    """

    reach: RetainedPromptReach
    full: FullRule

    @property
    def drops_blocks(self) -> bool:
        """Blocks fall out of reach."""
        return True

    @property
    def resumes_inside(self) -> bool:
        """A block serves any head of its tokens."""
        return True

    def needs_blocks(self, tokens_per_block: int) -> bool:
        """Always."""
        return self.full.needs_blocks(tokens_per_block)

    def can_end(self, presence: Presence, lengths: Int32Array) -> BoolArray:
        """As of full attention."""
        return self.full.can_end(presence, lengths)

    def first_column(self, num_tokens: int, tokens_per_block: int) -> int:
        """As of full attention."""
        return self.full.first_column(num_tokens, tokens_per_block)

    def tail_length(self, presence: Presence, num_tokens: int) -> int:
        """As of full attention."""
        return self.full.tail_length(presence, num_tokens)

    def num_skipped(self, num_computed: Count) -> Count:
        """Tokens before the window."""
        return num_computed - self.reach.window

    def first_skippable(self, num_prompt_tokens: int, tokens_per_block: int) -> int:
        """The first column without a prompt token."""
        return cdiv(num_prompt_tokens, tokens_per_block)

    def kept_columns(
        self, columns: Int32Array, boundaries: Int32Array, *, tokens_per_block: int, retention: Retention
    ) -> None:
        """Everything is kept."""
        del columns, boundaries, tokens_per_block, retention
