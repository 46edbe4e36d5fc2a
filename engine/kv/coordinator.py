"""The coordinator: makes all cache groups of a model act as one towards the manager.

Loops over the groups and owns nothing but them; what a type keeps, drops or finds is its TypeManager's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.request import BoolArray, Int32Array


class TypeManager(Protocol):
    """One cache group of one type: its block table, and what the type means for hits and needs.

    Decides, but neither takes from nor gives back to the pool; the coordinator does, in an order that
    is the same for all groups. Rows are those of the RowTable; a chain is the digests of a sequence's hash blocks.
    """

    group: int
    block_size: int
    table: BlockTable
    num_cached: Int32Array

    def find_hit(self, chain: Sequence[bytes], max_tokens: int) -> Int32Array:
        """Longest usable hit of at most max_tokens, one entry per block, null where none is needed."""

    def trim_hit(self, block_ids: Int32Array, num_tokens: int) -> Int32Array:
        """The same hit, shortened to num_tokens."""

    def is_current(self, chain: Sequence[bytes], block_ids: Int32Array) -> bool:
        """Whether the blocks of a hit still hold what they held when it was found."""

    def num_missing(self, row: int, num_tokens: int, num_hit_blocks: int) -> int:
        """Blocks to take so that the row, after adopting num_hit_blocks, holds num_tokens."""

    def lacks_blocks(self, rows: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Which of rows [R] must take blocks to hold num_tokens [R]; shape [R]."""

    def num_missing_in(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """How many blocks each of rows [R] must take; shape [R]."""

    def num_blocks_at_most(self, num_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once."""

    def adopt(self, row: int, block_ids: Int32Array) -> None:
        """Start a row with the blocks of a hit."""

    def append(self, row: int, block_ids: Int32Array) -> None:
        """Give a row further blocks."""

    def append_to(self, rows: Int32Array, num_blocks: Int32Array, block_ids: Int32Array) -> None:
        """Give num_blocks [R], all >= 1, of block_ids to each of rows [R], in order."""

    def cache(self, row: int, chain: Sequence[bytes], num_tokens: int) -> None:
        """Let the row's full blocks among its first num_tokens be found."""

    def has_uncached(self, rows: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Which of rows [R] have something to cache among their first num_tokens [R]; shape [R]."""

    def cache_in(self, rows: Int32Array, chains: Sequence[Sequence[bytes]], num_tokens: Int32Array) -> None:
        """cache() for rows [R] and num_tokens [R]; chains is indexed by row."""

    def drop(self, row: int) -> Int32Array:
        """Forget a row; returns its blocks in table order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """What the prefix cache holds of a sequence. Valid until the ledger next takes blocks."""

    num_tokens: int
    block_ids: tuple[Int32Array, ...]  # per group, one entry per block


class UnitaryCoordinator:
    """Groups whose hits are prefixes of each other: any prefix of a hit is a hit too (full attention)."""

    def __init__(self, managers: Sequence[TypeManager], pool: BlockPool) -> None:
        self.managers = tuple(managers)
        self._pool = pool
        self._alignment = math.lcm(*(manager.block_size for manager in managers))

    @property
    def no_hit(self) -> PrefixHit:
        """The hit of a sequence nothing of which is cached."""
        return PrefixHit(num_tokens=0, block_ids=tuple(np.empty(0, np.int32) for _ in self.managers))

    def find_hit(self, chain: Sequence[bytes], max_tokens: int) -> PrefixHit:
        """Greatest hit common to all groups, at most max_tokens, floored to the alignment of all groups."""
        num_tokens = max_tokens // self._alignment * self._alignment
        found: list[Int32Array] = []
        for manager in self.managers:
            block_ids = manager.find_hit(chain, num_tokens)
            num_tokens = min(num_tokens, len(block_ids) * manager.block_size) // self._alignment * self._alignment
            found.append(block_ids)
        trimmed = tuple(manager.trim_hit(ids, num_tokens) for manager, ids in zip(self.managers, found, strict=True))
        return PrefixHit(num_tokens=num_tokens, block_ids=trimmed)

    def is_current(self, chain: Sequence[bytes], hit: PrefixHit) -> bool:
        """Whether a hit can still be adopted."""
        return all(manager.is_current(chain, ids) for manager, ids in zip(self.managers, hit.block_ids, strict=True))

    def num_free_needed(self, row: int, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks that go when the row adopts hit and grows to num_tokens: idle hit blocks and new ones."""
        needed = 0
        for manager, block_ids in zip(self.managers, hit.block_ids, strict=True):
            needed += self._pool.num_idle(block_ids) + manager.num_missing(row, num_tokens, len(block_ids))
        return needed

    def num_blocks_at_most(self, num_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once."""
        return sum(manager.num_blocks_at_most(num_tokens) for manager in self.managers)

    def adopt(self, row: int, hit: PrefixHit) -> None:
        """Start a row with a hit: blocks of all groups are touched before any block is taken."""
        for manager, block_ids in zip(self.managers, hit.block_ids, strict=True):
            self._pool.touch(block_ids)
            manager.adopt(row, block_ids)

    def grow(self, row: int, num_tokens: int) -> None:
        """Take what the row needs to hold num_tokens; the caller has checked that it is there."""
        for manager in self.managers:
            missing = manager.num_missing(row, num_tokens, 0)
            if missing:
                manager.append(row, self._pool.take(missing))

    def grow_leading(self, rows: Int32Array, num_tokens: Int32Array) -> int:
        """Grow rows [R] to num_tokens [R] in order, as far as free blocks go; returns how many rows."""
        due = _any([manager.lacks_blocks(rows, num_tokens) for manager in self.managers]).nonzero()[0]
        if not len(due):
            return len(rows)
        short, num_tokens = rows[due], num_tokens[due]
        missing = [manager.num_missing_in(short, num_tokens) for manager in self.managers]
        ends = np.cumsum(missing[0] if len(missing) == 1 else np.sum(missing, axis=0))
        num_grown = len(due)
        if ends[-1] > self._pool.num_free:
            num_grown = int(np.searchsorted(ends, self._pool.num_free, side="right"))
            if not num_grown:
                return int(due[0])
            short, missing = short[:num_grown], [counts[:num_grown] for counts in missing]
        self._append_to(short, missing, self._pool.take(int(ends[num_grown - 1])))
        return len(rows) if num_grown == len(due) else int(due[num_grown])

    def cache(self, row: int, chain: Sequence[bytes], num_tokens: int) -> None:
        """Let the row's full blocks among its first num_tokens be found, in every group."""
        for manager in self.managers:
            manager.cache(row, chain, num_tokens)

    def has_uncached(self, rows: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Which of rows [R] have something to cache among their first num_tokens [R], in any group."""
        return _any([manager.has_uncached(rows, num_tokens) for manager in self.managers])

    def cache_in(self, rows: Int32Array, chains: Sequence[Sequence[bytes]], num_tokens: Int32Array) -> None:
        """cache() for rows [R] and num_tokens [R]; chains is indexed by row."""
        for manager in self.managers:
            manager.cache_in(rows, chains, num_tokens)

    def free(self, row: int) -> None:
        """Give a row's blocks back: groups in order, in each the last block first."""
        for manager in self.managers:
            self._pool.free(manager.drop(row)[::-1])

    def drop(self, row: int) -> Int32Array:
        """Forget a row but keep its blocks; returns them group after group, in table order."""
        return np.concatenate([manager.drop(row) for manager in self.managers])

    def _append_to(self, rows: Int32Array, missing: list[Int32Array], block_ids: Int32Array) -> None:
        """Hand block_ids out row by row, within a row group by group; missing holds [R] counts per group."""
        if len(self.managers) == 1:
            self.managers[0].append_to(rows, missing[0], block_ids)
            return
        groups = np.tile(np.arange(len(self.managers)), len(rows))
        owners = np.repeat(groups, np.stack(missing, axis=1).ravel())
        for manager, counts in zip(self.managers, missing, strict=True):
            due = counts.nonzero()[0]
            manager.append_to(rows[due], counts[due], block_ids[owners == manager.group])


def _any(flags: list[BoolArray]) -> BoolArray:
    return flags[0] if len(flags) == 1 else np.logical_or.reduce(flags)
