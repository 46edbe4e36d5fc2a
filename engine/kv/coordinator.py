"""The coordinator: makes all cache groups of a model act as one towards the manager.

Loops over the groups and owns nothing but them; what a type keeps, drops or finds is its TypeManager's. Everything that
takes blocks was asked for before in every group, so a call either happens in all of them or in none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.pools import Pools
from blockferry.engine.kv.type_manager import DecodeDemand, Demand, TypeManager
from blockferry.engine.request import Int32Array


class Coordinator:
    """All groups of one ledger. Called from the scheduler's one thread."""

    def __init__(self, managers: Sequence[TypeManager], pools: Pools) -> None:
        self.managers = tuple(managers)
        self.pools = pools

    def start_step(self) -> None:
        """A new step begins."""
        for manager in self.managers:
            manager.start_step()

    # one row

    def is_deferred(self, hit: PrefixHit) -> bool:
        """Whether a hit may only be used in the next step."""
        return any(manager.is_deferred(ids) for manager, ids in zip(self.managers, hit.block_ids, strict=True))

    def fits(self, row: int, demand: Demand, hit: PrefixHit, *, num_reserved: int) -> bool:
        """Whether the row can adopt hit and grow to the demand, with num_reserved blocks left over."""
        return self.pools.fits(self.needs(row, demand, hit), num_reserved=num_reserved)

    def needs(self, row: int, demand: Demand, hit: PrefixHit) -> list[int]:
        """Free blocks that go, per pool, when the row adopts hit and grows to the demand."""
        needs = [0] * len(self.pools.pools)
        for manager, block_ids in zip(self.managers, hit.block_ids, strict=True):
            needs[self.pools.pool_of(manager.group)] += manager.num_needed(row, demand, block_ids)
        return needs

    def most_blocks(self, num_tokens: int) -> list[int]:
        """Most blocks, per pool, that a sequence of num_tokens ever holds at once."""
        most = [0] * len(self.pools.pools)
        for manager in self.managers:
            most[self.pools.pool_of(manager.group)] += manager.most_blocks(num_tokens)
        return most

    def adopt(self, row: int, demand: Demand, hit: PrefixHit) -> None:
        """Start a row with a hit: blocks of all groups have an owner more before any block is taken."""
        for manager, block_ids in zip(self.managers, hit.block_ids, strict=True):
            manager.adopt(row, demand, block_ids)
        if demand.num_total > demand.num_local:
            for manager in self.managers:
                manager.take_external(row, demand)

    def grow(self, row: int, demand: Demand) -> None:
        """Take what the row lacks in every group."""
        for manager in self.managers:
            manager.grow(row, demand)

    def skip(self, row: int, num_computed: int) -> None:
        """Free what no token of the row after num_computed reads."""
        for manager in self.managers:
            manager.skip(row, num_computed)

    def free(self, row: int) -> None:
        """Give a row's blocks back: groups in order, in each the last block first."""
        for manager in self.managers:
            manager.pool.free(manager.drop(row)[::-1])

    # all decoding rows at once

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R]."""
        for manager in self.managers:
            manager.skip_in(rows, num_computed)

    def grow_leading(self, demand: DecodeDemand) -> int:
        """Grow the rows in order, as far as free blocks go; returns how many rows."""
        missing = [manager.num_missing_in(demand) for manager in self.managers]
        total = missing[0] if len(missing) == 1 else np.add.reduce(missing)
        due = total.nonzero()[0]
        if not len(due):
            return len(demand.rows)
        needs = np.zeros((len(due), len(self.pools.pools)), np.int32)
        for manager, counts in zip(self.managers, missing, strict=True):
            needs[:, self.pools.pool_of(manager.group)] += counts[due]
        num_grown = self.pools.num_leading(needs)
        for manager, counts in zip(self.managers, missing, strict=True):
            mine = due[:num_grown][counts[due[:num_grown]] > 0]
            if len(mine):
                manager.grow_in(demand.keep(mine), counts[mine])
        return len(demand.rows) if num_grown == len(due) else int(due[num_grown])
