"""Cache specs of state: recurrent layers, and working memory that nobody else reads.

They answer the questions of KVCacheSpec (spec.py), where a page does not grow with the tokens that it stands for.
Owns no state and decides nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Hashable
from typing import Self

from blockferry.engine.kv.reach import SequenceLimits, SpecKind, cdiv
from blockferry.engine.kv.state_fields import StateField


class MambaMode(enum.StrEnum):
    """Where a state-space layer keeps its states.

    NONE: only the running state, in one block; no prefix cache. ALIGN: states at block boundaries are blocks of
    their own, which the prefix cache may keep; a row holds the running state and the one before it.
    """

    NONE = "none"
    ALIGN = "align"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Recurrent state of fixed size: state-space layers, gated delta-net, short convolution.

    A page holds one state, whatever block_size is; block_size says at which positions states may be kept. Every rank
    holds its whole state, so context parallelism does not change it.
    """

    block_size: int
    shapes: tuple[tuple[int, ...], ...]  # per state tensor, on this rank
    dtype_bytes: tuple[int, ...]  # per state tensor
    fields: tuple[tuple[StateField, ...], ...] = ()  # per state tensor; none: not known, cannot be ferried
    mode: MambaMode = MambaMode.ALIGN
    num_speculative_blocks: int = 0  # one state per draft token to verify
    num_prefill_checkpoint_blocks: int = 0  # states exported from within a prefill chunk
    page_size_padded: int | None = None

    @property
    def kind(self) -> SpecKind:
        """Cache type."""
        return SpecKind.MAMBA

    @property
    def tokens_per_block(self) -> int:
        """Tokens between two positions whose states may be kept."""
        return self.block_size

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one state."""
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, self.dtype_bytes, strict=True))

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of this layer takes."""
        return self.page_size_padded or self.unpadded_page_size_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Whether states may be shared between sequences."""
        return self.mode is MambaMode.ALIGN

    @property
    def tokens_per_state(self) -> int:
        """A state covers the whole block, and all before it."""
        return self.block_size

    @property
    def block_table_token_alignment(self) -> int | None:
        """None: columns are states, not positions."""
        return None

    def num_blocks_for(self, num_tokens: int) -> int:
        """Columns that num_tokens tokens take, speculative ones not counted."""
        return cdiv(num_tokens, self.block_size)

    def max_admission_blocks_per_request(self, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once."""
        del limits
        if self.mode is MambaMode.NONE:
            return 1 + self.num_speculative_blocks
        return 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks

    def max_num_blocks_per_req(self, limits: SequenceLimits) -> int:
        """Columns of a sequence's block table: all positions, though most entries are null."""
        return self.num_blocks_for(limits.max_model_len) + self.num_speculative_blocks

    def max_memory_usage_bytes(self, limits: SequenceLimits) -> int:
        """Most bytes that one sequence ever holds at once."""
        return self.max_admission_blocks_per_request(limits) * self.page_size_bytes

    def per_layer(self, num_layers: int) -> tuple[MambaSpec, ...]:
        """The same for all."""
        return (self,) * num_layers

    @property
    def table_key(self) -> Hashable:
        """Layers with as many states, kept at the same positions, share blocks."""
        return (self.mode, self.block_size, self.num_speculative_blocks, self.num_prefill_checkpoint_blocks)

    @property
    def storage(self) -> Self:
        """All of it is stored."""
        return self

    @property
    def head_slice_bytes(self) -> int:
        """A state is one piece."""
        return self.page_size_bytes

    def kept_whole(self, block_size: int) -> Self:
        """A state cannot be kept for every token."""
        del block_size
        return self

    def with_page_size(self, page_size_bytes: int) -> Self | None:
        """Padded: a state does not grow with the tokens that it covers."""
        return dataclasses.replace(self, page_size_padded=page_size_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScratchRingSpec:
    """One block of working memory per sequence, written around and around; nobody else ever reads it."""

    block_size: int
    page_bytes: int
    page_size_padded: int | None = None

    @property
    def kind(self) -> SpecKind:
        """Cache type."""
        return SpecKind.SCRATCH_RING

    @property
    def tokens_per_block(self) -> int:
        """Tokens that fit the ring."""
        return self.block_size

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of the ring."""
        return self.page_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of this layer takes."""
        return self.page_size_padded or self.page_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Never shared."""
        return False

    @property
    def tokens_per_state(self) -> int:
        """Every token has an entry, until it is overwritten."""
        return 1

    @property
    def block_table_token_alignment(self) -> int | None:
        """None: the one column is no position."""
        return None

    def num_blocks_for(self, num_tokens: int) -> int:
        """One block, from the first token on."""
        return min(num_tokens, 1)

    def max_admission_blocks_per_request(self, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once."""
        del limits
        return 1

    def max_num_blocks_per_req(self, limits: SequenceLimits) -> int:
        """Columns of a sequence's block table."""
        del limits
        return 1

    def max_memory_usage_bytes(self, limits: SequenceLimits) -> int:
        """Most bytes that one sequence ever holds at once."""
        del limits
        return self.page_size_bytes

    def per_layer(self, num_layers: int) -> tuple[ScratchRingSpec, ...]:
        """The same for all."""
        return (self,) * num_layers

    @property
    def table_key(self) -> Hashable:
        """Rings of equal length share blocks."""
        return (self.kind, self.block_size)

    @property
    def storage(self) -> Self:
        """All of it is stored."""
        return self

    @property
    def head_slice_bytes(self) -> int:
        """A ring is one piece."""
        return self.page_size_bytes

    def kept_whole(self, block_size: int) -> Self:
        """A ring has no history to keep."""
        del block_size
        return self

    def with_page_size(self, page_size_bytes: int) -> Self | None:
        """Padded: its length is given."""
        return dataclasses.replace(self, page_size_padded=page_size_bytes)
