"""One group's block table with the pool and the log behind it: every write to a row happens here.

Owns the table and how much of each row is cached. Decides nothing: the type managers do.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.type_manager import GroupContext
from blockferry.engine.request import Int32Array


class GroupTable:
    """Rows of blocks of one group. Mutated by its type manager only."""

    def __init__(self, context: GroupContext, *, max_blocks: int) -> None:
        """max_blocks is the longest row, in columns."""
        rows = context.rows
        self.group = context.group
        self.pool: BlockPool = context.pool
        self.table = BlockTable(max_rows=rows.max_rows, max_blocks=max_blocks)
        self.num_cached: Int32Array = np.zeros(rows.max_rows, np.int32)  # leading columns that caching is done with
        self._log = context.log

    def num_blocks(self, row: int) -> int:
        """Columns of the row, null ones included."""
        return int(self.table.num_blocks[row])

    def start(self, row: int, block_ids: Int32Array) -> None:
        """Begin a row with cached blocks and nulls; each block gets an owner more."""
        self.pool.touch(block_ids)
        self.append(row, block_ids)
        self.num_cached[row] = len(block_ids)

    def append(self, row: int, block_ids: Int32Array) -> None:
        """Give a row further blocks or nulls."""
        first = self.num_blocks(row)
        stop = first + len(block_ids)
        self.table.block_ids[row, first:stop] = block_ids
        self.table.num_blocks[row] = stop
        columns = np.arange(first, stop, dtype=np.int32)
        held = block_ids != NULL_BLOCK_ID
        if not held.all():
            columns, block_ids = columns[held], block_ids[held]
        self._log.add(self.group, np.full(len(block_ids), row, np.int32), columns, block_ids)

    def take_until(self, row: int, num_blocks: int) -> None:
        """Take new blocks until the row has num_blocks columns; the caller has checked that they are there."""
        missing = num_blocks - self.num_blocks(row)
        if missing > 0:
            block_ids = self.pool.take(missing)
            self._log.add_new(self.group, block_ids)
            self.append(row, block_ids)

    def take_in(self, rows: Int32Array, num_blocks: Int32Array) -> None:
        """Take num_blocks [R], all >= 1, for each of rows [R], in order."""
        block_ids = self.pool.take(int(num_blocks.sum()))
        columns = self.table.num_blocks.take(rows)
        if len(rows) != len(block_ids):
            rows, columns = np.repeat(rows, num_blocks), np.repeat(columns, num_blocks) + count_up(num_blocks)
        self.table.set(rows, columns, block_ids)
        self._log.add(self.group, rows, columns, block_ids)
        self._log.add_new(self.group, block_ids)

    def put(self, row: int, column: int, block_id: int) -> None:
        """Replace one entry."""
        self.table.block_ids[row, column] = block_id
        one = np.array([row, column, block_id], np.int32)
        self._log.add(self.group, one[0:1], one[1:2], one[2:3])

    def make_private(self, row: int, column: int) -> None:
        """Give a row its own copy of a shared block that it is about to write into.

        The copy has an owner more and the shared block keeps this row as owner until the copy is taken from the log.
        """
        source = int(self.table.block_ids[row, column])
        target = self.pool.take(1)
        self._log.add_new(self.group, target)
        self.pool.touch(target)
        self.put(row, column, int(target[0]))
        self._log.add_copy(self.group, source, int(target[0]))

    def copy_out(self, row: int, column: int) -> int:
        """Let the prefix cache keep a copy of a block that the row goes on writing into; returns the copy.

        The hashes move to the copy. Both blocks have an owner more until the copy is taken from the log.
        """
        source = int(self.table.block_ids[row, column])
        target = int(self.pool.take(1)[0])
        self.pool.move_hashes(source, target)
        self.pool.touch(np.array([source], np.int32))
        self._log.add_copy(self.group, source, target)
        return target

    def free_columns(self, rows: Int32Array, columns: Int32Array) -> None:
        """Free these entries, in order, and leave nulls."""
        self.pool.free(self.table.block_ids[rows, columns])
        self.table.block_ids[rows, columns] = NULL_BLOCK_ID

    def drop(self, row: int) -> Int32Array:
        """Forget a row and return its blocks in table order; their owner count is untouched."""
        block_ids = self.table.row(row).copy()
        self.table.clear(row)
        self.num_cached[row] = 0
        return block_ids


def count_up(counts: Int32Array) -> Int32Array:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ...; shape [sum(counts)]."""
    offsets = np.arange(counts.sum(), dtype=np.int32)
    offsets -= np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    return offsets
