"""Recurrent state whose values at block boundaries are blocks of their own, which the prefix cache may keep.

    computed:        0        B        2B       3B
    columns:         |  null  |  null  | state  | running | draft 1 | .. | draft k |
                                  at 3B, the one before  ^ written by the next step, from the state before it

A row holds the running state and the one before it; everything else is null. What chunks a prompt is computed in
decides at which boundaries there are states at all.

Behind the running state are blocks for the states after each of k drafts. Where the running state moves on by a block,
the first of them becomes its new one and another is taken for the last. Workers know a row's state by its block: after
drafts were accepted it is that of one of them. They copy the state at the end of the running block into it, if drafts
went past that; at boundaries beyond, of blocks shorter than the drafts, no state is kept.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from blockferry.engine.kv.block_pool import NULL_BLOCK_ID
from blockferry.engine.kv.hit_rules import Count, HitRule, Presence, Retention
from blockferry.engine.kv.prefix_index import NO_ENTRY
from blockferry.engine.kv.reach import cdiv
from blockferry.engine.kv.spec import MambaSpec
from blockferry.engine.kv.table_stack import TableStack, count_up
from blockferry.engine.kv.type_manager import (
    CacheWish,
    DecodeDemand,
    Demand,
    HitBlocks,
    StackContext,
    TailWish,
    make_wish,
)
from blockferry.engine.request import BoolArray, Int32Array, Int64Array

_NOWHERE: Int64Array = np.empty(0, np.int64)


class StateRule:
    """The HitRule of states: a hit needs the one state at its end, wherever that is.

    Never gives one up for a draft: draft models have no recurrent layers.
    """

    @property
    def drops_blocks(self) -> bool:
        """Blocks fall out of reach."""
        return True

    @property
    def resumes_inside(self) -> bool:
        """Where a state was kept there."""
        return True

    def needs_blocks(self, tokens_per_block: int) -> bool:
        """Always."""
        del tokens_per_block
        return True

    def can_end(self, presence: Presence, lengths: Int32Array) -> BoolArray:
        """Where a state is present."""
        ends = lengths // presence.tokens_per_block
        is_whole = (lengths % presence.tokens_per_block == 0) & (ends >= 1) & (ends <= len(presence.blocks))
        can_end: BoolArray = (
            is_whole & presence.blocks[np.where(is_whole, ends - 1, 0)] if len(presence.blocks) else is_whole
        )
        can_end |= np.isin(lengths, presence.tails)
        can_end[0] = True
        return can_end

    def first_column(self, num_tokens: int, tokens_per_block: int) -> int:
        """The last column only."""
        return max(0, cdiv(num_tokens, tokens_per_block) - 1)

    def tail_length(self, presence: Presence, num_tokens: int) -> int:
        """A state is of one length only."""
        del presence
        return num_tokens

    def num_skipped(self, num_computed: Count) -> Count:
        """All tokens but the last computed one, whose state is the next one's source."""
        return num_computed - 1

    def first_skippable(self, num_prompt_tokens: int, tokens_per_block: int) -> int:
        """The first column on."""
        del num_prompt_tokens, tokens_per_block
        return 0

    def kept_columns(
        self, columns: Int32Array, boundaries: Int32Array, *, tokens_per_block: int, retention: Retention
    ) -> BoolArray | None:
        """States at the ends of retention intervals, and at the boundaries."""
        if retention.interval is None:
            return None
        kept = np.zeros(len(columns), np.bool_)
        per_segment = retention.interval // tokens_per_block
        if retention.interval:
            if per_segment <= 1:
                return None
            kept |= (columns + 1) % per_segment == 0
        ends = boundaries // retention.alignment * retention.alignment // tokens_per_block
        kept |= ((columns[:, None] == ends - 1) & (boundaries > 0)).any(axis=1)
        return kept


@dataclasses.dataclass(slots=True)
class _PendingCopy:
    """A block whose state must be copied before the row computes on: into the row's own block, or out of it."""

    column: int
    is_own: bool  # the row wrote it and goes on in it; else it is a hit's


class _Export(NamedTuple):
    """A state from within a prefill chunk, in a block of its own: where a hit on the whole prompt resumes."""

    column: int  # where the row holds the block; of no meaning but that it is free
    num_tokens: int  # that the state is of


class MambaManager:
    """The TypeManager of groups of states at block boundaries; all groups hold states in the same columns."""

    def __init__(self, context: StackContext, spec: MambaSpec) -> None:
        self.groups = context.group_numbers
        self.pool = context.pool
        self.rules: list[HitRule | None] = [StateRule() for _ in self.groups]
        self.tokens_per_block = spec.block_size
        self.is_draft = False
        rows = context.rows
        self.stack = TableStack(
            context, max_blocks=cdiv(rows.max_model_len, spec.block_size) + spec.num_speculative_blocks
        )
        self._rule = StateRule()
        self._num_speculative = spec.num_speculative_blocks
        self._context = context
        self._has_running: BoolArray = np.zeros(rows.max_rows, np.bool_)  # its last columns are its own states
        self._first_held: Int32Array = np.zeros(rows.max_rows, np.int32)  # all columns before it are null
        self._pending: dict[int, _PendingCopy] = {}
        self._exports_states = spec.num_prefill_checkpoint_blocks > 0
        self._exports: dict[int, _Export] = {}  # of rows, not cached yet
        self._fresh: set[int] = set()  # entries under which states were cached in this step

    def start_step(self) -> None:
        """States cached before can be read from now on."""
        self._fresh.clear()

    def is_deferred(self, hits: HitBlocks, num_tokens: int) -> bool:
        """Whether the hit's state is written by a step that is still being put together."""
        del num_tokens
        if not self._fresh or not len(hits[0]):
            return False
        return self.pool.entry_of(int(hits[0][-1])) in self._fresh

    # one row

    def most_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once: the running state and the one before it."""
        del num_encoder_tokens
        return len(self.groups) * (min(cdiv(num_tokens, self.tokens_per_block), 2) + self._num_speculative)

    def num_needed(self, row: int, demand: Demand, hits: HitBlocks) -> int:
        """Free blocks that go when the row adopts the hits and grows: new ones, and idle ones of the hits."""
        num_skipped = self._num_skipped_blocks(demand)
        num_columns = int(self.stack.num_blocks[row]) or max(num_skipped, len(hits[0]))
        num_external = max(0, cdiv(demand.num_total, self.tokens_per_block) - num_columns)
        num_new = num_external if demand.num_total > demand.num_local else 0
        num_exported = int(self._export_of(row, demand, num_columns + num_new) is not None)
        num_required = self._num_required(demand.num_main)
        if num_required > num_columns + num_new:
            first = max(num_columns + num_new, num_required - self._num_speculative - 1)
            num_new += 1 if self._has_running[row] else num_required - first
        if row in self._pending or self._ends_inside(demand, hits[0][num_skipped:]):
            num_new += 1
        num_idle = sum(self.pool.num_idle(block_ids[num_skipped:]) for block_ids in hits)
        return len(self.groups) * (num_new + num_exported) + num_idle

    def adopt(self, row: int, demand: Demand, hits: HitBlocks) -> None:
        """Start a row with a hit's states, which get one owner more."""
        num_skipped = self._num_skipped_blocks(demand)
        num_columns = max(num_skipped, len(hits[0]))
        for layer, block_ids in enumerate(hits):
            held = block_ids[num_skipped:]
            self.pool.touch(held)
            self.stack.write(layer, row, 0, np.zeros(num_columns - len(held), np.int32))
            self.stack.write(layer, row, num_columns - len(held), held)
        self.stack.num_blocks[row] = self.stack.num_cached[row] = num_columns
        self._first_held[row] = max(0, num_columns - 1)
        if self._ends_inside(demand, hits[0][num_skipped:]):
            column = demand.num_local // self.tokens_per_block
            self._pending[row] = _PendingCopy(column=column, is_own=False)
            self.stack.num_cached[row] = column

    def take_external(self, row: int, demand: Demand) -> None:
        """Take a block for the state that comes from elsewhere."""
        num_columns = int(self.stack.num_blocks[row])
        self._take_until(row, num_columns, cdiv(demand.num_total, self.tokens_per_block))

    def grow(self, row: int, demand: Demand) -> None:
        """Take the block that the running state moves to, where it leaves its block in this step."""
        num_required = self._num_required(demand.num_main)
        num_held = int(self.stack.num_blocks[row])
        pending = self._pending.pop(row, None)
        has_running = bool(self._has_running[row])
        self._has_running[row] = True
        if num_required <= num_held and pending is None:
            return
        running_column = num_required - self._num_speculative - 1
        num_columns = max(num_held, running_column)
        self.stack.tables[:, row, num_held:num_columns] = NULL_BLOCK_ID
        if has_running:
            num_columns = self._move_speculative(row, num_held, running_column, num_columns)
        if pending is not None:
            self._copy(row, pending)
        export = self._export_of(row, demand, num_held)
        if export is not None:
            self._exports[row] = export
            for layer in range(len(self.groups)):
                self.stack.take(layer, row, export.column, export.column + 1)
        self._take_until(row, num_columns, num_required)

    def skip(self, row: int, num_computed: int) -> None:
        """Free states that no token after num_computed starts from."""
        self.skip_in(np.array([row], np.int32), np.array([num_computed], np.int32))

    def drop(self, row: int) -> list[Int32Array]:
        """Forget a row and return its blocks per group, in table order; their owner count is untouched."""
        self._pending.pop(row, None)
        self._exports.pop(row, None)
        self._has_running[row] = False
        self._first_held[row] = 0
        return self.stack.drop(row)

    # all decoding rows at once

    def lacks_blocks(self, demand: DecodeDemand) -> BoolArray:
        """Which rows must take any; shape [R]."""
        held = self.stack.num_blocks.take(demand.rows) - np.int32(self._num_speculative)
        lacks: BoolArray = demand.num_main > held * np.int32(self.tokens_per_block)
        lacks[self._pending_among(demand.rows)] = True
        return lacks

    def num_missing_in(self, demand: DecodeDemand) -> Int32Array:
        """Blocks that each row must take in each of the groups; shape [R]."""
        missing: Int32Array = (self._num_required_in(demand) > self.stack.num_blocks.take(demand.rows)).astype(np.int32)
        missing[self._pending_among(demand.rows)] += 1
        return missing

    def grow_in(self, demand: DecodeDemand, num_blocks: Int32Array) -> None:
        """Take num_blocks [R], all >= 1, in each of the groups for the demand's rows."""
        is_usual = self._has_running.take(demand.rows)
        is_usual[self._pending_among(demand.rows)] = False
        is_usual &= self._num_required_in(demand) == self.stack.num_blocks.take(demand.rows) + num_blocks
        if not is_usual.all():
            for row, num_main in zip(demand.rows.tolist(), demand.num_main.tolist(), strict=True):
                self.grow(row, Demand(num_local=num_main, num_total=num_main, num_main=num_main, num_slots=num_main))
            return
        self.stack.take_in(demand.rows, num_blocks)

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R]."""
        num_kept = self.stack.num_blocks.take(rows) - np.int32(self._num_speculative)
        stop = np.minimum(self._rule.num_skipped(num_computed) // self.tokens_per_block, num_kept)
        counts = stop - self._first_held.take(rows)
        due = (counts > 0).nonzero()[0]
        if not len(due):
            return
        rows, counts, columns = rows[due], counts[due], stop[due] - 1
        self._first_held[rows] = stop[due]
        if (counts > 1).any():
            rows, columns = np.repeat(rows, counts), np.repeat(columns, counts) - count_up(counts)
        held = self.stack.tables[0, rows, columns] != NULL_BLOCK_ID
        rows, columns = rows[held], columns[held]
        if len(rows):
            num_layers = len(self.groups)
            layers = np.repeat(np.arange(num_layers, dtype=np.int32), len(rows))
            self.stack.free_entries(layers, np.tile(rows, num_layers), np.tile(columns, num_layers))

    # caching

    def wish_in(self, rows: Int32Array, num_tokens: Int32Array) -> CacheWish | None:
        """States at block boundaries among the first num_tokens [R]; counts them as cached from now on."""
        stop = num_tokens // self.tokens_per_block
        first = self.stack.num_cached.take(rows)
        counts = stop - first
        due = (counts > 0).nonzero()[0]
        if not len(due):
            return None
        rows, counts, columns = rows[due], counts[due], first[due]
        self.stack.num_cached[rows] = stop[due]
        if (counts > 1).any():
            rows, columns = np.repeat(rows, counts), np.repeat(columns, counts) + count_up(counts)
        block_ids = self.stack.entries(rows, columns)
        kept = self._rule.kept_columns(
            columns,
            self._context.kept_lengths[rows],
            tokens_per_block=self.tokens_per_block,
            retention=self._context.retention,
        )
        chosen = block_ids != 0
        if self._num_speculative:
            chosen &= columns < self.stack.num_blocks.take(rows) - np.int32(self._num_speculative)
        for row, export in list(self._exports.items()):
            if export.num_tokens == (export.column + 1) * self.tokens_per_block:
                del self._exports[row]  # of a whole block, so cached as such
            else:
                chosen[:, (rows == row) & (columns == export.column)] = False
        return make_wish(rows, columns, block_ids, chosen if kept is None else chosen & kept)

    def cached(self, entries: Int32Array) -> None:
        """States under entries [C] can be read from the next step on."""
        self._fresh.update(entries.tolist())

    def wish_tail(self, row: int, num_tokens: int) -> TailWish | None:
        """The last state that a hit on the whole prompt can resume from: exported, or the running one in its block."""
        export = self._exports.get(row)
        if export is not None and num_tokens >= export.num_tokens:
            return TailWish(layers=list(range(len(self.groups))), column=export.column, num_tokens=export.num_tokens)
        if num_tokens != self.last_kept_length(row) or num_tokens % self.tokens_per_block == 0:
            return None
        column = num_tokens // self.tokens_per_block
        if column >= self.stack.num_blocks[row] or not self.stack.tables[0, row, column]:
            return None
        return TailWish(layers=list(range(len(self.groups))), column=column, num_tokens=num_tokens)

    def tail_cached(self, row: int, wish: TailWish, entry: int) -> None:
        """Before the row computes on, the cache gets a copy of its running state; an exported one is its own."""
        self._fresh.add(entry)
        if self._exports.pop(row, None) is not None:
            return
        self._pending[row] = _PendingCopy(column=wish.column, is_own=True)
        self.stack.num_cached[row] = wish.column

    def last_kept_length(self, row: int) -> int:
        """The last length at which a hit on the row's whole prompt can resume, were it cached."""
        hash_block_size = self._context.hash_block_size
        return int(self._context.kept_lengths[row, 0]) // hash_block_size * hash_block_size

    def _export_of(self, row: int, demand: Demand, num_held: int) -> _Export | None:
        """What the chunk from num_total to num_main exports, into a column that is new and not the running state's."""
        length = self.last_kept_length(row) if self._exports_states else 0
        if demand.is_admission or not demand.num_total < length < demand.num_main:
            return None
        running = cdiv(demand.num_main, self.tokens_per_block) - 1
        column = min(cdiv(length, self.tokens_per_block), running) - 1
        return _Export(column=column, num_tokens=length) if column >= num_held else None

    def _num_required(self, num_main: int) -> int:
        return cdiv(num_main, self.tokens_per_block) + self._num_speculative

    def _num_required_in(self, demand: DecodeDemand) -> Int32Array:
        """_num_required() of each row; shape [R]."""
        required: Int32Array = (
            demand.num_main + (self.tokens_per_block - 1)
        ) // self.tokens_per_block + self._num_speculative
        return required

    def _ends_inside(self, demand: Demand, block_ids: Int32Array) -> bool:
        return len(block_ids) > 0 and demand.num_local % self.tokens_per_block != 0

    def _pending_among(self, rows: Int32Array) -> Int64Array:
        if not self._pending:
            return _NOWHERE
        return np.isin(rows, np.fromiter(self._pending, np.int32, len(self._pending))).nonzero()[0]

    def _take_until(self, row: int, first: int, stop: int) -> None:
        for layer in range(len(self.groups)):
            self.stack.take(layer, row, first, stop)
        self.stack.num_blocks[row] = max(first, stop)

    def _num_skipped_blocks(self, demand: Demand) -> int:
        return max(0, self._rule.num_skipped(demand.num_total) // self.tokens_per_block)

    def _copy(self, row: int, pending: _PendingCopy) -> None:
        for layer in range(len(self.groups)):
            if pending.is_own:
                if self.pool.entry_of(int(self.stack.tables[layer, row, pending.column])) == NO_ENTRY:
                    continue  # evicted meanwhile
                self._fresh.add(self.pool.entry_of(self.stack.copy_out(layer, row, pending.column)))
            else:
                self.stack.make_private(layer, row, pending.column)

    def _move_speculative(self, row: int, num_held: int, running_column: int, num_columns: int) -> int:
        """Speculative states are scratch: those before the running column move behind it; returns the columns then."""
        for column in range(num_held - self._num_speculative, min(num_held, running_column)):
            for layer in range(len(self.groups)):
                self.stack.write(layer, row, num_columns, self.stack.tables[layer, row, column : column + 1].copy())
            self.stack.tables[:, row, column] = NULL_BLOCK_ID
            num_columns += 1
        return num_columns
