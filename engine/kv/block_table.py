"""Block tables: which block holds which tokens of each row, and the log of their changes.

The scheduler's ledger and the workers use the same class; the ledger's DeltaLog carries the changes over.
"""

from __future__ import annotations

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
        self._pending: list[BlockDeltas] = []

    def add(self, group: int, rows: Int32Array, columns: Int32Array, block_ids: Int32Array) -> None:
        """Log entries as they are written into the group's table; the arrays are kept, not copied."""
        if len(block_ids):
            groups = np.full(len(block_ids), group, np.int32)
            self._pending.append(BlockDeltas(group=groups, row=rows, column=columns, block_id=block_ids))

    def forget(self, row: int) -> None:
        """Drop what is pending for a row that was freed, so that its next owner starts clean."""
        self._pending = [_without_row(deltas, row) for deltas in self._pending]

    def take(self) -> BlockDeltas:
        """Everything logged since the last take, in order."""
        pending, self._pending = self._pending, []
        if not pending:
            return NO_DELTAS
        if len(pending) == 1:
            return pending[0]
        return BlockDeltas(
            group=np.concatenate([deltas.group for deltas in pending]),
            row=np.concatenate([deltas.row for deltas in pending]),
            column=np.concatenate([deltas.column for deltas in pending]),
            block_id=np.concatenate([deltas.block_id for deltas in pending]),
        )


def _without_row(deltas: BlockDeltas, row: int) -> BlockDeltas:
    keep = deltas.row != row
    if keep.all():
        return deltas
    return BlockDeltas(
        group=deltas.group[keep], row=deltas.row[keep], column=deltas.column[keep], block_id=deltas.block_id[keep]
    )
