"""Steps that verify drafts on hand-made tables, and the one-token steps that they must equal.

Legend: see engine/models/state_ops.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.models.state_ops import StateMetadata
from blockferry.engine.worker.state_inputs import StateBlocks, StateRows

BLOCK_SIZE = 4
NUM_COLUMNS = 12


def ints(*values):
    return np.array(values, np.int32)


def table_of(num_rows):
    """A table whose row r has blocks r * NUM_COLUMNS + 1 and so on; that many blocks there are, and the null block."""
    table = BlockTable(max_rows=num_rows, max_blocks=NUM_COLUMNS)
    table.block_ids[:] = np.arange(1, num_rows * NUM_COLUMNS + 1).reshape(num_rows, NUM_COLUMNS)
    table.num_blocks[:] = NUM_COLUMNS
    return table


def num_blocks_of(num_rows):
    return num_rows * NUM_COLUMNS + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftStep:
    """A step of rows 0, 1, ..: tokens computed before, known ones to compute, drafts after them."""

    computed: tuple[int, ...]
    known_lens: tuple[int, ...]
    num_drafts: tuple[int, ...]

    @property
    def rows(self):
        return StateRows(
            rows_R=np.arange(len(self.computed), dtype=np.int32),
            computed_R=ints(*self.computed),
            known_lens_R=ints(*self.known_lens),
            num_drafts_R=ints(*self.num_drafts),
        )

    @property
    def num_tokens(self):
        return sum(self.known_lens) + sum(self.num_drafts)

    def metadata(self, device="cpu") -> StateMetadata:
        blocks = StateBlocks(table_of(len(self.computed)), BLOCK_SIZE)
        return blocks.metadata(self.rows, torch.device(device))

    def alone(self, device="cpu"):
        """(tokens in the step, metadata) of plain steps: one of each row's known tokens, then one of each draft."""
        begin = 0
        for row, (computed, known, drafts) in enumerate(zip(self.computed, self.known_lens, self.num_drafts)):
            running = (computed + known - 1) // BLOCK_SIZE
            columns = [max(computed - 1, 0) // BLOCK_SIZE, *(running + draft for draft in range(drafts + 1))]
            for place, length in enumerate([known] + [1] * drafts):
                source, target = (row * NUM_COLUMNS + 1 + column for column in columns[place : place + 2])
                yield (
                    slice(begin, begin + length),
                    plain_row(length, source, target, computed == 0 and not place, device),
                )
                begin += length


def plain_row(num_tokens, source, target, is_fresh, device):
    """A step of one row."""
    return StateMetadata(
        num_rows=1,
        num_decode_rows=int(num_tokens == 1),
        num_tokens=num_tokens,
        query_start_R1=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        source_R=torch.tensor([source], device=device),
        target_R=torch.tensor([target], device=device),
        is_fresh_R=torch.tensor([is_fresh], device=device),
        query_lens=[num_tokens],
        is_fresh=[is_fresh],
    )


MIXED_STEP = DraftStep(
    computed=(5, 7, 8, 10, 0, 6),
    known_lens=(1, 1, 1, 1, 1, 5),
    num_drafts=(0, 3, 2, 1, 2, 0),
)
"""A decode row, rows that verify within a block, across its end and from it on, and from nothing, and a prefill row."""


def run_both(ops, verifying, recurrence, inputs, state, step, device="cpu"):
    """((outputs, states) of one step in passes, the same of plain steps one after the other)."""
    state_passes, state_alone = state.clone(), state.clone()
    out = recurrence.run(verifying, inputs, state_passes, step.metadata(device))
    expected = torch.cat(
        [
            recurrence.run(ops, inputs.tokens(tokens.start, tokens.stop), state_alone, metadata)
            for tokens, metadata in step.alone(device)
        ]
    )
    return (out, state_passes), (expected, state_alone)
