"""Block tables: which block holds which tokens of each row, and the log of their changes.

The scheduler's ledger and the workers use the same class; the ledger's DeltaLog carries the changes over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blockferry.engine.request import Int32Array
from blockferry.engine.wire import NO_DELTAS, BlockDeltas


class BlockTable:
    """One cache group's table: block_ids[row, column] is the block of tokens [column * block_size, ...).

    Entries at and beyond num_blocks[row] are undefined. Mutated by its one owner.
    """

    def __init__(self, *, max_rows: int, max_blocks: int) -> None:
        self.block_ids: Int32Array = np.zeros((max_rows, max_blocks), np.int32)
        self.num_blocks: Int32Array = np.zeros(max_rows, np.int32)

    def set(self, rows: Int32Array, columns: Int32Array, block_ids: Int32Array) -> None:
        """Write entries, three arrays of one length; rows grow to hold their last column."""
        self.block_ids[rows, columns] = block_ids
        np.maximum.at(self.num_blocks, rows, columns + 1)

    def row(self, row: int) -> Int32Array:
        """View of a row's blocks, shape [num_blocks]; valid until the row changes."""
        return self.block_ids[row, : self.num_blocks[row]]

    def clear(self, row: int) -> None:
        """Forget a row."""
        self.num_blocks[row] = 0


class DeltaLog:
    """Block table changes since the last take, as arrays. Owned by the ledger; shared by its groups."""

    def __init__(self) -> None:
        self._pending: list[_Change] = []

    def add(self, group: int, rows: Int32Array, columns: Int32Array, block_ids: Int32Array) -> None:
        """Log entries as they are written into the group's table; the arrays are kept, not copied."""
        if len(block_ids):
            self._pending.append(_Change(group, rows, columns, block_ids))

    def forget(self, row: int) -> None:
        """Drop what is pending for a row that was freed, so that its next owner starts clean."""
        self._pending = [change.without(row) for change in self._pending]

    def take(self) -> BlockDeltas:
        """Everything logged since the last take, in order."""
        pending, self._pending = self._pending, []
        if not pending:
            return NO_DELTAS
        if len(pending) == 1:
            group, rows, columns, block_ids = pending[0]
            groups = np.full(len(block_ids), group, np.int32)
            return BlockDeltas(group=groups, row=rows, column=columns, block_id=block_ids)
        return BlockDeltas(
            group=np.concatenate([np.full(len(change.block_ids), change.group, np.int32) for change in pending]),
            row=np.concatenate([change.rows for change in pending]),
            column=np.concatenate([change.columns for change in pending]),
            block_id=np.concatenate([change.block_ids for change in pending]),
        )


class _Change(NamedTuple):
    """One write; a NamedTuple because one is made per decode step and a frozen dataclass costs three times as much."""

    group: int
    rows: Int32Array
    columns: Int32Array
    block_ids: Int32Array

    def without(self, row: int) -> _Change:
        keep = self.rows != row
        return _Change(self.group, self.rows[keep], self.columns[keep], self.block_ids[keep])
