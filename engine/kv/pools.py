"""The pools of a ledger as one: what is free, what fits, for blocks of one size or several.

Owns the pools. Blocks that every group shares, one after the other, are one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.events import EventLog
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.request import Int32Array


class Pools(Protocol):
    """All blocks of an instance. Needs are counted per pool."""

    pools: tuple[BlockPool, ...]

    def pool_of(self, group: int) -> int:
        """Index of the pool that a group takes its blocks from."""

    @property
    def num_free(self) -> int:
        """Blocks (of the smallest unit that moves between groups) that can be taken now."""

    @property
    def num_usable(self) -> int:
        """All of them, without the null block."""

    def can_hold(self, needs: Sequence[int]) -> bool:
        """Whether needs[p] blocks of each pool p exist, all at once."""

    def fits(self, needs: Sequence[int], *, num_reserved: int) -> bool:
        """Whether needs[p] blocks can be taken of each pool p with num_reserved units left over."""

    def num_leading(self, needs: Int32Array) -> int:
        """How many leading rows' needs [R, P] can be taken together."""

    def clear_hashes(self) -> None:
        """Empty the prefix cache."""

    def check(self) -> None:
        """Prove what the pools' arrays do not say themselves. Raises LedgerCorrupted."""


class SharedPool:
    """One pool whose blocks serve any group: pages have one size."""

    def __init__(self, pool: BlockPool) -> None:
        self.pools: tuple[BlockPool, ...] = (pool,)

    def pool_of(self, group: int) -> int:
        """The only one."""
        del group
        return 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones without owner included."""
        return self.pools[0].num_free

    @property
    def num_usable(self) -> int:
        """Blocks without the null block."""
        return self.pools[0].num_blocks - 1

    def can_hold(self, needs: Sequence[int]) -> bool:
        """Whether needs[0] blocks exist."""
        return needs[0] <= self.num_usable

    def fits(self, needs: Sequence[int], *, num_reserved: int) -> bool:
        """Whether needs[0] blocks are free beside num_reserved."""
        return needs[0] <= self.pools[0].num_free - num_reserved

    def num_leading(self, needs: Int32Array) -> int:
        """How many leading rows' needs [R, 1] are free together."""
        return int(np.searchsorted(np.cumsum(needs[:, 0]), self.pools[0].num_free, side="right"))

    def clear_hashes(self) -> None:
        """Empty the prefix cache."""
        self.pools[0].forget_hashes()
        self.pools[0].index.clear()

    def check(self) -> None:
        """Nothing to add."""


def make_pools(config: KVCacheConfig, index: PrefixIndex, events: EventLog | None) -> Pools:
    """The pools of a configuration."""
    return SharedPool(BlockPool(config.num_blocks, index=index, events=events))
