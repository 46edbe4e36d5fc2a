"""Block tables: which block holds which tokens of each row.

The scheduler's ledger and the workers use the same class; the ledger's log carries the changes over.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.request import Int32Array


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
