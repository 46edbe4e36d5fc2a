"""Cache specs: what one layer stores per block, and how layers form groups that share a block table.

Sizes are bytes of one rank. Owns no state. The next cache types join as further specs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec:
    """Keys and values of every token of the sequence, for one layer."""

    block_size: int  # tokens
    num_kv_heads: int  # on this rank
    head_dim: int
    dtype_bytes: int

    @property
    def content_bytes(self) -> int:
        """Bytes of one token of one head: K then V."""
        return 2 * self.head_dim * self.dtype_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of this layer takes."""
        return self.block_size * self.num_kv_heads * self.content_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of num_tokens holds."""
        return -(-num_tokens // self.block_size)


KVCacheSpec = FullAttentionSpec  # becomes a union as cache types are added


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table. layer_ids are the model's layer numbers, over all PP stages."""

    layer_ids: tuple[int, ...]
    spec: KVCacheSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The ledger's view of a pool: num_blocks includes block 0, the null block."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    hash_block_size: int

    def __post_init__(self) -> None:
        """Raises ValueError for a pool that can hold nothing."""
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks={self.num_blocks} leaves no usable block beside the null block; use 2 or more"
            )
        if not self.groups:
            raise ValueError("a KV cache needs at least one group")
