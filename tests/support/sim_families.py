"""Mixes of cache groups that a simulated instance may have, for blocks of a few tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from blockferry.engine.kv.reach import (
    ChunkReach,
    FullReach,
    KVContent,
    LatentContent,
    Reach,
    RetainedPromptReach,
    WindowReach,
)
from blockferry.engine.kv.spec import AttentionSpec, KVCacheGroup, KVCacheSpec, MambaMode, MambaSpec

FOREVER = 1 << 20


def attention(block_size: int, reach: Reach | None = None) -> AttentionSpec:
    content = KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=4)
    return AttentionSpec(block_size=block_size, content=content, reach=reach or FullReach())


def mla(block_size: int) -> AttentionSpec:
    return AttentionSpec(block_size=block_size, content=LatentContent(latent_dim=16, dtype_bytes=4))


def window(block_size: int, num_tokens: int) -> AttentionSpec:
    return attention(block_size, WindowReach(window=num_tokens))


def chunked(block_size: int, num_tokens: int) -> AttentionSpec:
    return attention(block_size, ChunkReach(chunk=num_tokens))


def states(block_size: int, mode: MambaMode = MambaMode.ALIGN) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((8,),), dtype_bytes=(4,), mode=mode)


SPECS: dict[str, Callable[[int], list[KVCacheSpec]]] = {
    "full": lambda b: [attention(b)],
    "mla": lambda b: [mla(b)],
    "window": lambda b: [window(b, 2 * b + 1)],
    "2 windows": lambda b: [window(b, 3), window(b, 4 * b)],
    "chunked": lambda b: [chunked(b, 3 * b)],
    "retained prompt": lambda b: [attention(b, RetainedPromptReach(window=b + 1))],
    "states": lambda b: [states(2 * b)],
    "full+window": lambda b: [attention(b), window(b, b + 1)],
    "full+window of half blocks": lambda b: [attention(2 * b), window(b, 3 * b)],
    "full+chunked": lambda b: [attention(b), chunked(b, 2 * b)],
    "full+chunked+window": lambda b: [attention(b), chunked(b, 4 * b), window(b, 3)],
    "full+full": lambda b: [attention(b), mla(b)],
    "full+5 windows": lambda b: [attention(b), *(window(b, 3 * b) for _ in range(5))],
    "full+states": lambda b: [attention(b), states(b)],
    "full+states, hits inside states": lambda b: [attention(b), states(4 * b)],
    "full+states, hits inside both": lambda b: [attention(2 * b), states(4 * b)],
    "full+window+states": lambda b: [attention(b), window(b, 2 * b + 1), states(b)],
    "full+window+states, hits inside states": lambda b: [attention(b), window(b, b + 1), states(3 * b)],
    "full+window+states, three sizes": lambda b: [attention(b), window(2 * b, 3 * b), states(4 * b)],
    "full+retained prompt+states": lambda b: [attention(b), attention(b, RetainedPromptReach(window=3)), states(2 * b)],
    "states of two sizes": lambda b: [attention(b), states(2 * b), states(3 * b)],
    "full+window of 7 tokens": lambda b: [attention(b), window(b, 7)],
    "full+chunks of 8 tokens": lambda b: [attention(b), chunked(b, 8)],
    "running states only": lambda b: [attention(b), states(FOREVER, MambaMode.NONE)],
}
"""Specs of each family by tokens of a block."""


def family_groups(
    name: str, block_size: int, *, has_draft: bool = False, num_drafts: int = 0
) -> tuple[KVCacheGroup, ...]:
    """The groups of a family; with a draft, its first attention group is the draft's. num_drafts: most in a step."""
    groups = []
    for number, spec in enumerate(SPECS[name](block_size)):
        if isinstance(spec, MambaSpec):
            spec = dataclasses.replace(spec, num_speculative_blocks=num_drafts)
        is_draft = has_draft and number == 0 and isinstance(spec, AttentionSpec)
        groups.append(KVCacheGroup(layer_ids=(number,), spec=spec, is_draft=is_draft))
    return tuple(groups)


def can_cache(name: str) -> bool:
    """Whether the family may have a prefix cache at all."""
    return name != "running states only"


def num_state_groups(name: str) -> int:
    """Groups of the family that keep recurrent states."""
    return sum(isinstance(spec, MambaSpec) for spec in SPECS[name](1))


def largest_step(name: str, block_size: int) -> int:
    """Least common multiple of the family's blocks: what retention intervals are counted in."""
    return math.lcm(*(spec.tokens_per_block for spec in SPECS[name](block_size)))
