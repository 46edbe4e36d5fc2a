"""One instance's sequences: how each takes a row and blocks, is preempted, handed over and leaves.

Owns the batch, the waiting queue, the ledger and the row table of one instance. Decides nothing about which rows
compute what (schedule.py) or what a result means (update.py); both act through the verbs here.

Blocks are given back when a step is planned, though earlier steps that read them may still be in flight: what fell
out of a window, a state that has been passed, everything of a preempted row. That is safe because workers execute
plans in order, so whoever gets such a block writes it in a later plan, after the last one that reads it. Bytes of a
transfer keep no such order; rows that they reach hold still instead: a parked source row and an incoming target row
are in no plan, so the ledger never skips anything of them. Steps that may write the target's blocks otherwise retire
first (the fence, handoff.py): those planned before the blocks were taken, and the one that clears them or copies a
hit's tokens into them. What tiers keep of blocks, and load into them, keeps the order of plans (offloading.py).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from blockferry.engine.config import Role, SchedulerConfig
from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.admission import WaitingQueue
from blockferry.engine.scheduler.batch import Batch, Phase, RowView
from blockferry.engine.scheduler.chunking import StateGrid
from blockferry.engine.scheduler.offload_seam import NO_TIERS, Tiers
from blockferry.engine.scheduler.sequence import Sequence
from blockferry.engine.scheduler.speculation import NO_DRAFTS, make_speculation
from blockferry.engine.scheduler.waiting_prefixes import num_shared
from blockferry.engine.wire import NewRow

_NO_ROWS: Int32Array = np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step in flight: what its result will mean."""

    step_id: int
    sampled: RowView  # rows that get a token, in the plan's order
    num_ended: int  # Batch.num_ended when it was planned
    num_tokens: int  # that it computes
    num_drafts: Int32Array  # that it verifies of each sampled row; empty: none of any
    num_proposals: int  # drafts that it proposes for each sampled row
    is_decoding: bool  # rows in DECODE are among those sampled
    prefilled: tuple[Sequence, ...]  # sequences whose last known token this step computes


@dataclasses.dataclass(slots=True, kw_only=True)
class Kept:
    """What a newcomer must leave free, for older sequences. Lives within one pass of admissions."""

    num_rows: int = 0
    num_blocks: int = 0

    def keep_for_one(self, num_blocks: int) -> None:
        """Keep a row and num_blocks blocks more."""
        self.num_rows += 1
        self.num_blocks += num_blocks


class Instance:
    """The sequences of one instance and everything they hold. One thread calls it."""

    def __init__(
        self,
        instance_id: str,
        role: Role,
        *,
        config: SchedulerConfig,
        kv: KVCacheManager,
        rows: RowTable,
        num_ranks: int = 1,
    ) -> None:
        """`rows` is the table that kv was made with; num_ranks workers execute every plan.

        Raises ValueError for a speculation that drafts nothing.
        """
        self.instance_id = instance_id
        self.role = role
        self.config = config
        self.kv = kv
        self.rows = rows
        self.num_ranks = num_ranks
        self._grid = StateGrid.of(kv.config) if kv.is_caching else None
        self.batch = Batch(rows.max_rows)
        self.queue = WaitingQueue()
        self.tiers: Tiers = NO_TIERS
        self.speculation = make_speculation(config.speculation, rows)
        self.in_flight: collections.deque[StepRecord] = collections.deque()
        self.last_step = -1  # last planned
        self.retired_step = -1  # last whose result arrived
        self.num_preemptions = 0
        self.fence_step = -1  # bytes may land in blocks reserved last once the steps up to here have retired
        self._unannounced: list[int] = []  # rows that the workers have not heard of

    # coming in

    def find_hit(self, sequence: Sequence) -> PrefixHit | None:
        """What the prefix cache holds of a sequence that is about to come in; None: it may not look."""
        if sequence.ticket.request.skip_reading_prefix_cache or sequence.needs_prompt_logprobs:
            return None
        return self.kv.lookup(sequence.hashes, len(sequence.token_ids))

    def num_blocks_to_hold(self, sequence: Sequence, hit: PrefixHit | None) -> int:
        """Most blocks that a waiting sequence's known tokens will take beside those of a hit."""
        return self.kv.room.to_hold(len(sequence.token_ids), hit, sequence.ticket.num_encoder_tokens)

    def has_room_for(self, sequence: Sequence, hit: PrefixHit | None, kept: Kept) -> bool:
        """Whether a row and the blocks of the whole sequence are free beside what is kept; cheap and without effect."""
        if self.batch.num_free_rows <= kept.num_rows:
            return False
        num_blocks = self.num_blocks_to_hold(sequence, hit)
        return num_blocks + kept.num_blocks <= self.kv.num_free_blocks

    def admit(self, sequence: Sequence, hit: PrefixHit | None, kept: Kept, *, num_budget_tokens: int) -> int | None:
        """Give a waiting sequence a row and the blocks of its first chunk; returns the chunk's tokens.

        None when no row or not enough blocks are free; then nothing has changed.
        """
        sequence.junction = 0 if hit is None else hit.junction
        num_hit_tokens = 0 if hit is None else hit.num_tokens
        num_missing = len(sequence.token_ids) - num_hit_tokens
        num_new_tokens = self._cut(sequence, num_hit_tokens, num_missing, num_budget_tokens)
        options = self.options(sequence, hit, kept.num_blocks)
        row = self.place(
            sequence,
            lambda row: self.kv.allocate(row, num_new_tokens, options),
            phase=Phase.PREFILL,
            num_hit_tokens=num_hit_tokens,
        )
        if row is None:
            return None
        self.queue.remove(sequence)
        self._unannounced.append(row)
        return num_new_tokens

    def reserve(self, sequence: Sequence) -> bool:
        """Give a sequence that is prefilled elsewhere a row and blocks for what its next token reads (INCOMING).

        Nothing is cached yet. Bytes may land in the blocks once fence_step has retired. False when no row or not
        enough blocks are free, or an older sequence waits here; then nothing has changed.
        """
        oldest = self.queue.peek()
        is_behind = oldest is not None and oldest.ticket.rank < sequence.ticket.rank
        if is_behind or self.batch.num_draining:
            return False
        hit = self.find_hit(sequence)
        kept = Kept(num_blocks=self.num_outstanding_blocks())
        if not self.has_room_for(sequence, hit, kept):
            return False
        num_hit_tokens = 0 if hit is None else hit.num_tokens
        options = dataclasses.replace(
            self.options(sequence, hit, kept.num_blocks),
            num_external_tokens=len(sequence.token_ids) - num_hit_tokens,
            delay_caching=True,
        )
        row = self.place(
            sequence,
            lambda row: self.kv.allocate(row, 0, options),
            phase=Phase.INCOMING,
            num_hit_tokens=num_hit_tokens,
        )
        if row is None:
            return False
        self.fence_step = self.last_step + int(self.kv.has_orders)
        return True

    @property
    def owes_step(self) -> bool:
        """Whether a step must be planned even if it computes nothing: bytes wait for what it clears and copies."""
        return self.fence_step > self.last_step

    def next_chunk(self, sequence: Sequence, *, num_budget_tokens: int) -> int:
        """Tokens of the next chunk of a row in PREFILL, at least 1."""
        row = sequence.row
        assert row is not None, sequence
        num_computed = int(self.rows.num_computed_tokens[row])
        return self._cut(sequence, num_computed, int(self.rows.num_tokens[row]) - num_computed, num_budget_tokens)

    def grow(self, row: int, num_new_tokens: int) -> bool:
        """Blocks for the row's next num_new_tokens tokens. False when not enough are free; nothing was taken."""
        # the encoder's blocks are taken with the first tokens that are computed, which a loaded prefix comes before
        num_encoder_tokens = int(self.rows.num_encoder_tokens[row])
        return self.kv.allocate(row, num_new_tokens, AllocateOptions(num_encoder_tokens=num_encoder_tokens))

    def activate(self, sequence: Sequence, first_token_id: int, draft_token_ids: Int32Array = NO_DRAFTS) -> None:
        """The prompt's blocks have arrived: cache them and decode on from the first token; drafts may follow it."""
        row = sequence.row
        assert row is not None, sequence
        assert self.batch.phase[row] == Phase.INCOMING, (row, self.batch.phase[row])
        self.rows.num_computed_tokens[row] = self.rows.num_tokens[row]
        self.rows.append(np.array([row], np.int32), np.array([first_token_id], np.int32))
        self.speculation.adopt(row, draft_token_ids)
        self._unannounced.append(row)
        self.kv.cache_prefix(row)
        self.batch.set_phase(row, Phase.DECODE)

    def start_prefill(self, sequence: Sequence) -> None:
        """What was loaded for a sequence is there: compute the rest of its prompt."""
        row = sequence.row
        assert row is not None, sequence
        self._unannounced.append(row)
        self.batch.set_phase(row, Phase.PREFILL)

    # going out

    def preempt(self, sequence: Sequence) -> None:
        """Take blocks and row of a running sequence; it waits again, with every token it has or has in flight."""
        row = sequence.row
        assert row is not None, sequence
        sequence.ticket.num_preemptions += 1
        self.num_preemptions += 1
        self.kv.free(row)
        self.speculation.forget(row, sequence.ticket)
        self._forget_on_workers(row)
        if self.num_in_flight(row):
            self.batch.set_phase(row, Phase.DRAINING)
        else:
            self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a preempted sequence whose tokens have all arrived back into the queue."""
        row = sequence.row
        assert row is not None, sequence
        sequence.token_ids = self.rows.tokens(row).copy()
        self._release_row(row)
        self.queue.push(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out of the instance, wherever it stands, with everything it holds."""
        row = sequence.row
        if row is None:
            if sequence in self.queue:
                sequence.ticket.num_output_tokens = self.num_output_tokens(sequence)
                self.queue.remove(sequence)
            return
        ticket = sequence.ticket
        ticket.num_output_tokens = max(ticket.num_output_tokens, self.num_output_tokens(sequence))
        if self.batch.phase[row] != Phase.DRAINING:
            self._give_back(row)
        self._release_row(row)

    def start_over(self, sequence: Sequence) -> None:
        """A sequence whose blocks were being loaded waits again, without them."""
        row = sequence.row
        assert row is not None, sequence
        self._give_back(row)
        self.requeue(sequence)

    # what others ask

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs here, and no block is held."""
        is_empty = not len(self.queue) and not self.batch.num_occupied and not self.in_flight
        return is_empty and self.kv.num_free_blocks == self.kv.num_usable_blocks

    def num_in_flight(self, row: int) -> int:
        """Tokens of the row that are planned and have not arrived, if every draft among them is accepted."""
        num_planned = min(int(self.rows.num_computed_tokens[row]) + 1, int(self.batch.limit[row]))
        return max(0, num_planned - int(self.rows.num_tokens[row]))

    def num_outstanding_blocks(self) -> int:
        """Blocks that prefills in progress will still take for the tokens they have."""
        rows = self.batch.prefill_rows() + self.batch.rows_in(Phase.LOADING)
        return sum(self.kv.room.to_finish(row) for row in rows)

    def num_output_tokens(self, sequence: Sequence) -> int:
        """Tokens that the sequence has generated and that have arrived."""
        num_prompt_tokens = sequence.ticket.num_prompt_tokens
        num_tokens = len(sequence.token_ids) if sequence.row is None else int(self.rows.num_tokens[sequence.row])
        return num_tokens - num_prompt_tokens

    def num_queued_tokens(self) -> int:
        """Tokens that wait to be computed, of waiting sequences and prefills in progress."""
        rows = np.array(self.batch.prefill_rows(), np.int32)
        in_rows = int((self.rows.num_tokens[rows] - self.rows.num_computed_tokens[rows]).sum())
        return in_rows + self.queue.num_tokens

    def num_missing_tokens(self) -> int:
        """Tokens to compute before those of a newcomer: in steps in flight, and queued ones that will be no hits."""
        in_flight = sum(record.num_tokens for record in self.in_flight)
        return in_flight + self.num_queued_tokens() - self.queue.num_expected_tokens

    def num_coming_tokens(self, hashes: RequestHashes) -> int:
        """Leading tokens of a sequence that others, who wait or are being computed here, will have computed before it.

        An estimate: windows and states may keep less of it than a hit needs.
        """
        in_rows = [self.batch.sequences[row] for row in self.batch.prefill_rows()]
        shared = [num_shared(hashes.digests, one.hashes.digests) for one in in_rows if one is not None]
        return max([self.queue.prefixes.num_shared(hashes.digests), *shared]) * hashes.block_size

    # news for the workers

    def take_freed_rows(self) -> Int32Array:
        """Rows that workers must forget, since the last take."""
        if not self.batch.freed_rows:
            return _NO_ROWS
        freed, self.batch.freed_rows = self.batch.freed_rows, []
        return np.array(sorted(set(freed)), np.int32)

    def take_new_rows(self) -> tuple[NewRow, ...]:
        """Rows that workers have not heard of, with every token known."""
        if not self._unannounced:
            return ()
        unannounced, self._unannounced = self._unannounced, []
        return tuple(self._new_row(row) for row in unannounced)

    # steps of the above

    def _cut(self, sequence: Sequence, start: int, num_missing: int, num_budget_tokens: int) -> int:
        """Tokens of a chunk from start: what is missing, within the budget and up to where a state is to be kept."""
        num_tokens = min(num_missing, num_budget_tokens)
        if self._grid is None:
            return num_tokens
        kept_lengths = self._grid.kept_lengths(
            num_prompt_tokens=sequence.ticket.num_prompt_tokens,
            num_tokens=start + num_missing,
            junction=sequence.junction,
        )
        return self._grid.end_chunk(start, start + num_tokens, kept_lengths=kept_lengths) - start

    def options(self, sequence: Sequence, hit: PrefixHit | None, num_reserved_blocks: int) -> AllocateOptions:
        """How a waiting sequence is to be given blocks."""
        return AllocateOptions(
            hit=hit,
            num_encoder_tokens=sequence.ticket.num_encoder_tokens,
            full_sequence_must_fit=True,
            num_reserved_blocks=num_reserved_blocks,
            apply_watermark=self.batch.num_occupied > 0,
        )

    def place(
        self, sequence: Sequence, take: Callable[[int], bool], *, phase: Phase, num_hit_tokens: int
    ) -> int | None:
        """A free row for a sequence, with blocks from take(row); None when there is no room, then nothing has changed.

        num_hit_tokens: of it, need not be computed here.
        """
        row = self.batch.peek_free_row()
        if row is None:
            return None
        ticket = sequence.ticket
        self.rows.assign(
            row,
            sequence.token_ids,
            num_prompt_tokens=ticket.num_prompt_tokens,
            num_encoder_tokens=ticket.num_encoder_tokens,
        )
        self.kv.start_row(row, sequence.hashes)
        if not take(row):
            self.kv.free(row)
            self.rows.clear(row)
            return None
        sequence.num_hit_tokens = num_hit_tokens
        self.rows.num_computed_tokens[row] = sequence.num_hit_tokens
        self.batch.start(row, sequence, phase)
        self.speculation.start(row, sequence)
        return row

    def _give_back(self, row: int) -> None:
        if self.batch.phase[row] == Phase.LOADING:
            self.tiers.give_back(row)  # when no byte can land there any more
        else:
            self.kv.free(row)
        self._forget_on_workers(row)

    def _forget_on_workers(self, row: int) -> None:
        self.batch.freed_rows.append(row)
        if row in self._unannounced:
            self._unannounced.remove(row)

    def _release_row(self, row: int) -> None:
        sequence = self.batch.sequences[row]
        assert sequence is not None, row
        self.speculation.forget(row, sequence.ticket)
        self.rows.clear(row)
        self.batch.end(row, last_step=self.last_step, retired_step=self.retired_step)

    def _new_row(self, row: int) -> NewRow:
        sequence = self.batch.sequences[row]
        assert sequence is not None, row
        is_prefill = self.batch.phase[row] == Phase.PREFILL
        return NewRow(
            row=row,
            token_ids=self.rows.tokens(row).copy(),
            num_prompt_tokens=int(self.rows.num_prompt_tokens[row]),
            sampling=sequence.sampling_to_send(),
            num_encoder_tokens=int(self.rows.num_encoder_tokens[row]),
            # of a sequence that was handed over, the encoder's keys and values have come with its prompt's
            encoder_token_ids=sequence.ticket.request.encoder_token_ids if is_prefill else None,
        )
