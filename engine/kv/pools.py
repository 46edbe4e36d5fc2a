"""The pools of a ledger as one: what is free, what fits, for blocks of one size or several.

Owns the pool of blocks of one size, which every group shares; slab_pools.py has the other kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.events import EventLog
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.slab_pools import SlabPools
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.request import Int32Array


class Pools(Protocol):
    """All blocks of an instance. Needs are counted per pool, what is free in units of the smallest block.

    What fits() or num_leading() has granted can be taken, in any order, until one of them is asked again.
    """

    pools: tuple[BlockPool, ...]

    def pool_of(self, group: int) -> int:
        """Index of the pool that a group takes its blocks from."""

    @property
    def num_free(self) -> int:
        """Units that nobody holds: all of them can be taken, though not by every group."""

    @property
    def num_usable(self) -> int:
        """All units, null blocks not counted: num_free when nothing is held."""

    def count_units(self, needs: Sequence[int]) -> int:
        """Units that needs[p] blocks of each pool p are."""

    def can_hold(self, needs: Sequence[int]) -> bool:
        """Whether a sequence that never holds more than needs[p] blocks of each pool p always gets them when alone."""

    def fits(self, needs: Sequence[int], *, hits: Sequence[Int32Array] = (), num_reserved: int = 0) -> bool:
        """Whether needs[p] blocks can be taken of each pool p with num_reserved units left over.

        hits: cached blocks per group that are to be touched; those of them that are idle are among the needs.
        """

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

    def count_units(self, needs: Sequence[int]) -> int:
        """Every block is one."""
        return needs[0]

    def can_hold(self, needs: Sequence[int]) -> bool:
        """Whether needs[0] blocks exist."""
        return needs[0] <= self.num_usable

    def fits(self, needs: Sequence[int], *, hits: Sequence[Int32Array] = (), num_reserved: int = 0) -> bool:
        """Whether needs[0] blocks are free beside num_reserved."""
        del hits
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
    """The pools of a configuration. Raises ValueError for slabs of other groups."""
    if config.slab is not None:
        return SlabPools(config.slab, config.groups, index=index, events=events)
    return SharedPool(BlockPool(config.num_blocks, index=index, events=events))
