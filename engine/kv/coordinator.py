"""The coordinator: makes all cache groups of a model act as one towards the manager.

Loops over the type managers and owns nothing but them; what a type keeps, drops or finds is theirs. Everything that
takes blocks was asked for before in every group, so a call either happens in all of them or in none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.pools import Pools
from blockferry.engine.kv.type_manager import DecodeDemand, Demand, HitBlocks, TypeManager
from blockferry.engine.request import BoolArray, Int32Array


class Coordinator:
    """All groups of one ledger. Called from the scheduler's one thread."""

    def __init__(self, managers: Sequence[TypeManager], pools: Pools) -> None:
        self.managers = tuple(managers)
        self.pools = pools
        self._pool_numbers = [pools.pool_of(manager.groups[0]) for manager in managers]
        places = {group: (manager, layer) for manager in managers for layer, group in enumerate(manager.groups)}
        self._places = [places[group] for group in sorted(places)]

    def start_step(self) -> None:
        """A new step begins."""
        for manager in self.managers:
            manager.start_step()

    # tables

    def num_blocks(self, row: int, group: int) -> int:
        """Columns of a row in a group, null ones included."""
        return int(self._places[group][0].stack.num_blocks[row])

    def block_ids(self, row: int, group: int) -> Int32Array:
        """The row's blocks in a group; a copy."""
        manager, layer = self._places[group]
        block_ids: Int32Array = manager.stack.tables[layer, row, : manager.stack.num_blocks[row]].copy()
        return block_ids

    # one row

    def is_deferred(self, hit: PrefixHit) -> bool:
        """Whether a hit may only be used in the next step."""
        return any(manager.is_deferred(hits, hit.num_tokens) for manager, hits in self._hits(hit))

    def needs(self, row: int, demand: Demand, hit: PrefixHit) -> list[int]:
        """Free blocks, per pool, that go when the row adopts hit and grows to the demand."""
        needs = [0] * len(self.pools.pools)
        for number, (manager, hits) in zip(self._pool_numbers, self._hits(hit), strict=True):
            needs[number] += manager.num_needed(row, demand, hits)
        return needs

    def fits(self, row: int, demand: Demand, hit: PrefixHit, *, num_reserved: int) -> bool:
        """Whether the row can adopt hit and grow to the demand, with num_reserved blocks left over."""
        needs = self.needs(row, demand, hit)
        return self.pools.fits(needs, hits=hit.block_ids, num_reserved=num_reserved)

    def most_blocks(self, num_tokens: int, num_encoder_tokens: int) -> list[int]:
        """Most blocks, per pool, that a sequence of num_tokens ever holds at once."""
        most = [0] * len(self.pools.pools)
        for number, manager in zip(self._pool_numbers, self.managers, strict=True):
            most[number] += manager.most_blocks(num_tokens, num_encoder_tokens)
        return most

    def adopt(self, row: int, demand: Demand, hit: PrefixHit) -> None:
        """Start a row with a hit: blocks of all groups have an owner more before any block is taken."""
        for manager, hits in self._hits(hit):
            manager.adopt(row, demand, hits)
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

    def drop(self, row: int) -> list[Int32Array]:
        """Forget a row; its blocks per group, in table order, keep their owner."""
        dropped: list[Int32Array] = [_NO_BLOCKS] * len(self._places)
        for manager in self.managers:
            for group, block_ids in zip(manager.groups, manager.drop(row), strict=True):
                dropped[group] = block_ids
        return dropped

    def free(self, row: int) -> None:
        """Give a row's blocks back: groups in order, in each the last block first."""
        for (manager, _), block_ids in zip(self._places, self.drop(row), strict=True):
            manager.pool.free(block_ids[::-1])

    # all decoding rows at once

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R]."""
        for manager in self.managers:
            manager.skip_in(rows, num_computed)

    def lacks_blocks(self, demand: DecodeDemand) -> BoolArray:
        """Which rows must take any block; shape [R]."""
        lacks = [manager.lacks_blocks(demand) for manager in self.managers]
        if len(lacks) == 1:
            return lacks[0]
        lacking: BoolArray = np.logical_or.reduce(lacks)
        return lacking

    def grow_leading(self, demand: DecodeDemand) -> int:
        """Grow the rows in order, as far as free blocks go; returns how many rows."""
        due = self.lacks_blocks(demand).nonzero()[0]
        if not len(due):
            return len(demand.rows)
        short = demand.keep(due)
        missing = [manager.num_missing_in(short) for manager in self.managers]
        num_grown = len(due)
        if not self._fit(missing):
            num_grown = self.pools.num_leading(self._needs_in(missing))
            short, missing = short.keep_leading(num_grown), [counts[:num_grown] for counts in missing]
        for manager, counts in zip(self.managers, missing, strict=True):
            num_growing = np.count_nonzero(counts)
            if 0 < num_growing == len(counts):
                manager.grow_in(short, counts)
            elif num_growing:
                mine = counts.nonzero()[0]
                manager.grow_in(short.keep(mine), counts.take(mine))
        return len(demand.rows) if num_grown == len(due) else int(due[num_grown])

    def _fit(self, missing: Sequence[Int32Array]) -> bool:
        """Whether there is room for all of what rows lack in each group of each manager."""
        needs = [0] * len(self.pools.pools)
        for number, manager, counts in zip(self._pool_numbers, self.managers, missing, strict=True):
            needs[number] += int(np.add.reduce(counts)) * len(manager.groups)
        return self.pools.fits(needs, num_reserved=0)

    def _needs_in(self, missing: Sequence[Int32Array]) -> Int32Array:
        """Blocks that each row must take of each pool, [R, P], from what it lacks in each group of a manager."""
        needs = np.zeros((len(self.pools.pools), len(missing[0])), np.int32)
        for number, manager, counts in zip(self._pool_numbers, self.managers, missing, strict=True):
            needs[number] += counts * np.int32(len(manager.groups))
        return needs.T

    def _hits(self, hit: PrefixHit) -> Iterator[tuple[TypeManager, HitBlocks]]:
        for manager in self.managers:
            yield manager, [hit.block_ids[group] for group in manager.groups]


_NO_BLOCKS: Int32Array = np.empty(0, np.int32)
