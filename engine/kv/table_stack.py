"""Block tables of one or more groups whose columns mean the same, with the pool and the log behind them.

Every write to a row happens here. Owns the tables, their common length and how much of each row is cached. Decides
nothing: the type managers do.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.type_manager import StackContext
from blockferry.engine.request import Int32Array, Int64Array


class TableStack:
    """Rows of blocks of groups that share a pool. Mutated by their type manager only.

    tables[layer, row, column]; entries at and beyond num_blocks[row] are undefined. A layer is a group's place in
    `groups`.
    """

    def __init__(self, context: StackContext, *, max_blocks: int) -> None:
        """max_blocks is the longest row, in columns."""
        max_rows = context.rows.max_rows
        self.groups: Int32Array = np.array([group.number for group in context.groups], np.int32)
        self.pool: BlockPool = context.pool
        self.tables: Int32Array = np.zeros((len(self.groups), max_rows, max_blocks), np.int32)
        # the same with rows and columns as one axis: one index is cheaper than two
        self._flat = self.tables.reshape(len(self.groups), -1)
        self._num_columns = np.int64(max_blocks)
        self.num_blocks: Int32Array = np.zeros(max_rows, np.int32)  # columns, null ones included
        self.num_cached: Int32Array = np.zeros(max_rows, np.int32)  # leading columns that caching is done with
        self._log = context.log

    def write(self, layer: int, row: int, first: int, block_ids: Int32Array) -> None:
        """Put blocks and nulls into columns from first on; the row's length is the caller's to set."""
        self.tables[layer, row, first : first + len(block_ids)] = block_ids
        columns = np.arange(first, first + len(block_ids), dtype=np.int32)
        held = block_ids != NULL_BLOCK_ID
        if not held.all():
            columns, block_ids = columns[held], block_ids[held]
        self._log.add(self.groups[layer : layer + 1], np.full(len(block_ids), row, np.int32), columns, block_ids)

    def take(self, layer: int, row: int, first: int, stop: int) -> None:
        """New blocks for columns [first, stop); the caller has checked that they are there."""
        if stop > first:
            block_ids = self.pool.take(stop - first)
            self._log.add_new(int(self.groups[layer]), block_ids)
            self.write(layer, row, first, block_ids)

    def take_columns(self, row: int, first: int, stop: int) -> None:
        """take() in every layer; the row's length is set."""
        if stop <= first:
            return
        num_layers, count = len(self.groups), stop - first
        taken = self.pool.take(num_layers * count).reshape(num_layers, count)
        self.tables[:, row, first:stop] = taken
        self.num_blocks[row] = stop
        self._log.add(self.groups, np.full(count, row, np.int32), np.arange(first, stop, dtype=np.int32), taken)
        self._log_new(taken)

    def take_in(self, rows: Int32Array, counts: Int32Array) -> None:
        """Take counts [R], all >= 1, new columns for each of rows [R], in every layer."""
        columns = self.num_blocks.take(rows)
        self.num_blocks[rows] = columns + counts
        if np.add.reduce(counts) != len(rows):
            rows, columns = np.repeat(rows, counts), np.repeat(columns, counts) + count_up(counts)
        taken = self.pool.take(len(self.groups) * len(rows)).reshape(len(self.groups), len(rows))
        self._flat[:, self._places(rows, columns)] = taken
        self._log.add(self.groups, rows.astype(np.int32, copy=False), columns, taken)
        self._log_new(taken)

    def entries(self, rows: Int32Array, columns: Int32Array) -> Int32Array:
        """Entries at (row, column) pairs [C], of all layers; shape [groups, C]."""
        return self._flat.take(self._places(rows, columns), axis=1)

    def make_private(self, layer: int, row: int, column: int) -> None:
        """Give a row its own copy of a shared block that it is about to write into.

        The copy has an owner more and the shared block keeps this row as owner until the copy is taken from the log.
        """
        source = int(self.tables[layer, row, column])
        target = self.pool.take(1)
        self._log.add_new(int(self.groups[layer]), target)
        self.pool.touch(target)
        self.write(layer, row, column, target)
        self._log.add_copy(int(self.groups[layer]), source, int(target[0]))

    def copy_out(self, layer: int, row: int, column: int) -> int:
        """Let the prefix cache keep a copy of a block that the row goes on writing into; returns the copy.

        The hashes move to the copy. Both blocks have an owner more until the copy is taken from the log.
        """
        source = int(self.tables[layer, row, column])
        target = int(self.pool.take(1)[0])
        self.pool.move_hashes(source, target)
        self.pool.touch(np.array([source], np.int32))
        self._log.add_copy(int(self.groups[layer]), source, target)
        return target

    def free_entries(self, layers: Int32Array | int, rows: Int32Array, columns: Int32Array) -> None:
        """Free these entries, in order, and leave nulls."""
        self.pool.free(self.tables[layers, rows, columns])
        self.tables[layers, rows, columns] = NULL_BLOCK_ID

    def _log_new(self, taken: Int32Array) -> None:
        if self._log.has_zeroed_groups:
            for group, block_ids in zip(self.groups.tolist(), taken, strict=True):
                self._log.add_new(group, block_ids)

    def _places(self, rows: Int32Array, columns: Int32Array) -> Int64Array:
        return rows * self._num_columns + columns

    def drop(self, row: int) -> list[Int32Array]:
        """Forget a row and return its blocks per layer, in table order; their owner count is untouched."""
        dropped = [table[row, : self.num_blocks[row]].copy() for table in self.tables]
        self.num_blocks[row] = self.num_cached[row] = 0
        return dropped


def count_up(counts: Int32Array) -> Int32Array:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ...; shape [sum(counts)]."""
    offsets = np.arange(counts.sum(), dtype=np.int32)
    offsets -= np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    return offsets
