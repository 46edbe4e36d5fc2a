"""The audit of the scheduler: proves that rows, queues, ledgers and hand-offs agree. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from blockferry.connectors.base import TransferPart
from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID
from blockferry.engine.kv.groups import rule_of
from blockferry.engine.kv.reach import cdiv
from blockferry.engine.request import Int32Array, Int64Array
from blockferry.engine.scheduler.batch import Phase
from blockferry.engine.scheduler.handoff import Handoff, HandoffState
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.membership import Member, MemberState
from blockferry.engine.scheduler.sequence import Ticket

_WITHOUT_SEQUENCE = (Phase.FREE, Phase.ENDED)
_WITHOUT_BLOCKS = (Phase.FREE, Phase.ENDED, Phase.DRAINING)


class _InFlight(NamedTuple):
    """Of steps whose results have not arrived, per row; [rows]."""

    samples: Int64Array  # tokens that will come
    drafts: Int64Array  # and those that may

    @classmethod
    def of(cls, instance: Instance) -> _InFlight:
        """Count the records."""
        in_flight = cls(*np.zeros((2, instance.batch.max_rows), np.int64))
        for record in instance.in_flight:
            in_flight.samples[record.sampled.rows] += 1
            if len(record.num_drafts):
                in_flight.drafts[record.sampled.rows] += record.num_drafts
        return in_flight


def check_member(member: Member) -> None:
    """Check one instance, and that it holds nothing where its state says so. Raises LedgerCorrupted."""
    instance = member.instance
    check_instance(instance)
    if member.state in (MemberState.DRAINED, MemberState.FAILED):
        num_held = instance.kv.num_usable_blocks - instance.kv.num_free_blocks
        _require(num_held == 0, instance, f"it is {member.state} and holds blocks", num_held)
        _require(not instance.batch.num_occupied, instance, f"it is {member.state} and has rows in use", member.state)
        _require(not len(instance.queue), instance, f"it is {member.state} and requests wait", len(instance.queue))


def check_instance(instance: Instance) -> None:
    """Check one instance's ledger, then every row against it. Raises LedgerCorrupted."""
    instance.kv.check_integrity()
    instance.tiers.check()
    in_flight = _InFlight.of(instance)
    for row in range(instance.batch.max_rows):
        _check_row(instance, row, in_flight)
    _check_order(instance)
    for sequence in instance.queue:
        _require(sequence.row is None, instance, "a waiting sequence has a row", sequence.row)
    num_counted, num_waiting = instance.queue.prefixes.num_counted, instance.queue.num_digests
    _require(num_counted == num_waiting, instance, f"prefixes of {num_waiting} digests wait, counted are", num_counted)


def check_tickets(tickets: Iterable[Ticket], instances: Mapping[str, Instance]) -> None:
    """Check that every unfinished request waits or has a row somewhere. Raises LedgerCorrupted."""
    for ticket in tickets:
        sequence = ticket.sequence
        if sequence is None:
            raise LedgerCorrupted(f"request {ticket.handle} is nowhere")
        instance = instances[sequence.instance_id]
        is_waiting = sequence in instance.queue
        _require(is_waiting != (sequence.row is not None), instance, "a request neither waits nor runs", ticket.handle)


def check_handoffs(handoffs: Iterable[Handoff], instances: Mapping[str, Instance]) -> None:
    """Check that hand-offs join instances that exist and hold what their state says. Raises LedgerCorrupted."""
    for handoff in handoffs:
        for side in (handoff.source, handoff.target):
            _require(side.instance_id in instances, side, "a hand-off involves what has left", handoff.ticket.handle)
        is_reserved = handoff.target_sequence.row is not None
        if is_reserved != (handoff.state is not HandoffState.WAITING):
            raise LedgerCorrupted(f"request {handoff.ticket.handle} is {handoff.state}, reserved: {is_reserved}")
        if is_reserved:
            phase = handoff.target.batch.phase[handoff.target_row]
            _require(phase == Phase.INCOMING, handoff.target, "a reserved row is not INCOMING", handoff.target_row)
        for parts in handoff.under_way.values():
            _check_transfer(handoff, parts)


def _check_transfer(handoff: Handoff, parts: Iterable[TransferPart]) -> None:
    """Bytes may be under way: the blocks they reach are held, those they leave while they are wanted."""
    target = handoff.target
    _require(handoff.is_passable, target, f"a transfer runs before step {handoff.fence_step} retired", handoff)
    for part in parts:
        _check_held(target, handoff.target_row, part.dst_group, part.dst_block_ids)
        if handoff.state is not HandoffState.QUIESCING:
            _check_held(handoff.source, handoff.source_row, part.src_group, part.src_block_ids)


def _check_held(instance: Instance, row: int, group: int, block_ids: Int32Array) -> None:
    lost = np.setdiff1d(block_ids, instance.kv.block_ids(row, group)).tolist()
    _require(not lost, instance, f"row {row} gave blocks of group {group} back that are ferried", lost)
    _require(NULL_BLOCK_ID not in block_ids, instance, f"row {row} ferries null blocks of group", group)


def _check_row(instance: Instance, row: int, in_flight: _InFlight) -> None:
    batch, table = instance.batch, instance.rows
    phase = Phase(batch.phase[row])
    sequence = batch.sequences[row]
    _require((sequence is None) == (phase in _WITHOUT_SEQUENCE), instance, f"phase {phase.name} and sequence", row)
    num_blocks = sum(instance.kv.num_blocks(row, group) for group in range(instance.kv.num_groups))
    if phase in _WITHOUT_BLOCKS:
        _require(num_blocks == 0, instance, f"a row in {phase.name} holds {num_blocks} blocks", row)
    if sequence is None:
        _require(not instance.speculation.num_kept(row), instance, "a row without sequence keeps drafts", row)
        return
    _require(sequence.row == row, instance, f"its sequence claims row {sequence.row}", row)
    num_tokens, num_computed = int(table.num_tokens[row]), int(table.num_computed_tokens[row])
    num_in_flight = instance.num_in_flight(row)
    num_certain, num_drafts = int(in_flight.samples[row]), int(in_flight.drafts[row])
    num_sent = num_certain + num_drafts
    _require(num_in_flight == num_sent, instance, f"{num_in_flight} samples in flight, not {num_sent}", row)
    num_planned = num_tokens + num_in_flight
    _require(num_planned <= batch.limit[row], instance, f"{num_planned} tokens planned, limit {batch.limit[row]}", row)
    if phase is Phase.DECODE:
        is_open = num_tokens + num_certain < batch.limit[row]
        _require(is_open, instance, "a decode row has nothing left to sample", row)
    _check_drafts(instance, row)
    if phase not in _WITHOUT_BLOCKS:
        _check_blocks(instance, row)
    if phase is Phase.DECODE:
        num_expected = num_tokens + num_in_flight - 1
        _require(num_computed == num_expected, instance, f"{num_computed} computed, not {num_expected}", row)


def _check_drafts(instance: Instance, row: int) -> None:
    """Drafts are kept by rows that decode only, or whose drafts will travel, and fit in front of the row's end."""
    phase, num_drafts = Phase(instance.batch.phase[row]), instance.speculation.num_kept(row)
    num_room = instance.rows.max_model_len - int(instance.rows.num_tokens[row]) - 1
    _require(num_drafts <= max(0, num_room), instance, f"{num_drafts} drafts and room for {num_room}", row)
    can_keep = phase in (Phase.DECODE, Phase.PARKED)
    _require(can_keep or not num_drafts, instance, f"a row in {phase.name} keeps {num_drafts} drafts", row)


def _check_blocks(instance: Instance, row: int) -> None:
    """The row must hold every block that its next token reads, in every group; once all has come that is to come."""
    num_computed = int(instance.rows.num_computed_tokens[row])
    if instance.batch.phase[row] == Phase.INCOMING:
        num_computed = int(instance.rows.num_tokens[row])
    num_prompt_tokens = int(instance.rows.num_prompt_tokens[row])
    for number, group in enumerate(instance.kv.config.groups):
        rule = rule_of(group.spec)
        if rule is None:
            continue
        size = group.spec.tokens_per_block
        is_read = np.zeros(cdiv(num_computed, size), np.bool_)
        is_read[max(0, rule.num_skipped(num_computed) // size) :] = True
        is_read[: rule.first_skippable(num_prompt_tokens, size)] = True
        block_ids = instance.kv.block_ids(row, number)
        is_held = np.zeros(len(is_read), np.bool_)
        is_held[: len(block_ids)] = block_ids[: len(is_read)] != NULL_BLOCK_ID
        lost = np.flatnonzero(is_read & ~is_held).tolist()
        _require(not lost, instance, f"group {number} lacks columns {lost} of {num_computed} computed tokens", row)


def _check_order(instance: Instance) -> None:
    batch = instance.batch
    decode_rows = batch.decode_rows().tolist()
    prefill_rows = batch.prefill_rows()
    for rows, phase in ((decode_rows, Phase.DECODE), (prefill_rows, Phase.PREFILL)):
        _require(sorted(rows) == batch.rows_in(phase), instance, f"the list of {phase.name} rows differs", rows)
        _require(rows == sorted(rows, key=batch.rank), instance, f"{phase.name} rows are not by rank", rows)
    num_free = len(batch.rows_in(Phase.FREE)) + len(batch.rows_in(Phase.ENDED))
    _require(batch.num_occupied == batch.max_rows - num_free, instance, "occupied rows", batch.num_occupied)
    _require(batch.num_draining == len(batch.rows_in(Phase.DRAINING)), instance, "draining rows", batch.num_draining)


def _require(is_true: bool, instance: Instance, what: str, value: Any) -> None:
    if not is_true:
        raise LedgerCorrupted(f"instance {instance.instance_id}: {what} ({value})")
