"""Block tables whose columns are positions: attention of every reach, and running states that are never shared.

Which columns may go and which lengths are hits is the HitRule's; this class does the bookkeeping.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.group_table import GroupTable, count_up
from blockferry.engine.kv.hit_rules import HitRule
from blockferry.engine.kv.reach import cdiv
from blockferry.engine.kv.type_manager import CacheWish, DecodeDemand, Demand, GroupContext, TailWish
from blockferry.engine.request import Int32Array


class PositionalManager:
    """The TypeManager of a group whose columns are positions.

    columns of a row:  | null (skipped) | cached ...... | full or partly filled | lookahead |
                       0        first_held         num_cached            computed      num_blocks
    """

    def __init__(self, context: GroupContext, rule: HitRule, *, num_extra_tokens: int = 0) -> None:
        """num_extra_tokens: slots past every sequence's end, for states of drafts."""
        self.rule: HitRule | None = rule
        self.group = context.group
        self.kind = context.spec.kind
        self.pool = context.pool
        self.tokens_per_block = context.spec.tokens_per_block
        self.is_draft = context.is_draft
        rows = context.rows
        self._blocks = GroupTable(
            context, max_blocks=cdiv(rows.max_model_len + num_extra_tokens, self.tokens_per_block)
        )
        self.table, self.num_cached = self._blocks.table, self._blocks.num_cached
        self.first_held: Int32Array = np.zeros(rows.max_rows, np.int32)  # what may go before it, has gone
        self._rule = rule
        self._rows = rows
        self._context = context
        self._num_extra_tokens = num_extra_tokens
        self._max_held = context.spec.max_admission_blocks_per_request(context.limits)
        self._digests_per_block = self.tokens_per_block // context.hash_block_size
        self._shared_columns: dict[int, int] = {}  # row -> column of a hit's block that the row will write into

    def start_step(self) -> None:
        """Attention may read in the step that writes: nothing to do."""

    def is_deferred(self, hit_ids: Int32Array) -> bool:
        """Never: keys and values are written before they are read."""
        del hit_ids
        return False

    # one row

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once."""
        return min(cdiv(num_tokens + self._num_extra_tokens, self.tokens_per_block), self._max_held)

    def num_needed(self, row: int, demand: Demand, hit_ids: Int32Array) -> int:
        """Free blocks that go when the row adopts hit_ids and grows: new ones, and idle ones of the hit."""
        num_required = cdiv(demand.num_slots + self._num_extra_tokens, self.tokens_per_block)
        if demand.is_admission:
            num_required = min(num_required, self._max_held)
        num_held = self._blocks.num_blocks(row)
        if num_held:
            return max(0, num_required - num_held)
        num_skipped = self._num_skipped_blocks(row, demand)
        num_new = max(0, num_required - max(num_skipped, len(hit_ids)))
        if self._ends_inside(demand, hit_ids):
            num_new += 1
        return num_new + self.pool.num_idle(hit_ids[num_skipped:])

    def adopt(self, row: int, demand: Demand, hit_ids: Int32Array) -> None:
        """Start a row with a hit: its blocks get one owner more."""
        num_skipped = self._num_skipped_blocks(row, demand)
        held = hit_ids[num_skipped:]
        self._blocks.start(row, np.concatenate([np.zeros(num_skipped, np.int32), held]) if num_skipped else held)
        self.first_held[row] = self._first_skippable(row)
        if self._ends_inside(demand, held):
            self._shared_columns[row] = demand.num_local // self.tokens_per_block
            self.num_cached[row] = self._shared_columns[row]

    def take_external(self, row: int, demand: Demand) -> None:
        """Take blocks for tokens whose content comes from elsewhere and is still in reach."""
        self._blocks.take_until(row, cdiv(demand.num_total, self.tokens_per_block))

    def grow(self, row: int, demand: Demand) -> None:
        """Take what the row lacks."""
        column = self._shared_columns.pop(row, None)
        if column is not None:
            self._blocks.make_private(row, column)
        self._blocks.take_until(row, cdiv(demand.num_slots + self._num_extra_tokens, self.tokens_per_block))

    def skip(self, row: int, num_computed: int) -> None:
        """Free the row's blocks that no token after num_computed ever reads, the last one first."""
        stop = min(self._rule.num_skipped(num_computed) // self.tokens_per_block, self._blocks.num_blocks(row))
        first = int(self.first_held[row])
        if stop > first:
            columns = np.arange(stop - 1, first - 1, -1, dtype=np.int32)
            self._blocks.free_columns(np.full(len(columns), row, np.int32), columns)
            self.first_held[row] = stop

    def drop(self, row: int) -> Int32Array:
        """Forget a row and return its blocks in table order; their owner count is untouched."""
        self._shared_columns.pop(row, None)
        self.first_held[row] = 0
        return self._blocks.drop(row)

    # all decoding rows at once

    def num_missing_in(self, demand: DecodeDemand) -> Int32Array:
        """Blocks that each row must take; shape [R]."""
        needed = demand.num_slots + np.int32(self._num_extra_tokens + self.tokens_per_block - 1)
        missing = needed // self.tokens_per_block - self.table.num_blocks.take(demand.rows)
        np.maximum(missing, 0, out=missing)
        return missing

    def grow_in(self, demand: DecodeDemand, num_blocks: Int32Array) -> None:
        """Take num_blocks [R], all >= 1, for the demand's rows."""
        self._blocks.take_in(demand.rows, num_blocks)

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R]."""
        stop = np.minimum(
            self._rule.num_skipped(num_computed) // self.tokens_per_block, self.table.num_blocks.take(rows)
        )
        counts = stop - self.first_held.take(rows)
        due = (counts > 0).nonzero()[0]
        if not len(due):
            return
        rows, counts, stop = rows[due], counts[due], stop[due]
        self.first_held[rows] = stop
        columns = stop - 1
        if (counts > 1).any():
            rows, columns = np.repeat(rows, counts), np.repeat(columns, counts) - count_up(counts)
        self._blocks.free_columns(rows, columns)

    # caching

    def wish_in(self, rows: Int32Array, num_tokens: Int32Array) -> CacheWish | None:
        """What of the first num_tokens [R] of rows [R] is full and not cached yet; counts as cached from now on."""
        stop = num_tokens // self.tokens_per_block
        first = self.num_cached.take(rows)
        counts = stop - first
        due = (counts > 0).nonzero()[0]
        if not len(due):
            return None
        rows, counts, columns = rows[due], counts[due], first[due]
        self.num_cached[rows] = stop[due]
        if (counts > 1).any():
            rows, columns = np.repeat(rows, counts), np.repeat(columns, counts) + count_up(counts)
        kept = self._rule.kept_columns(
            columns,
            self._context.kept_lengths[rows],
            tokens_per_block=self.tokens_per_block,
            retention=self._context.retention,
        )
        held = self.table.block_ids[rows, columns] != 0
        chosen = held if kept is None else held & kept
        if not chosen.all():
            rows, columns = rows[chosen], columns[chosen]
        return CacheWish(rows=rows, columns=columns) if len(rows) else None

    def cache(self, wish: CacheWish, entries: Int32Array) -> None:
        """Let the wished blocks be found under entries [C]."""
        self.pool.cache(self.group, self.table.block_ids[wish.rows, wish.columns], entries)

    def wish_tail(self, row: int, num_tokens: int) -> TailWish | None:
        """The last length that a hit on the whole prompt can have, if the type can resume inside a block."""
        hash_block_size = self._context.hash_block_size
        if not self._rule.resumes_inside or self.tokens_per_block == hash_block_size:
            return None
        length = int(self._context.kept_lengths[row, 0]) // hash_block_size * hash_block_size
        column = length // self.tokens_per_block
        is_inside = length % self.tokens_per_block != 0 and column < self._blocks.num_blocks(row)
        return TailWish(column=column, num_tokens=length) if is_inside and length <= num_tokens else None

    def cache_tail(self, row: int, wish: TailWish, entry: int) -> None:
        """Let the wished tail be found under entry."""
        self.pool.cache_also(self.group, int(self.table.block_ids[row, wish.column]), entry)

    def _num_skipped_blocks(self, row: int, demand: Demand) -> int:
        if self._first_skippable(row):
            return 0
        return max(0, self._rule.num_skipped(demand.num_total) // self.tokens_per_block)

    def _first_skippable(self, row: int) -> int:
        return self._rule.first_skippable(int(self._rows.num_prompt_tokens[row]), self.tokens_per_block)

    def _ends_inside(self, demand: Demand, hit_ids: Int32Array) -> bool:
        return len(hit_ids) > 0 and demand.num_local % self.tokens_per_block != 0
