"""The coordinator: makes all cache groups of a model act as one towards the manager.

Loops over the groups and owns nothing but them; what a type keeps, drops or finds is its TypeManager's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.request import Int32Array


class TypeManager(Protocol):
    """One cache group of one type: its block table, and what the type means for hits and needs.

    Decides, but neither takes from nor gives back to the pool; the coordinator does, in an order that
    is the same for all groups. Rows are those of the RowTable.
    """

    group: int
    block_size: int
    table: BlockTable
    num_cached: Int32Array

    def find_hit(self, hashes: RequestHashes, max_tokens: int) -> Int32Array:
        """Longest usable hit of at most max_tokens, one entry per block, null where none is needed."""

    def trim_hit(self, block_ids: Int32Array, num_tokens: int) -> Int32Array:
        """The same hit, shortened to num_tokens."""

    def is_current(self, hashes: RequestHashes, block_ids: Int32Array) -> bool:
        """Whether the blocks of a hit still hold what they held when it was found."""

    def num_missing(self, row: int, num_tokens: int, num_hit_blocks: int) -> int:
        """Blocks to take so that the row, after adopting num_hit_blocks, holds num_tokens."""

    def num_missing_in(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """The same for rows [R] without hits; shape [R]."""

    def num_blocks_at_most(self, num_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once."""

    def adopt(self, row: int, block_ids: Int32Array) -> None:
        """Start a row with the blocks of a hit."""

    def append(self, row: int, block_ids: Int32Array) -> None:
        """Give a row further blocks."""

    def append_to(self, rows: Int32Array, num_blocks: Int32Array, block_ids: Int32Array) -> None:
        """Give num_blocks [R] of block_ids to each of rows [R], in order."""

    def cache(self, row: int, hashes: RequestHashes, num_tokens: int) -> None:
        """Let the row's full blocks among its first num_tokens be found."""

    def cache_in(self, rows: Int32Array, hashes: Sequence[RequestHashes | None], num_tokens: Int32Array) -> None:
        """cache() for rows [R] and num_tokens [R]; hashes is indexed by row."""

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

    def find_hit(self, hashes: RequestHashes, max_tokens: int) -> PrefixHit:
        """Greatest hit common to all groups, at most max_tokens, floored to the alignment of all groups."""
        num_tokens = max_tokens // self._alignment * self._alignment
        found: list[Int32Array] = []
        for manager in self.managers:
            block_ids = manager.find_hit(hashes, num_tokens)
            num_tokens = min(num_tokens, len(block_ids) * manager.block_size) // self._alignment * self._alignment
            found.append(block_ids)
        trimmed = tuple(manager.trim_hit(ids, num_tokens) for manager, ids in zip(self.managers, found, strict=True))
        return PrefixHit(num_tokens=num_tokens, block_ids=trimmed)

    def is_current(self, hashes: RequestHashes, hit: PrefixHit) -> bool:
        """Whether a hit can still be adopted."""
        return all(manager.is_current(hashes, ids) for manager, ids in zip(self.managers, hit.block_ids, strict=True))

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
        missing_GR = [manager.num_missing_in(rows, num_tokens) for manager in self.managers]  # noqa: N806 G groups, R rows
        missing_R = missing_GR[0] if len(missing_GR) == 1 else np.sum(missing_GR, axis=0)  # noqa: N806
        total = int(missing_R.sum())
        if not total:
            return len(rows)
        num_rows = len(rows)
        if total > self._pool.num_free:
            ends = np.cumsum(missing_R)
            num_rows = int(np.searchsorted(ends, self._pool.num_free, side="right"))
            total = int(ends[num_rows - 1]) if num_rows else 0
            rows, missing_GR = rows[:num_rows], [missing[:num_rows] for missing in missing_GR]  # noqa: N806
        block_ids = self._pool.take(total)
        if len(self.managers) == 1:
            self.managers[0].append_to(rows, missing_GR[0], block_ids)
            return num_rows
        # blocks go out row by row, within a row group by group
        groups = np.tile(np.arange(len(self.managers)), num_rows)
        owners = np.repeat(groups, np.stack(missing_GR, axis=1).ravel())
        for manager, missing in zip(self.managers, missing_GR, strict=True):
            manager.append_to(rows, missing, block_ids[owners == manager.group])
        return num_rows

    def cache(self, row: int, hashes: RequestHashes, num_tokens: int) -> None:
        """Let the row's full blocks among its first num_tokens be found, in every group."""
        for manager in self.managers:
            manager.cache(row, hashes, num_tokens)

    def cache_in(self, rows: Int32Array, hashes: Sequence[RequestHashes | None], num_tokens: Int32Array) -> None:
        """cache() for rows [R] and num_tokens [R]; hashes is indexed by row."""
        for manager in self.managers:
            manager.cache_in(rows, hashes, num_tokens)

    def free(self, row: int) -> None:
        """Give a row's blocks back: groups in order, in each the last block first."""
        for manager in self.managers:
            self._pool.free(manager.drop(row)[::-1])

    def drop(self, row: int) -> Int32Array:
        """Forget a row but keep its blocks; returns them group after group, in table order."""
        return np.concatenate([manager.drop(row) for manager in self.managers])
