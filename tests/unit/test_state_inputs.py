"""Where a group's states lie while drafts are verified, and what is remembered and copied once some are accepted."""

import numpy as np
import torch
from support.draft_steps import BLOCK_SIZE, DraftStep, ints, table_of

from blockferry.engine.worker.state_inputs import StateBlocks, StateRows

CPU = torch.device("cpu")
TABLE = table_of(2)


def block(row, column):
    return int(TABLE.block_ids[row, column])


def step(computed, num_drafts, *, known=1):
    return DraftStep(computed=(computed,), known_lens=(known,), num_drafts=(num_drafts,)).rows


def sources(blocks, computed):
    return blocks.metadata(step(computed, 0), CPU).source_R.tolist()


def test_passes_write_the_running_column_and_those_behind_it():
    metadata = StateBlocks(TABLE, BLOCK_SIZE).metadata(step(6, 2), CPU)
    passes = (metadata, *metadata.later_passes)
    assert [one.source_R.tolist() for one in passes] == [[block(0, 1)], [block(0, 1)], [block(0, 2)]]
    assert [one.target_R.tolist() for one in passes] == [[block(0, 1)], [block(0, 2)], [block(0, 3)]]
    assert [one.tokens_t.tolist() for one in passes] == [[0], [1], [2]]


def test_a_pass_has_the_rows_that_have_so_many_drafts():
    rows = DraftStep(computed=(6, 6, 0), known_lens=(1, 1, 3), num_drafts=(1, 2, 0)).rows
    metadata = StateBlocks(table_of(3), BLOCK_SIZE).metadata(rows, CPU)
    assert [one.tokens_t.tolist() for one in (metadata, *metadata.later_passes)] == [[0, 2, 5, 6, 7], [1, 3], [4]]
    assert (metadata.num_rows, metadata.num_decode_rows, metadata.query_lens) == (3, 2, [1, 1, 3])


def test_next_step_starts_from_the_last_accepted_drafts_block():
    blocks = StateBlocks(TABLE, BLOCK_SIZE)
    assert not len(blocks.settle(step(4, 3), ints(2)))
    assert sources(blocks, 7) == [block(0, 3)]


def test_rejected_drafts_leave_the_state_in_the_running_column():
    blocks = StateBlocks(TABLE, BLOCK_SIZE)
    blocks.settle(step(4, 3), ints(0))
    assert sources(blocks, 5) == [block(0, 1)]


def test_a_state_is_found_where_the_ledger_moved_its_block():
    table = table_of(2)
    blocks = StateBlocks(table, BLOCK_SIZE)
    blocks.settle(step(4, 3), ints(2))
    moved = int(table.block_ids[0, 3])
    table.set(ints(0, 0), ints(3, 6), ints(99, moved))
    assert sources(blocks, 7) == [moved]


def test_the_step_after_that_is_a_usual_one():
    blocks = StateBlocks(TABLE, BLOCK_SIZE)
    blocks.settle(step(4, 3), ints(2))
    blocks.settle(step(7, 0), ints(0))
    assert sources(blocks, 8) == [block(0, 1)]


def test_a_row_that_ends_leaves_nothing_to_its_next_sequence():
    blocks = StateBlocks(TABLE, BLOCK_SIZE)
    blocks.settle(step(4, 3), ints(2))
    blocks.forget(0)
    assert sources(blocks, 7) == [block(0, 1)]


def test_other_rows_of_the_group_keep_theirs():
    blocks = StateBlocks(TABLE, BLOCK_SIZE)
    blocks.settle(DraftStep(computed=(4, 4), known_lens=(1, 1), num_drafts=(2, 2)).rows, ints(0, 2))
    blocks.settle(step(5, 0), ints(0))
    rows = StateRows(rows_R=ints(1), computed_R=ints(7), known_lens_R=ints(1), num_drafts_R=ints(0))
    assert blocks.metadata(rows, CPU).source_R.tolist() == [block(1, 3)]


def test_state_at_a_boundary_that_drafts_reached_or_passed_is_copied_into_the_running_block():
    for num_accepted in (2, 3):
        blocks = StateBlocks(TABLE, BLOCK_SIZE)
        copies = blocks.settle(step(5, 3), ints(num_accepted))  # 6 are known, 8 end the block
        assert copies.tolist() == [[block(0, 3), block(0, 1)]]


def test_state_at_a_boundary_that_the_known_token_reached_is_there_already():
    assert not len(StateBlocks(TABLE, BLOCK_SIZE).settle(step(7, 3), ints(3)))


def test_of_several_boundaries_passed_the_first_is_kept():
    copies = StateBlocks(TABLE, 2).settle(step(4, 5), ints(5))
    assert copies.tolist() == [[block(0, 3), block(0, 2)]]


def test_boundary_beyond_the_accepted_drafts_is_not_copied():
    assert not len(StateBlocks(TABLE, BLOCK_SIZE).settle(step(5, 3), ints(1)))


def test_rows_that_settle_together_do_as_each_would_alone():
    rows = DraftStep(computed=(5, 2), known_lens=(1, 1), num_drafts=(3, 2)).rows
    copies = StateBlocks(TABLE, BLOCK_SIZE).settle(rows, ints(3, 2))
    assert copies.tolist() == [[block(0, 3), block(0, 1)], [block(1, 1), block(1, 0)]]
    assert copies.dtype == np.int32
