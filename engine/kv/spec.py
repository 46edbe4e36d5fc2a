"""Cache specs: what one layer stores per block, and how layers form groups that share a block table.

One frozen class per kind of cache (those of state in state_spec.py); all of them answer the questions of KVCacheSpec.
Sizes are bytes of one rank. Owns no state and decides nothing: planning.py forms groups, the type managers say what a
type keeps and finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Protocol, Self

from blockferry.engine.kv.reach import (
    EncoderReach,
    FullReach,
    KVContent,
    LatentContent,
    NoReach,
    Reach,
    SequenceLimits,
    SpecKind,
    WindowReach,
    cdiv,
)
from blockferry.engine.kv.state_spec import MambaMode, MambaSpec, ScratchRingSpec

__all__ = [
    "TABLE_ALIGNMENT",
    "AttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "LayerSpec",
    "MambaMode",
    "MambaSpec",
    "ScratchRingSpec",
    "SlabGeometry",
    "UniformTypeSpec",
]


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

    def per_layer(self, num_layers: int) -> tuple[LayerSpec, ...]:
        """Spec of each layer of a group of num_layers layers that has this spec, in the group's order."""


class LayerSpec(KVCacheSpec, Protocol):
    """What the planners ask of the spec of a single layer, besides: in which ways it can be stored."""

    @property
    def table_key(self) -> Hashable:
        """Equal for layers that need the same blocks of any sequence, and so can share a block table."""

    @property
    def storage(self) -> Self:
        """This spec without what only computation cares about; layers of equal storage have pages alike."""

    @property
    def head_slice_bytes(self) -> int:
        """Bytes of one KV head's part of a page; of the whole page where no heads are told apart."""

    def kept_whole(self, block_size: int) -> Self:
        """Of a local layer: all of its tokens stored, in blocks of block_size; any other spec as it is."""

    def with_page_size(self, page_size_bytes: int) -> Self | None:
        """With larger pages: more tokens to a block where that divides, else padding; None where neither can be."""


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

    def per_layer(self, num_layers: int) -> tuple[LayerSpec, ...]:
        """The same for all."""
        return (self,) * num_layers

    @property
    def table_key(self) -> Hashable:
        """Layers of equal reach share blocks, whatever they store of a token."""
        return (self.reach.storage, self.block_size, self.context_parallel_size)

    @property
    def storage(self) -> Self:
        """Without the window or chunk that a layer kept whole computes."""
        return dataclasses.replace(self, reach=self.reach.storage)

    @property
    def head_slice_bytes(self) -> int:
        """Bytes of one KV head's part of a page."""
        return self.block_size * self.content.head_bytes

    def kept_whole(self, block_size: int) -> Self:
        """Full attention for the ledger, where this is a sliding window or chunked."""
        reach = self.reach.kept_whole
        if reach == self.reach:
            return self
        padded = self.page_size_padded
        if padded is not None:
            padded = max(padded, block_size * self.content.token_bytes)
        return dataclasses.replace(self, reach=reach, block_size=block_size, page_size_padded=padded)

    def with_page_size(self, page_size_bytes: int) -> Self | None:
        """Latent vectors are never padded: sparse kernels address them as whole rows."""
        ratio, rest = divmod(page_size_bytes, self.page_size_bytes)
        if not rest:
            padded = self.page_size_padded and self.page_size_padded * ratio
            return dataclasses.replace(self, block_size=self.block_size * ratio, page_size_padded=padded)
        if self.content.is_latent:
            return None
        return dataclasses.replace(self, page_size_padded=page_size_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniformTypeSpec:
    """Layers of one type and block size whose pages differ: one group whose page is all their pages in a row."""

    layer_specs: tuple[LayerSpec, ...]  # in the group's order; all alike but for their bytes

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

    def per_layer(self, num_layers: int) -> tuple[LayerSpec, ...]:
        """Each its own; none for a rank that holds no layer of the group."""
        assert num_layers in (0, len(self.layer_specs)), (num_layers, len(self.layer_specs))
        return self.layer_specs[:num_layers]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table. layer_ids are the model's layer numbers, over all PP stages."""

    layer_ids: tuple[int, ...]
    spec: KVCacheSpec
    is_draft: bool = False  # layers of a draft model: the last block of a hit is computed again

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Spec of each layer, in the order of layer_ids."""
        return self.spec.per_layer(len(self.layer_ids))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlabGeometry:
    """How a pool is carved: slabs of slab_bytes, each given to one group at a time.

    A slab holds pages_per_slab[g] pages of group g at page_stride_bytes[g], the group's block_stride. Before slab 0
    lie null_bytes with the null page of every group, so that block id b > 0 of group g is page (b - 1) counted from
    the start of slab 0. After the last slab lie tail_pages pages that always belong to tail_group: its block ids go on.
    """

    slab_bytes: int
    num_slabs: int
    pages_per_slab: tuple[int, ...]  # per group
    page_stride_bytes: tuple[int, ...]  # per group; pages_per_slab * page_stride_bytes = slab_bytes
    null_bytes: int
    tail_group: int = 0
    tail_pages: int = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of null pages, slabs and tail."""
        tail_bytes = self.tail_pages * self.page_stride_bytes[self.tail_group]
        return self.null_bytes + self.num_slabs * self.slab_bytes + tail_bytes

    def num_pages(self, group: int) -> int:
        """Pages that a group could own at most, its null page not counted: its block ids are 1 to this number."""
        tail_pages = self.tail_pages if group == self.tail_group else 0
        return self.num_slabs * self.pages_per_slab[group] + tail_pages


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


def one_layer(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that says how all layers of a group behave."""
    return spec.layer_specs[0] if isinstance(spec, UniformTypeSpec) else spec


def window_of(spec: KVCacheSpec) -> int | None:
    """Tokens of a sliding window; None where the type has none."""
    spec = one_layer(spec)
    if isinstance(spec, AttentionSpec) and isinstance(spec.reach, WindowReach):
        return spec.reach.window
    return None
