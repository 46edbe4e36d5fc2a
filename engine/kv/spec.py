"""Cache specs: what one layer stores per block, and how layers form groups that share a block table.

One frozen class per kind of state; all of them answer the questions of KVCacheSpec. Sizes are bytes of one rank.
Owns no state and decides nothing: planning.py forms groups, the type managers say what a type keeps and finds.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Protocol

from blockferry.engine.kv.reach import (
    EncoderReach,
    FullReach,
    KVContent,
    LatentContent,
    NoReach,
    Reach,
    SequenceLimits,
    SpecKind,
    cdiv,
)


class MambaMode(enum.StrEnum):
    """Where a state-space layer keeps its states.

    NONE: only the running state, in one block; no prefix cache. ALIGN: states at block boundaries are blocks of
    their own, which the prefix cache may keep; a row holds the running state and the one before it.
    """

    NONE = "none"
    ALIGN = "align"


class KVCacheSpec(Protocol):
    """What the ledger and the planners ask of any spec.

    A block of the ledger stands for tokens_per_block tokens of a sequence: block_size of them on each rank of a
    context-parallel group.
    """

    @property
    def kind(self) -> SpecKind:
        """Cache type."""

    @property
    def block_size(self) -> int:
        """Tokens that one rank stores per block."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens of the sequence that one block stands for, over all context-parallel ranks."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of one layer takes, padding included."""

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of it that hold content."""

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks may be shared between sequences."""

    @property
    def tokens_per_state(self) -> int:
        """Tokens that one stored entry covers: 1 for attention, a whole block for states."""

    @property
    def block_table_token_alignment(self) -> int | None:
        """Tokens to which a worker's table width is rounded up; None where columns are not positions."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Columns of a block table that num_tokens tokens take, null ones included."""

    def max_admission_blocks_per_request(self, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once."""

    def max_num_blocks_per_req(self, limits: SequenceLimits) -> int:
        """Columns of a sequence's block table."""

    def max_memory_usage_bytes(self, limits: SequenceLimits) -> int:
        """Most bytes of one layer that one sequence ever holds at once."""


TABLE_ALIGNMENT = 128
"""Tokens that the width of an attention layer's block table is rounded up to."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention layer: what it stores of a token, and which tokens stay in reach of the next one."""

    block_size: int
    content: KVContent | LatentContent
    reach: Reach = dataclasses.field(default_factory=FullReach)
    page_size_padded: int | None = None  # bytes, where a plan makes pages larger than their content
    context_parallel_size: int = 1  # ranks that share each block's tokens

    @property
    def kind(self) -> SpecKind:
        """Cache type."""
        return self.reach.kind(is_latent=self.content.is_latent)

    @property
    def tokens_per_block(self) -> int:
        """Tokens of the sequence per block, over all context-parallel ranks."""
        return self.block_size * self.context_parallel_size

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a page that hold content."""
        return self.block_size * self.content.token_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of this layer takes."""
        return self.page_size_padded or self.unpadded_page_size_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks may be shared between sequences: not those of an encoder."""
        return not isinstance(self.reach, EncoderReach | NoReach)

    @property
    def tokens_per_state(self) -> int:
        """Every token is stored."""
        return 1

    @property
    def block_table_token_alignment(self) -> int | None:
        """Tokens that a worker's table width is rounded up to."""
        return TABLE_ALIGNMENT

    def num_blocks_for(self, num_tokens: int) -> int:
        """Columns that num_tokens tokens take."""
        return cdiv(num_tokens, self.tokens_per_block)

    def max_admission_blocks_per_request(self, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once."""
        return self.reach.max_held_blocks(self.tokens_per_block, limits)

    def max_num_blocks_per_req(self, limits: SequenceLimits) -> int:
        """Columns of a sequence's block table: positions, of the encoder's input where that is what is stored."""
        if not self.prefix_cacheable:
            return self.max_admission_blocks_per_request(limits)
        return self.num_blocks_for(limits.max_model_len)

    def max_memory_usage_bytes(self, limits: SequenceLimits) -> int:
        """Most bytes that one sequence ever holds at once."""
        return self.max_admission_blocks_per_request(limits) * self.page_size_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Recurrent state of fixed size: state-space layers, gated delta-net, short convolution.

    A page holds one state, whatever block_size is; block_size says at which positions states may be kept. Every rank
    holds its whole state, so context parallelism does not change it.
    """

    block_size: int
    shapes: tuple[tuple[int, ...], ...]  # per state tensor, on this rank
    dtype_bytes: tuple[int, ...]  # per state tensor
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScratchRingSpec:
    """One block of working memory per sequence, written around and around; nobody else ever reads it."""

    block_size: int
    page_bytes: int

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
        return self.page_bytes

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
        return self.page_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniformTypeSpec:
    """Layers of one type and block size whose pages differ: one group whose page is all their pages in a row."""

    layer_specs: tuple[KVCacheSpec, ...]  # in the group's order; all alike but for their bytes

    @property
    def kind(self) -> SpecKind:
        """Cache type of its layers."""
        return self.layer_specs[0].kind

    @property
    def block_size(self) -> int:
        """Tokens that one rank stores per block."""
        return self.layer_specs[0].block_size

    @property
    def tokens_per_block(self) -> int:
        """Tokens of the sequence per block."""
        return self.layer_specs[0].tokens_per_block

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of all layers' pages that hold content."""
        return sum(spec.unpadded_page_size_bytes for spec in self.layer_specs)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of all layers' pages."""
        return sum(spec.page_size_bytes for spec in self.layer_specs)

    @property
    def prefix_cacheable(self) -> bool:
        """Whether blocks may be shared between sequences."""
        return self.layer_specs[0].prefix_cacheable

    @property
    def tokens_per_state(self) -> int:
        """Tokens that one stored entry covers."""
        return self.layer_specs[0].tokens_per_state

    @property
    def block_table_token_alignment(self) -> int | None:
        """Tokens that a table's width is rounded up to."""
        return self.layer_specs[0].block_table_token_alignment

    def num_blocks_for(self, num_tokens: int) -> int:
        """Columns that num_tokens tokens take."""
        return self.layer_specs[0].num_blocks_for(num_tokens)

    def max_admission_blocks_per_request(self, limits: SequenceLimits) -> int:
        """Most blocks that one sequence ever holds at once."""
        return max(spec.max_admission_blocks_per_request(limits) for spec in self.layer_specs)

    def max_num_blocks_per_req(self, limits: SequenceLimits) -> int:
        """Columns of a sequence's block table."""
        return max(spec.max_num_blocks_per_req(limits) for spec in self.layer_specs)

    def max_memory_usage_bytes(self, limits: SequenceLimits) -> int:
        """Most bytes that one sequence ever holds at once, in all layers."""
        return self.max_admission_blocks_per_request(limits) * self.page_size_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table. layer_ids are the model's layer numbers, over all PP stages."""

    layer_ids: tuple[int, ...]
    spec: KVCacheSpec
    is_draft: bool = False  # layers of a draft model: the last block of a hit is computed again


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlabGeometry:
    """How a pool is carved: slabs of slab_bytes, each given to one group at a time.

    A slab holds pages_per_slab[g] pages of group g at page_stride_bytes[g], the group's block_stride. Before slab 0
    lie null_bytes with the null page of every group, so that block id b > 0 of group g is page (b - 1) counted from
    the start of slab 0.
    """

    slab_bytes: int
    num_slabs: int
    pages_per_slab: tuple[int, ...]  # per group
    page_stride_bytes: tuple[int, ...]  # per group; pages_per_slab * page_stride_bytes = slab_bytes
    null_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The ledger's view of a pool: num_blocks includes block 0, the null block.

    With a slab geometry every group numbers its own pages, from 1 on, and num_blocks is that of the largest group.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    hash_block_size: int
    slab: SlabGeometry | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a pool that can hold nothing."""
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks={self.num_blocks} leaves no usable block beside the null block; use 2 or more"
            )
        if not self.groups:
            raise ValueError("a KV cache needs at least one group")
