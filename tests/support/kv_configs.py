"""Random cache configurations of any mix of types, small enough to think about."""

from __future__ import annotations

import math
import random

from blockferry.engine.kv.reach import (
    ChunkReach,
    FullReach,
    KVContent,
    Reach,
    RetainedPromptReach,
    WindowReach,
)
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup, MambaSpec


def attention(block_size: int, reach: Reach, *, num_kv_heads: int = 1, context_parallel: int = 1) -> AttentionSpec:
    """An attention layer; num_kv_heads tells groups apart that are alike otherwise."""
    content = KVContent(num_kv_heads=num_kv_heads, head_dim=8, dtype_bytes=2)
    return AttentionSpec(block_size=block_size, content=content, reach=reach, context_parallel_size=context_parallel)


def states(block_size: int, *, num_speculative: int = 0, num_exported: int = 0) -> MambaSpec:
    """A recurrent layer with states at block boundaries."""
    return MambaSpec(
        block_size=block_size,
        shapes=((8,),),
        dtype_bytes=(4,),
        num_speculative_blocks=num_speculative,
        num_prefill_checkpoint_blocks=num_exported,
    )


def random_config(rng: random.Random) -> KVCacheConfig:
    """1 to 6 groups of any cacheable types, two in five of them with states and hits inside blocks."""
    resumes_inside = rng.random() < 0.4
    hash_block = rng.choice((1, 2, 4))
    blocks = [hash_block * ratio for ratio in ((1, 2) if hash_block == 4 else (1, 2, 3, 4))]
    groups = [
        random_group(rng, hash_block, blocks, resumes_inside) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 6)))
    ]
    if rng.random() < 0.3:
        groups.append(rng.choice(groups))  # asked together with its like
    if resumes_inside:
        groups.append(KVCacheGroup(layer_ids=(0,), spec=states(rng.choice(blocks[1:]))))
    if not resumes_inside:
        hash_block = math.gcd(*(group.spec.tokens_per_block for group in groups))
    return KVCacheConfig(
        num_blocks=rng.choice((12, 30, 80, 200)),
        groups=tuple(groups),
        hash_block_size=hash_block,
    )


def random_group(rng: random.Random, hash_block: int, blocks: list[int], resumes_inside: bool) -> KVCacheGroup:
    """Of any type; with resumes_inside those that can resume at any hash block."""
    kind = rng.choice(("full", "full", "window", "window", "window", "chunk", "retained", "states"))
    if kind == "states":
        return KVCacheGroup(layer_ids=(0,), spec=states(rng.choice(blocks)))
    block_size = rng.choice(blocks)
    if resumes_inside:
        block_size = hash_block if kind in {"window", "chunk"} else rng.choice(blocks[1:] * 2 + blocks[:1])
    reach: Reach
    match kind:
        case "full":
            reach = FullReach()
        case "window":
            reach = WindowReach(window=rng.choice((1, rng.randint(1, 24), rng.randint(1, 24), block_size + 1)))
        case "chunk":
            reach = ChunkReach(chunk=rng.choice((block_size * rng.randint(1, 4), rng.randint(1, 20))))
        case _:
            reach = RetainedPromptReach(window=rng.randint(1, 12))
    spec = attention(block_size, reach, num_kv_heads=rng.randint(1, 2))
    return KVCacheGroup(layer_ids=(0,), spec=spec, is_draft=rng.random() < 0.2)
