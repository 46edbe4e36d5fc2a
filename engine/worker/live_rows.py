"""What a worker knows of the rows that run: tokens, drafts, block tables, where states lie, how tokens are drawn.

Owns these arrays and keeps them as the scheduler's plans say. Computes nothing.

Legend: S sampling rows of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.model_layers import ModelLayers
from blockferry.engine.kv.reach import SequenceLimits, SpecKind
from blockferry.engine.kv.spec import KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.acceptance import Accepted, draft_positions
from blockferry.engine.wire import StepPlan
from blockferry.engine.worker.block_table import apply_deltas
from blockferry.engine.worker.inputs import GroupTable
from blockferry.engine.worker.sampling_state import SamplingState
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.state_inputs import StateBlocks


class LiveRows:
    """Called by the worker's model thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Without cache groups, which open() brings."""
        self._spec = spec
        # one more than the longest sequence: its last sampled token is never computed
        self.table = RowTable(max_rows=spec.max_rows, max_model_len=spec.max_model_len + 1)
        self.sampling = SamplingState(spec.max_rows)
        self.groups: list[GroupTable] = []
        self.states: dict[int, StateBlocks] = {}  # by cache group
        self._block_tables: list[BlockTable] = []
        self._unencoded: dict[int, Int32Array] = {}  # by row: an encoder's input that is still to be read

    def open(self, ledger: KVCacheConfig, model: ModelLayers) -> None:
        """Make the block tables of a pool; what those of another one held is forgotten."""
        self.groups = [self._group_table(group, model) for group in ledger.groups]
        self.states = {i: group.states for i, group in enumerate(self.groups) if group.states is not None}
        self._block_tables = [group.table for group in self.groups]

    def _group_table(self, group: KVCacheGroup, model: ModelLayers) -> GroupTable:
        spec = group.spec
        limits = SequenceLimits(
            max_model_len=self._spec.max_model_len + 1,
            max_in_flight_tokens=self._spec.max_num_batched_tokens,
            max_num_encoder_tokens=model.num_encoder_tokens,
        )
        table = BlockTable(max_rows=self._spec.max_rows, max_blocks=spec.max_num_blocks_per_req(limits) + 1)
        return GroupTable(
            table=table,
            block_size=spec.tokens_per_block,
            states=StateBlocks(table, spec.tokens_per_block) if spec.kind is SpecKind.MAMBA else None,
            is_cross=spec.kind is SpecKind.CROSS_ATTENTION,
        )

    def apply(self, plan: StepPlan) -> None:
        """Rows, drafts and block tables as the plan wants them before it is computed."""
        for row in plan.freed_rows.tolist():
            self.forget(row)
        for new_row in plan.new_rows:
            self.table.assign(
                new_row.row,
                new_row.token_ids,
                num_prompt_tokens=new_row.num_prompt_tokens,
                num_encoder_tokens=new_row.num_encoder_tokens,
            )
            if new_row.encoder_token_ids is not None:
                self._unencoded[new_row.row] = new_row.encoder_token_ids
            self.sampling.assign(new_row)
        if len(plan.draft_token_ids):
            drafted = np.repeat(plan.rows, plan.num_drafts)
            self.table.put_drafts(drafted, draft_positions(plan), plan.draft_token_ids)
        apply_deltas(self._block_tables, plan.deltas)

    def take_unencoded(self, plan: StepPlan) -> Iterator[tuple[int, Int32Array]]:
        """(row, encoder's input) of the plan's rows that have not been encoded yet; each once."""
        for row in [row for row in plan.rows.tolist() if row in self._unencoded]:
            yield row, self._unencoded.pop(row)

    def append(self, rows_S: Int32Array, accepted: Accepted) -> None:
        """What counts of a step's tokens, at least one for each of its sampling rows."""
        if len(accepted.token_ids) == len(rows_S):
            self.table.append(rows_S, accepted.token_ids)
        else:
            self.table.append_several(rows_S, accepted.token_ids, accepted.num_tokens_S)

    def forget(self, row: int) -> None:
        """The row is free."""
        self.table.clear(row)
        self._unencoded.pop(row, None)
        for table in self._block_tables:
            table.clear(row)
        for states in self.states.values():
            states.forget(row)
