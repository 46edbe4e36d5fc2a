"""From a plan's rows to the model's inputs: tokens, positions, slots, and each group's metadata, all vectorised.

Owns nothing. Reorders rows; `last_token_R` undoes that:

    decode rows (one token) | verifying rows (a token and drafts) | prefill rows

Attention takes every token of a verifying row for a row of its own, so that it is computed as a decode step would have:
its keys are all written before any of them is read.

Legend: R rows, Q rows as attention sees them, T tokens, N tokens of an encoder's input, M blocks of the longest row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.request import BoolArray, Int32Array, Int64Array
from blockferry.engine.rows import RowTable
from blockferry.engine.wire import NewRow, StepPlan
from blockferry.engine.worker.block_table import PAD_SLOT_ID, slot_mapping
from blockferry.engine.worker.paged_caches import GroupMetadata
from blockferry.engine.worker.state_inputs import StateBlocks, StateRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step as the model sees it; tensors on the model's device."""

    token_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    metadata: tuple[GroupMetadata, ...]  # per cache group
    rows_T: Int32Array
    places_T: Int64Array  # positions_T on the host
    first_token_R: Int64Array  # in plan order: place in T of the row's first token
    last_token_R: Int64Array  # in plan order: place in T of the row's last token

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.token_ids_T)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """One cache group's block table and how to read it."""

    table: BlockTable
    block_size: int  # tokens
    states: StateBlocks | None = None  # a block is the state after its last token that was computed, not the tokens
    is_cross: bool = False  # the tokens are those of the encoder's input


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """What an encoder reads for one row, and where the keys and values that come of it are written."""

    token_ids_N: torch.Tensor  # int32
    slots_N: tuple[torch.Tensor | None, ...]  # int64, per cache group; None: not of cross attention


def encoder_input(
    row: int, token_ids_N: Int32Array, groups: Sequence[GroupTable], *, device: torch.device
) -> EncoderInput:
    """Of a row whose block tables are up to date."""
    positions_N = np.arange(len(token_ids_N))
    rows_N = np.full(len(token_ids_N), row, np.int32)
    slots_N = [
        _to(slot_mapping(group.table, rows_N, positions_N, group.block_size), device) if group.is_cross else None
        for group in groups
    ]
    return EncoderInput(token_ids_N=_to(token_ids_N, device), slots_N=tuple(slots_N))


def build_inputs(plan: StepPlan, rows: RowTable, groups: Sequence[GroupTable], *, device: torch.device) -> StepInputs:
    """Inputs of a plan whose rows, tokens, drafts and block tables are up to date; at least one row."""
    kinds_R = _kinds(plan)
    order = np.argsort(kinds_R, kind="stable")
    batch = _batch(plan, rows, order, kinds_R[order])
    ends_R = batch.query_start_R1[1:].astype(np.int64)
    first_R, last_R = np.empty_like(ends_R), np.empty_like(ends_R)
    first_R[order], last_R[order] = batch.query_start_R1[:-1], ends_R - 1
    queries = _queries(batch)
    return StepInputs(
        token_ids_T=_to(rows.token_ids[batch.rows_T, batch.positions_T], device),
        positions_T=_to(batch.positions_T, device),
        metadata=tuple(_metadata(batch, queries, group, device) for group in groups),
        rows_T=batch.rows_T,
        places_T=batch.positions_T,
        first_token_R=first_R,
        last_token_R=last_R,
    )


def one_token_metadata(
    rows_R: Int32Array, positions_R: Int32Array, has_slot_R: BoolArray, *, group: GroupTable, device: torch.device
) -> AttentionMetadata:
    """Of decode rows at positions whose blocks are in the group's table; those that have no slot write nothing."""
    num_rows, seq_lens_R = len(rows_R), positions_R + np.int32(1)
    seq_lens = seq_lens_R.tolist()
    slots_R = slot_mapping(group.table, rows_R, positions_R.astype(np.int64), group.block_size)
    slots_R[~has_slot_R] = PAD_SLOT_ID
    return AttentionMetadata(
        num_rows=num_rows,
        num_decode_rows=num_rows,
        num_tokens=num_rows,
        max_query_len=1,
        max_seq_len=max(seq_lens),
        query_start_R1=_to(np.arange(num_rows + 1, dtype=np.int32), device),
        seq_lens_R=_to(seq_lens_R, device),
        block_table_RM=_to(group.table.block_ids[rows_R, : -(-max(seq_lens) // group.block_size)], device),
        slot_mapping_T=_to(slots_R, device),
        query_lens=[1] * num_rows,
        seq_lens=seq_lens,
    )


_VERIFYING, _PREFILL = 1, 2


def _kinds(plan: StepPlan) -> Int32Array:
    """int32 [R]: 0 for decode rows, then verifying and prefill rows."""
    kinds_R = np.where(plan.num_scheduled > 1, np.int32(_PREFILL), np.int32(0))
    if len(plan.draft_token_ids):
        kinds_R[plan.num_drafts > 0] = _VERIFYING
    return kinds_R


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Rows in batch order."""

    num_decode_rows: int  # of one token, no drafts
    num_verifying_rows: int
    rows_R: Int32Array
    rows_T: Int32Array
    positions_T: Int64Array
    seq_lens_R: Int32Array  # drafts included
    query_lens_R: Int32Array
    query_start_R1: Int32Array
    num_drafts_R: Int32Array  # the last tokens of query_lens_R
    encoder_lens_T: Int32Array
    is_new_R: BoolArray  # starts with this step, perhaps on a prefix that this very step computes


def _batch(plan: StepPlan, rows: RowTable, order: Int64Array, kinds_R: Int32Array) -> _Batch:
    """The plan's rows in this order, of these kinds in it."""
    rows_R, computed_R, scheduled_R = plan.rows[order], plan.num_computed[order], plan.num_scheduled[order]
    num_decode_rows = int(np.count_nonzero(kinds_R == 0))
    query_start_R1 = np.zeros(len(rows_R) + 1, np.int32)
    np.cumsum(scheduled_R, out=query_start_R1[1:])
    if num_decode_rows == len(rows_R):
        rows_T, positions_T = rows_R, computed_R.astype(np.int64)
    else:
        rows_T = np.repeat(rows_R, scheduled_R)
        positions_T = np.arange(len(rows_T)) + np.repeat(computed_R - query_start_R1[:-1], scheduled_R)
    return _Batch(
        num_decode_rows=num_decode_rows,
        num_verifying_rows=int(np.count_nonzero(kinds_R == _VERIFYING)),
        rows_R=rows_R,
        rows_T=rows_T,
        positions_T=positions_T,
        seq_lens_R=computed_R + scheduled_R,
        query_lens_R=scheduled_R,
        query_start_R1=query_start_R1,
        num_drafts_R=plan.num_drafts[order] if len(plan.num_drafts) else np.zeros(len(rows_R), np.int32),
        encoder_lens_T=rows.num_encoder_tokens[rows_T],
        is_new_R=_are_new(rows_R, plan.new_rows),
    )


def _are_new(rows_R: Int32Array, new_rows: Sequence[NewRow]) -> BoolArray:
    if not new_rows:  # nearly always, and isin() takes its time
        return np.zeros(len(rows_R), np.bool_)
    return np.isin(rows_R, [new_row.row for new_row in new_rows])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Queries:
    """The batch as attention sees it."""

    num_decode_rows: int
    rows_Q: Int32Array
    seq_lens_Q: Int32Array
    query_lens_Q: Int32Array
    query_start_Q1: Int32Array


def _queries(batch: _Batch) -> _Queries:
    if not batch.num_verifying_rows:
        return _Queries(
            num_decode_rows=batch.num_decode_rows,
            rows_Q=batch.rows_R,
            seq_lens_Q=batch.seq_lens_R,
            query_lens_Q=batch.query_lens_R,
            query_start_Q1=batch.query_start_R1,
        )
    num_alone = batch.num_decode_rows + batch.num_verifying_rows  # the rest are prefill rows
    num_tokens = int(batch.query_start_R1[num_alone])
    starts = np.arange(num_tokens, dtype=np.int32)
    return _Queries(
        num_decode_rows=num_tokens,
        rows_Q=np.concatenate((batch.rows_T[:num_tokens], batch.rows_R[num_alone:])),
        seq_lens_Q=np.concatenate(
            (batch.positions_T[:num_tokens].astype(np.int32) + np.int32(1), batch.seq_lens_R[num_alone:])
        ),
        query_lens_Q=np.concatenate((np.ones(num_tokens, np.int32), batch.query_lens_R[num_alone:])),
        query_start_Q1=np.concatenate((starts, batch.query_start_R1[num_alone:])),
    )


def _metadata(batch: _Batch, queries: _Queries, group: GroupTable, device: torch.device) -> GroupMetadata:
    if group.states is not None:
        return GroupMetadata(states=group.states.metadata(_state_rows(batch), device))
    if group.is_cross:
        return GroupMetadata(attention=_cross_metadata(batch, group, device))
    return GroupMetadata(attention=_attention_metadata(batch, queries, group, device))


def _attention_metadata(batch: _Batch, queries: _Queries, group: GroupTable, device: torch.device) -> AttentionMetadata:
    table, block_size = group.table, group.block_size
    max_seq_len = int(queries.seq_lens_Q.max())
    num_columns = -(-max_seq_len // block_size)
    slots_T = slot_mapping(table, batch.rows_T, batch.positions_T, block_size)
    return AttentionMetadata(
        num_rows=len(queries.rows_Q),
        num_decode_rows=queries.num_decode_rows,
        num_tokens=len(batch.rows_T),
        max_query_len=int(queries.query_lens_Q.max()),
        max_seq_len=max_seq_len,
        query_start_R1=_to(queries.query_start_Q1, device),
        seq_lens_R=_to(queries.seq_lens_Q, device),
        block_table_RM=_to(table.block_ids[queries.rows_Q, :num_columns], device),
        slot_mapping_T=_to(slots_T, device),
        query_lens=queries.query_lens_Q.tolist(),
        seq_lens=queries.seq_lens_Q.tolist(),
        shares_writes=batch.num_verifying_rows > 0 or _shares_writes(batch, group, slots_T),
    )


def _shares_writes(batch: _Batch, group: GroupTable, slots_T: Int64Array) -> bool:
    """Whether a new row's prefix lies in blocks that the step writes. Its own tokens come after its prefix's blocks."""
    if len(batch.rows_R) == 1 or not batch.is_new_R.any():
        return False
    written = np.unique(slots_T // group.block_size)
    num_before_R = (batch.seq_lens_R - batch.query_lens_R) // group.block_size
    prefixes = zip(batch.rows_R[batch.is_new_R].tolist(), num_before_R[batch.is_new_R].tolist())
    return any(np.isin(group.table.block_ids[row, :num_before], written).any() for row, num_before in prefixes)


def _cross_metadata(batch: _Batch, group: GroupTable, device: torch.device) -> AttentionMetadata:
    """Every token is a row of its own, the newest after all of the encoder's input: it sees all, and writes nothing."""
    num_tokens, max_seq_len = len(batch.rows_T), int(batch.encoder_lens_T.max())
    num_columns = -(-max_seq_len // group.block_size)
    return AttentionMetadata(
        num_rows=num_tokens,
        num_decode_rows=num_tokens,
        num_tokens=num_tokens,
        max_query_len=1,
        max_seq_len=max_seq_len,
        query_start_R1=_to(np.arange(num_tokens + 1, dtype=np.int32), device),
        seq_lens_R=_to(batch.encoder_lens_T, device),
        block_table_RM=_to(group.table.block_ids[batch.rows_T, :num_columns], device),
        slot_mapping_T=_to(np.full(num_tokens, PAD_SLOT_ID, np.int64), device),
        query_lens=[1] * num_tokens,
        seq_lens=batch.encoder_lens_T.tolist(),
    )


def _state_rows(batch: _Batch) -> StateRows:
    return StateRows(
        rows_R=batch.rows_R,
        computed_R=batch.seq_lens_R - batch.query_lens_R,
        known_lens_R=batch.query_lens_R - batch.num_drafts_R,
        num_drafts_R=batch.num_drafts_R,
    )


def _to(array: Int32Array | Int64Array | BoolArray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
