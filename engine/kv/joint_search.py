"""The longest hit of what lies in the worker's pool and in tiers together.

The search is that of the pool alone (hit_search.py); it asks an index in which a block is present where any of them
has it. Owns nothing but the answer to the last question.

    blocks of a joint hit:   0 none is needed     > 0 block of the pool     < 0 block of a tier, to be loaded
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.tier_ledger import NO_BLOCK, TierLedger
from blockferry.engine.request import BoolArray, Int32Array


class JointIndex:
    """The SearchIndex of a pool and its tiers, those that are asked first first. Changes neither."""

    def __init__(self, pool: PrefixIndex, tiers: Sequence[TierLedger]) -> None:
        self._pool = pool
        self._tiers = tuple(tiers)
        self._blocks: NDArray[np.int32] = np.zeros((1, pool.num_groups), np.int32)

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Blocks under the entries of the last find() or find_run(), [entries, groups]."""
        return self._blocks

    @property
    def num_drops(self) -> int:
        """That of the pool: what was found there may be gone when it has changed."""
        return self._pool.num_drops

    def find(self, digests: Iterable[bytes]) -> Int32Array:
        """An entry for each digest; those of earlier questions mean nothing any more."""
        digests = list(digests)
        found: Int32Array = self._pool.blocks[self._pool.find(digests)]
        for number, tier in enumerate(self._tiers):
            theirs = tier.find(digests)
            found = np.where((found == NO_BLOCK) & (theirs != NO_BLOCK), -(theirs * len(self._tiers) + number), found)
        self._blocks = np.concatenate([np.zeros((1, found.shape[1]), np.int32), found])
        return np.arange(1, len(digests) + 1, dtype=np.int32)

    def find_run(self, digests: Iterable[bytes]) -> Int32Array:
        """Entries of the leading digests under which there is any block."""
        entries = self.find(digests)
        empty = np.flatnonzero((self._blocks[entries] == NO_BLOCK).all(axis=1))
        return entries[: int(empty[0])] if len(empty) else entries

    def in_tier(self, blocks: Int32Array, number: int) -> BoolArray:
        """Which blocks of a joint hit are to be loaded from a tier."""
        in_tier: BoolArray = (blocks < 0) & (-blocks % len(self._tiers) == number)
        return in_tier

    def tier_blocks(self, blocks: Int32Array) -> Int32Array:
        """What those are called there."""
        tier_blocks: Int32Array = -blocks // np.int32(len(self._tiers))
        return tier_blocks


def pool_blocks(block_ids: tuple[Int32Array, ...]) -> tuple[Int32Array, ...]:
    """The blocks of a joint hit that lie in the pool, nulls elsewhere."""
    return tuple(np.maximum(one, NO_BLOCK) for one in block_ids)
