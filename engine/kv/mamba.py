"""Recurrent state whose values at block boundaries are blocks of their own, which the prefix cache may keep.

    computed:        0        B        2B       3B
    columns:         |  null  |  null  | state  | running |
                                  at 3B, the one before  ^ written by the next step, from the state before it

A row holds the running state and the one before it; everything else is null. What chunks a prompt is computed in
decides at which boundaries there are states at all.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from blockferry.engine.kv.group_table import GroupTable
from blockferry.engine.kv.hit_rules import Count, HitRule, Presence, Retention
from blockferry.engine.kv.reach import cdiv
from blockferry.engine.kv.spec import MambaSpec
from blockferry.engine.kv.type_manager import CacheWish, DecodeDemand, Demand, GroupContext, TailWish
from blockferry.engine.request import BoolArray, Int32Array

_NONE = -1  # column of a row that has no such column


class StateRule:
    """The HitRule of states: a hit needs the one state at its end, wherever that is.

    Never gives one up for a draft: draft models have no recurrent layers.
    """

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


class MambaManager:
    """The TypeManager of states at block boundaries."""

    def __init__(self, context: GroupContext, spec: MambaSpec) -> None:
        self.rule: HitRule | None = StateRule()
        self.group = context.group
        self.kind = context.spec.kind
        self.pool = context.pool
        self.tokens_per_block = spec.block_size
        self.is_draft = False
        self._num_speculative = spec.num_speculative_blocks
        rows = context.rows
        max_blocks = cdiv(rows.max_model_len, spec.block_size) + spec.num_speculative_blocks
        self._blocks = GroupTable(context, max_blocks=max_blocks)
        self.table, self.num_cached = self._blocks.table, self._blocks.num_cached
        self._state_rule = StateRule()
        self._context = context
        self._rows = rows
        self._has_running: BoolArray = np.zeros(rows.max_rows, np.bool_)  # its last columns are its own states
        self._previous: Int32Array = np.full(
            rows.max_rows, _NONE, np.int32
        )  # column of the state before the running one
        self._pending: dict[int, _PendingCopy] = {}
        self._fresh: set[int] = set()  # entries under which states were cached in this step

    def start_step(self) -> None:
        """States cached before can be read from now on."""
        self._fresh.clear()

    def is_deferred(self, hit_ids: Int32Array) -> bool:
        """Whether the hit's state is written by a step that is still being put together."""
        return bool(self._fresh) and len(hit_ids) > 0 and int(self.pool.entry[hit_ids[-1]]) in self._fresh

    # one row

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once: the running state and the one before it."""
        return min(cdiv(num_tokens, self.tokens_per_block), 2) + self._num_speculative

    def num_needed(self, row: int, demand: Demand, hit_ids: Int32Array) -> int:
        """Free blocks that go when the row adopts hit_ids and grows: new ones, and idle ones of the hit."""
        num_new = 0
        if self._num_required(demand.num_main) > len(hit_ids) + self._blocks.num_blocks(row):
            num_new = 1 if self._has_running[row] else 1 + self._num_speculative
        if row in self._pending or self._ends_inside(demand, hit_ids):
            num_new += 1
        return num_new + self.pool.num_idle(hit_ids)

    def adopt(self, row: int, demand: Demand, hit_ids: Int32Array) -> None:
        """Start a row with a hit's state, which gets one owner more."""
        num_skipped = max(0, self._state_rule.num_skipped(demand.num_total) // self.tokens_per_block)
        held = hit_ids[num_skipped:]
        self._blocks.start(row, np.concatenate([np.zeros(num_skipped, np.int32), held]))
        if self._ends_inside(demand, held):
            column = demand.num_local // self.tokens_per_block
            self._pending[row] = _PendingCopy(column=column, is_own=False)
            self.num_cached[row] = column

    def take_external(self, row: int, demand: Demand) -> None:
        """Take a block for the state that comes from elsewhere."""
        self._blocks.take_until(row, cdiv(demand.num_total, self.tokens_per_block))

    def grow(self, row: int, demand: Demand) -> None:
        """Take the block that the running state moves to, where it leaves its block in this step."""
        num_required = self._num_required(demand.num_main)
        num_held = self._blocks.num_blocks(row)
        pending = self._pending.pop(row, None)
        if num_required <= num_held and pending is None:
            self._has_running[row] = True
            return
        has_running = bool(self._has_running[row])
        if has_running:
            self._previous[row] = num_held - 1 - self._num_speculative
        elif num_held:
            self._previous[row] = num_held - 1
        running_column = num_required - self._num_speculative - 1
        if num_held < running_column:
            self._blocks.append(row, np.zeros(running_column - num_held, np.int32))
        if has_running:
            self._move_speculative(row, num_held, running_column)
        if pending is not None:
            self._copy(row, pending)
        self._blocks.take_until(row, num_required)
        self._has_running[row] = True

    def skip(self, row: int, num_computed: int) -> None:
        """Free states that no token after num_computed starts from."""
        num_held = self._blocks.num_blocks(row)
        entries = self.table.block_ids[row]
        column = min(self._state_rule.num_skipped(num_computed) // self.tokens_per_block, num_held) - 1
        gone = []
        while column >= 0 and entries[column]:
            gone.append(column)
            column -= 1
        previous = int(self._previous[row])
        if _NONE < previous < cdiv(num_computed, self.tokens_per_block) - 1 and entries[previous]:
            gone += [previous] if previous not in gone else []
        if gone:
            self._blocks.free_columns(np.full(len(gone), row, np.int32), np.array(gone, np.int32))

    def drop(self, row: int) -> Int32Array:
        """Forget a row and return its blocks in table order; their owner count is untouched."""
        self._pending.pop(row, None)
        self._has_running[row] = False
        self._previous[row] = _NONE
        return self._blocks.drop(row)

    # all decoding rows at once

    def num_missing_in(self, demand: DecodeDemand) -> Int32Array:
        """Blocks that each row must take; shape [R]."""
        required = (demand.num_main + (self.tokens_per_block - 1)) // self.tokens_per_block + self._num_speculative
        missing: Int32Array = (required > self.table.num_blocks.take(demand.rows)).astype(np.int32)
        for index in self._pending_among(demand.rows):
            missing[index] += 1
        return missing

    def grow_in(self, demand: DecodeDemand, num_blocks: Int32Array) -> None:
        """Take num_blocks [R], all >= 1, for the demand's rows."""
        is_usual = self._has_running.take(demand.rows)
        is_usual[self._pending_among(demand.rows)] = False
        if self._num_speculative or not is_usual.all():
            for row, num_main in zip(demand.rows.tolist(), demand.num_main.tolist(), strict=True):
                self.grow(row, Demand(num_local=num_main, num_total=num_main, num_main=num_main, num_slots=num_main))
            return
        self._previous[demand.rows] = self.table.num_blocks.take(demand.rows) - 1
        self._blocks.take_in(demand.rows, num_blocks)

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R]."""
        table = self.table.block_ids
        stop = (num_computed - 1) // self.tokens_per_block
        stop = np.minimum(stop, self.table.num_blocks.take(rows))
        before = table[rows, np.maximum(stop - 1, 0)]
        previous = self._previous.take(rows)
        is_passed = (previous > _NONE) & (previous < (num_computed - 1) // self.tokens_per_block)
        is_passed &= table[rows, np.maximum(previous, 0)] != 0
        due = (((stop > 0) & (before != 0)) | is_passed).nonzero()[0]
        for row, num_tokens in zip(rows[due].tolist(), num_computed[due].tolist(), strict=True):
            self.skip(row, num_tokens)

    # caching

    def wish_in(self, rows: Int32Array, num_tokens: Int32Array) -> CacheWish | None:
        """States at block boundaries among the first num_tokens [R]; counts them as cached from now on."""
        stop = num_tokens // self.tokens_per_block
        due = (stop > self.num_cached.take(rows)).nonzero()[0]
        wished_rows: list[Int32Array] = []
        wished_columns: list[Int32Array] = []
        for row, last in zip(rows[due].tolist(), stop[due].tolist(), strict=True):
            columns = self.table.block_ids[row, self.num_cached[row] : last].nonzero()[0].astype(np.int32)
            columns += self.num_cached[row]
            self.num_cached[row] = last
            kept = self._state_rule.kept_columns(
                columns,
                np.broadcast_to(self._context.kept_lengths[row], (len(columns), 2)),
                tokens_per_block=self.tokens_per_block,
                retention=self._context.retention,
            )
            wished_columns.append(columns if kept is None else columns[kept])
            wished_rows.append(np.full(len(wished_columns[-1]), row, np.int32))
        if not wished_rows:
            return None
        columns = np.concatenate(wished_columns)
        return CacheWish(rows=np.concatenate(wished_rows), columns=columns) if len(columns) else None

    def cache(self, wish: CacheWish, entries: Int32Array) -> None:
        """Let the wished states be found under entries [C], from the next step on."""
        block_ids = self.table.block_ids[wish.rows, wish.columns]
        self.pool.cache(self.group, block_ids, entries)
        self._fresh.update(entries.tolist())

    def wish_tail(self, row: int, num_tokens: int) -> TailWish | None:
        """The running state, when it is the last that a hit on the whole prompt can resume from, inside a block."""
        if num_tokens != self.last_kept_length(row) or num_tokens % self.tokens_per_block == 0:
            return None
        column = num_tokens // self.tokens_per_block
        if column >= self._blocks.num_blocks(row) or not self.table.block_ids[row, column]:
            return None
        return TailWish(column=column, num_tokens=num_tokens)

    def last_kept_length(self, row: int) -> int:
        """The last length at which a hit on the row's whole prompt can resume, were it cached."""
        hash_block_size = self._context.hash_block_size
        return int(self._context.kept_lengths[row, 0]) // hash_block_size * hash_block_size

    def cache_tail(self, row: int, wish: TailWish, entry: int) -> None:
        """Let the running state be found; before the row computes on, the cache gets a copy of it."""
        block_id = int(self.table.block_ids[row, wish.column])
        self.pool.cache_also(self.group, block_id, entry)
        self._fresh.add(entry)
        self._pending[row] = _PendingCopy(column=wish.column, is_own=True)
        self.num_cached[row] = wish.column

    def _num_required(self, num_main: int) -> int:
        return cdiv(num_main, self.tokens_per_block) + self._num_speculative

    def _ends_inside(self, demand: Demand, hit_ids: Int32Array) -> bool:
        return len(hit_ids) > 0 and demand.num_local % self.tokens_per_block != 0

    def _pending_among(self, rows: Int32Array) -> Int32Array:
        if not self._pending:
            return np.empty(0, np.int32)
        return np.isin(rows, np.fromiter(self._pending, np.int32, len(self._pending))).nonzero()[0].astype(np.int32)

    def _copy(self, row: int, pending: _PendingCopy) -> None:
        if pending.is_own:
            self._fresh.add(int(self.pool.entry[self._blocks.copy_out(row, pending.column)]))
        else:
            self._blocks.make_private(row, pending.column)

    def _move_speculative(self, row: int, num_held: int, running_column: int) -> None:
        """Speculative states are scratch: those before the running column move behind it."""
        for column in range(num_held - self._num_speculative, min(num_held, running_column)):
            block_id = self.table.block_ids[row, column]
            self._blocks.append(row, np.array([block_id], np.int32))
            self._blocks.put(row, column, 0)
