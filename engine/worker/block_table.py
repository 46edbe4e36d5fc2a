"""From block tables to slots: where in the pool the step's tokens are written.

The table itself is the ledger's class (engine/kv/block_table.py); the worker owns one per cache group and
feeds it the plan's deltas.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.request import Int32Array, Int64Array
from blockferry.engine.wire import BlockDeltas

PAD_SLOT_ID = -1


def apply_deltas(tables: list[BlockTable], deltas: BlockDeltas) -> None:
    """Write the changes of each group into its table."""
    if not len(deltas):
        return
    if len(tables) == 1:
        tables[0].set(deltas.row, deltas.column, deltas.block_id)
        return
    for group, table in enumerate(tables):
        chosen = deltas.group == group
        table.set(deltas.row[chosen], deltas.column[chosen], deltas.block_id[chosen])


def slot_mapping(table: BlockTable, rows_T: Int32Array, positions_T: Int64Array, block_size: int) -> Int64Array:
    """int64 [T]: block_id * block_size + offset of each (row, position)."""
    blocks_T = table.block_ids[rows_T, positions_T // block_size].astype(np.int64)
    return blocks_T * block_size + positions_T % block_size
