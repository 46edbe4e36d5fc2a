"""Which rows compute how many tokens in the next step, within one token budget.

    1  room     a prefill that was left short last time takes the youngest row's blocks
    2  decode   one token of every decode row, oldest first, in vector operations; out of blocks: the youngest
                running row is preempted, unless it is the only one left, which waits for parked and incoming rows
    3  prefill  the next chunk of every prefill in progress, oldest first
    4  admit    the oldest waiting sequences, unless anything was preempted or is still draining. One whose prefix hit
                ends in a state that this very step computes is set aside for the next step, with its row and blocks
                kept free; younger ones go ahead as far as that leaves room. In the next step it is looked up before
                them, so that only prefills in progress can make it wait again, as a rule for a longer hit. One
                whose prefix lies in a tier gets row and blocks, and computes nothing before they are loaded
    5  drafts   what decode rows have proposals for, verified in the same pass: within the tokens that step 2 set
                aside, and in blocks that nobody else took, so that no row is ever preempted for a draft

The oldest row is never preempted for a younger one, so it always ends, and with it every other in turn.
Counts advance here, at plan time; the tokens arrive in update.py.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.request import BoolArray, Int32Array
from blockferry.engine.scheduler.batch import Phase, RowView
from blockferry.engine.scheduler.handoff import ComputedTo
from blockferry.engine.scheduler.instance import Instance, Kept, StepRecord
from blockferry.engine.scheduler.sequence import Sequence
from blockferry.engine.scheduler.speculation import NO_DRAFTS
from blockferry.engine.wire import StepPlan

_NO_ROWS: Int32Array = np.empty(0, np.int32)


class HandoffGate(Protocol):
    """Where a ferried sequence's decode side is reserved; its one implementation is transfers.Handoffs."""

    def reserve(self, sequence: Sequence) -> bool:
        """Allocate the decode side of a sequence being admitted. False: no room there now."""

    def withdraw(self, sequence: Sequence) -> None:
        """Give the decode side back: the sequence was preempted before its prompt was computed."""

    def computes(self, sequence: Sequence, computed_to: ComputedTo) -> None:
        """A step that computes a chunk of the sequence's prompt is planned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A prefill row's share of a step."""

    row: int
    sequence: Sequence
    num_tokens: int
    is_last: bool  # computes the last known token


class PlanDraft:
    """The step being put together. Lives within one schedule() call."""

    def __init__(self, *, num_budget_tokens: int) -> None:
        self.num_budget_tokens = num_budget_tokens
        self.decode_rows: Int32Array = _NO_ROWS
        self.num_drafts: Int32Array = NO_DRAFTS  # of each decode row, verified beside its token; empty: none of any
        self.has_slots = False  # drafts have theirs already: there is plenty
        self.chunks: list[Chunk] = []

    @property
    def is_empty(self) -> bool:
        """True when the step computes nothing."""
        return not len(self.decode_rows) and not self.chunks

    def set_decode_rows(self, rows: Int32Array) -> None:
        """Plan one token for each of rows."""
        self.decode_rows = rows
        self.num_budget_tokens -= len(rows)

    def set_drafts(self, num_drafts: Int32Array) -> None:
        """Plan num_drafts more tokens for each decode row; empty: none for any."""
        if len(num_drafts):
            self.num_drafts = num_drafts
            self.num_budget_tokens -= int(np.add.reduce(num_drafts))

    def drafts_of(self, num_rows: int) -> Int32Array:
        """num_drafts of the step's first num_rows rows, decode rows first; empty: none of any."""
        if not len(self.num_drafts) or len(self.num_drafts) == num_rows:
            return self.num_drafts
        num_missing = num_rows - len(self.num_drafts)
        return np.concatenate([self.num_drafts, np.zeros(num_missing, np.int32)])

    def add_chunk(self, chunk: Chunk) -> None:
        """Plan a prefill chunk."""
        self.chunks.append(chunk)
        self.num_budget_tokens -= chunk.num_tokens


class StepScheduler:
    """Plans the steps of one instance. Called by the thread that owns the instance."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._batch = instance.batch
        self._starved_row: int | None = None  # a prefill that found no blocks in the last plan
        # no step takes more: a block for every token, and a copied and a new one for every row, of each group
        num_tokens = instance.config.max_num_batched_tokens
        self._most_blocks = instance.kv.num_groups * (num_tokens + 2 * self._batch.max_rows)
        self._ones: Int32Array = np.ones(self._batch.max_rows, np.int32)
        self._trues: BoolArray = np.ones(self._batch.max_rows, np.bool_)

    def schedule(self, now_s: float, gate: HandoffGate) -> StepPlan | None:
        """The next step, or None when there is nothing to do now or enough steps are in flight."""
        instance = self._instance
        if len(instance.in_flight) >= instance.config.num_steps_in_flight:
            return None
        instance.kv.start_step()
        draft = PlanDraft(num_budget_tokens=instance.config.max_num_batched_tokens)
        num_preemptions = instance.num_preemptions
        self._feed_starved(gate)
        self._plan_decodes(draft, gate)
        self._plan_prefills(draft, gate)
        if instance.num_preemptions == num_preemptions and self._can_admit():
            self._admit(draft, now_s, gate)
        self._make_room_for_drafts(draft)
        if draft.is_empty and not instance.owes_step:
            return None
        plan = self._emit(draft)
        for chunk in draft.chunks:
            if chunk.sequence.is_ferried:
                num_computed = int(instance.rows.num_computed_tokens[chunk.row])
                gate.computes(chunk.sequence, ComputedTo(plan.step_id, num_computed))
        return plan

    def _can_admit(self) -> bool:
        """False while nobody waits, or older sequences lack blocks or are on their way back into the queue."""
        return len(self._instance.queue) > 0 and self._starved_row is None and not self._batch.num_draining

    def _feed_starved(self, gate: HandoffGate) -> None:
        starved, self._starved_row = self._starved_row, None
        if starved is None or self._batch.phase[starved] != Phase.PREFILL:
            return
        youngest = self._batch.youngest_running()
        if youngest is not None and youngest != starved:
            self._preempt(youngest, gate)

    def _plan_decodes(self, draft: PlanDraft, gate: HandoffGate) -> None:
        rows = self._instance.speculation.ready(self._batch.decode_rows(), self._instance.in_flight)
        if not len(rows):
            return
        if len(rows) > draft.num_budget_tokens:
            rows = rows[: draft.num_budget_tokens]
        num_drafts = self._choose_drafts(rows, draft)
        if len(num_drafts) and self._instance.kv.num_free_blocks >= self._most_blocks:
            draft.has_slots = self._instance.kv.allocate_decode(rows, num_drafts) == len(rows)
        if not draft.has_slots:
            rows = self._serve(rows, gate)
            if len(num_drafts):
                num_drafts = self._choose_drafts(rows, draft)
        draft.set_decode_rows(rows)
        draft.set_drafts(num_drafts)

    def _serve(self, rows: Int32Array, gate: HandoffGate) -> Int32Array:
        """Room for one token in each of rows, oldest first, whoever must be preempted for it; returns those served."""
        kv = self._instance.kv
        num_served = kv.allocate_decode(rows)
        while num_served < len(rows):
            victim = self._batch.youngest_running()
            if victim is None or self._batch.num_running == 1:
                rows = rows[:num_served]
                self._start_over(victim, gate)
                break
            self._preempt(victim, gate)
            rows = rows[rows != victim]
            if num_served < len(rows):
                num_served += kv.allocate_decode(rows[num_served:])
        return rows

    def _choose_drafts(self, rows: Int32Array, draft: PlanDraft) -> Int32Array:
        num_left = draft.num_budget_tokens - len(rows)
        if self._batch.num_prefilling or (len(self._instance.queue) and self._batch.num_free_rows):
            num_left //= 2  # prompts are to go on beside drafts
        return self._instance.speculation.choose(rows, num_budget_tokens=num_left)

    def _make_room_for_drafts(self, draft: PlanDraft) -> None:
        """Slots for drafts in what blocks are left; a row that finds none verifies no draft in this step."""
        if draft.has_slots or not len(draft.num_drafts):
            return
        kv, rows, num_drafts = self._instance.kv, draft.decode_rows, draft.num_drafts
        num_served = kv.allocate_decode(rows, num_drafts)
        if num_served < len(rows):
            num_drafts[num_served:] *= kv.has_slots(rows[num_served:], num_drafts[num_served:])
            draft.num_drafts = num_drafts if num_drafts.any() else NO_DRAFTS

    def _plan_prefills(self, draft: PlanDraft, gate: HandoffGate) -> None:
        waiting_rows = self._batch.prefill_rows()
        while waiting_rows and draft.num_budget_tokens > 0:
            row = waiting_rows.pop(0)
            sequence = self._batch.sequences[row]
            assert sequence is not None, row
            num_tokens = self._instance.next_chunk(sequence, num_budget_tokens=draft.num_budget_tokens)
            while not self._instance.grow(row, num_tokens):
                if not waiting_rows:
                    self._starved_row = None if self._start_over(row, gate) else row
                    return
                self._preempt(waiting_rows.pop(), gate)
            self._add_chunk(draft, row, num_tokens)

    def _admit(self, draft: PlanDraft, now_s: float, gate: HandoffGate) -> None:
        instance = self._instance
        kept = Kept(num_blocks=instance.num_outstanding_blocks())
        deferred: list[Sequence] = []
        blocked_lanes: set[str] = set()
        while draft.num_budget_tokens > 0:
            sequence = instance.queue.peek(blocked_lanes=blocked_lanes)
            if sequence is None:
                break
            hit = instance.find_hit(sequence)
            if not instance.has_room_for(sequence, hit, kept):
                break
            if hit is not None and instance.kv.is_deferred(hit):
                instance.queue.remove(sequence)
                deferred.append(sequence)
                kept.keep_for_one(instance.num_blocks_to_hold(sequence, hit))
            elif sequence.is_ferried and not gate.reserve(sequence):
                blocked_lanes.add(sequence.lane)
            elif instance.tiers.load(sequence, hit, num_kept_blocks=kept.num_blocks, now_s=now_s):
                assert sequence.row is not None, sequence
                kept.num_blocks += instance.kv.room.to_finish(sequence.row)
                sequence.ticket.mark_scheduled(now_s, num_cached_tokens=sequence.num_hit_tokens)
            elif not self._bring_in(draft, sequence, hit, kept=kept):
                if sequence.is_ferried:
                    gate.withdraw(sequence)
                break
            else:
                sequence.ticket.mark_scheduled(now_s, num_cached_tokens=sequence.num_hit_tokens)
        for sequence in deferred:
            instance.queue.push(sequence)

    def _bring_in(self, draft: PlanDraft, sequence: Sequence, hit: PrefixHit | None, *, kept: Kept) -> bool:
        """Plan a waiting sequence's first chunk; False when there is no room, then nothing has changed."""
        num_tokens = self._instance.admit(sequence, hit, kept, num_budget_tokens=draft.num_budget_tokens)
        if num_tokens is None:
            return False
        assert sequence.row is not None, sequence
        chunk = self._add_chunk(draft, sequence.row, num_tokens)
        # the encoder's whole input is computed with the first chunk: the last one admitted may overdraw the budget
        draft.num_budget_tokens -= sequence.ticket.num_encoder_tokens
        if not chunk.is_last:
            kept.num_blocks += self._instance.kv.room.to_finish(sequence.row)
        return True

    def _add_chunk(self, draft: PlanDraft, row: int, num_tokens: int) -> Chunk:
        table = self._instance.rows
        sequence = self._batch.sequences[row]
        assert sequence is not None, row
        is_last = bool(table.num_computed_tokens[row] + num_tokens == table.num_tokens[row])
        chunk = Chunk(row=row, sequence=sequence, num_tokens=num_tokens, is_last=is_last)
        draft.add_chunk(chunk)
        return chunk

    def _start_over(self, row: int | None, gate: HandoffGate) -> bool:
        """Preempt a row that lacks blocks though nobody else holds any; False: others do, and will end.

        Happens where blocks lie in slabs: pages that were taken among those of others may keep more slabs than they
        fill. Taken anew, in one go, they fit.
        """
        if row is None or self._batch.num_running > 1 or self._batch.num_holding > 1:
            return False
        self._preempt(row, gate)
        return True

    def _preempt(self, row: int, gate: HandoffGate) -> None:
        sequence = self._batch.sequences[row]
        assert sequence is not None, row
        self._instance.preempt(sequence)
        if sequence.is_ferried:
            gate.withdraw(sequence)

    # from draft to plan

    def _emit(self, draft: PlanDraft) -> StepPlan:
        instance = self._instance
        wait_stored = instance.tiers.job_to_wait_for()  # of steps before this one
        rows, num_scheduled, sample = self._columns(draft)
        num_computed = instance.rows.num_computed_tokens.take(rows)
        new_rows = instance.take_new_rows()
        instance.rows.num_computed_tokens[rows] = num_computed + num_scheduled
        sampled = self._batch.view(rows[sample] if draft.chunks else rows)
        num_proposals = instance.speculation.num_proposals(sampled.rows)
        step_id = instance.last_step = instance.last_step + 1
        prefilled = tuple(chunk.sequence for chunk in draft.chunks if chunk.is_last)
        instance.in_flight.append(
            StepRecord(
                step_id=step_id,
                sampled=sampled,
                num_ended=self._batch.num_ended,
                num_tokens=int(num_scheduled.sum()),
                num_drafts=draft.drafts_of(len(sampled.rows)),
                num_proposals=num_proposals,
                is_decoding=len(draft.decode_rows) > 0,
                prefilled=prefilled,
            )
        )
        self._advance(draft, num_computed, sampled)
        return StepPlan(
            step_id=step_id,
            wait_stored=wait_stored,
            freed_rows=instance.take_freed_rows(),
            new_rows=new_rows,
            deltas=instance.kv.take_deltas(),
            zero=instance.kv.take_zero(),
            copies=instance.kv.take_copies(),
            rows=rows,
            num_computed=num_computed,
            num_scheduled=num_scheduled,
            sample=sample,
            num_drafts=draft.drafts_of(len(rows)),
            draft_token_ids=instance.speculation.gather(draft.decode_rows, draft.num_drafts),
            num_proposals=num_proposals,
        )

    def _advance(self, draft: PlanDraft, num_computed: Int32Array, sampled: RowView) -> None:
        """Move rows whose last sample is planned to PARKED, other prefills that are complete to DECODE."""
        num_decode_rows = len(draft.decode_rows)
        # a decode row has num_computed + 1 tokens, known or in flight, and this step adds one, perhaps drafts
        is_done = num_computed[:num_decode_rows] + 2 >= sampled.limits[:num_decode_rows]
        if is_done.any():
            self._batch.park(draft.decode_rows[is_done])
        for chunk in draft.chunks:
            if chunk.is_last:
                is_left = self._instance.rows.num_tokens[chunk.row] + 1 < self._batch.limit[chunk.row]
                self._batch.set_phase(chunk.row, Phase.DECODE if is_left else Phase.PARKED)

    def _columns(self, draft: PlanDraft) -> tuple[Int32Array, Int32Array, BoolArray]:
        """The plan's rows, num_scheduled and sample: decode rows first, then chunks."""
        num_decode_rows = len(draft.decode_rows)
        num_each, trues = self._ones[:num_decode_rows], self._trues[:num_decode_rows]
        if len(draft.num_drafts):
            num_each = num_each + draft.num_drafts
        if not draft.chunks:
            return draft.decode_rows, num_each, trues
        chunk_rows = np.array([chunk.row for chunk in draft.chunks], np.int32)
        chunk_tokens = np.array([chunk.num_tokens for chunk in draft.chunks], np.int32)
        is_last = np.array([chunk.is_last for chunk in draft.chunks], np.bool_)
        chunk_samples = is_last & (self._instance.rows.num_tokens[chunk_rows] < self._batch.limit[chunk_rows])
        return (
            np.concatenate([draft.decode_rows, chunk_rows]),
            np.concatenate([num_each, chunk_tokens]),
            np.concatenate([trues, chunk_samples]),
        )
