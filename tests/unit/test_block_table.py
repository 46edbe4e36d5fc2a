"""Block tables and the log of their changes."""

import numpy as np

from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.ledger_log import LedgerLog
from blockferry.engine.request import Int32Array
from blockferry.engine.wire import NO_DELTAS


def ints(*values: int) -> Int32Array:
    return np.asarray(values, np.int32)


def test_rows_grow_to_their_last_column() -> None:
    table = BlockTable(max_rows=3, max_blocks=4)
    table.set(ints(0, 2, 2), ints(0, 0, 1), ints(7, 8, 9))
    assert table.row(0).tolist() == [7]
    assert table.row(1).tolist() == []
    assert table.row(2).tolist() == [8, 9]


def test_overwriting_an_early_column_does_not_shorten_the_row() -> None:
    table = BlockTable(max_rows=1, max_blocks=4)
    table.set(ints(0, 0, 0), ints(0, 1, 2), ints(7, 8, 9))
    table.set(ints(0), ints(0), ints(0))
    assert table.row(0).tolist() == [0, 8, 9]


def test_cleared_row_holds_nothing() -> None:
    table = BlockTable(max_rows=1, max_blocks=4)
    table.set(ints(0), ints(0), ints(7))
    table.clear(0)
    assert table.row(0).tolist() == []


def test_taken_deltas_are_in_order_and_taken_once() -> None:
    log = LedgerLog()
    log.add(ints(0), ints(1, 1), ints(0, 1), ints(5, 6))
    log.add(ints(1), ints(2), ints(0), ints(7))
    deltas = log.take()
    assert deltas.group.tolist() == [0, 0, 1]
    assert deltas.row.tolist() == [1, 1, 2]
    assert deltas.column.tolist() == [0, 1, 0]
    assert deltas.block_id.tolist() == [5, 6, 7]
    assert log.take() is NO_DELTAS


def test_groups_that_change_alike_are_logged_as_one() -> None:
    log = LedgerLog()
    log.add(ints(0, 2), ints(5, 6), ints(1, 1), np.array([[7, 8], [9, 10]], np.int32))
    log.forget(6)
    deltas = log.take()
    assert [deltas.group.tolist(), deltas.row.tolist(), deltas.block_id.tolist()] == [[0, 2], [5, 5], [7, 9]]


def test_freed_row_leaves_no_pending_deltas() -> None:
    log = LedgerLog()
    log.add(ints(0), ints(1, 2), ints(0, 0), ints(5, 6))
    log.forget(1)
    assert log.take().row.tolist() == [2]


def test_deltas_rebuild_the_table_elsewhere() -> None:
    log, here, there = LedgerLog(), BlockTable(max_rows=2, max_blocks=3), BlockTable(max_rows=2, max_blocks=3)
    for rows, columns, block_ids in [(ints(0, 1), ints(0, 0), ints(4, 5)), (ints(1, 1), ints(1, 2), ints(6, 7))]:
        here.set(rows, columns, block_ids)
        log.add(ints(0), rows, columns, block_ids)
    deltas = log.take()
    there.set(deltas.row, deltas.column, deltas.block_id)
    assert [there.row(row).tolist() for row in (0, 1)] == [here.row(row).tolist() for row in (0, 1)]


def test_only_chosen_groups_have_blocks_to_clear() -> None:
    log = LedgerLog(zeroed_groups=[1])
    log.add_new(0, ints(3))
    log.add_new(1, ints(4, 5))
    log.add_new(1, ints(6))
    assert log.take_zero().tolist() == [[1, 4], [1, 5], [1, 6]]
    assert log.take_zero().tolist() == []
