"""Block tables whose columns are positions: attention of every reach, and running states that are never shared.

Which columns may go and which lengths are hits is the HitRule's; this class does the bookkeeping, for all groups with
one block size at once.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.kv.hit_rules import HitRule
from blockferry.engine.kv.reach import cdiv
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
from blockferry.engine.request import BoolArray, Int32Array

_ZERO = np.int32(0)  # an operand of arrays: a Python int costs a conversion every time


class PositionalManager:
    """The TypeManager of groups whose columns are positions.

    columns of a row:  | null (skipped) | cached ...... | full or partly filled | lookahead |
                       0        first_held         num_cached            computed      num_blocks
    """

    def __init__(self, context: StackContext, rules: list[HitRule], *, num_extra_tokens: int = 0) -> None:
        """One rule per group. num_extra_tokens: slots past every sequence's end, for states of drafts."""
        rows = context.rows
        self.groups = context.group_numbers
        self.pool = context.pool
        self.rules: list[HitRule | None] = list(rules)
        self.tokens_per_block = context.tokens_per_block
        self.is_draft = context.is_draft
        self.stack = TableStack(context, max_blocks=cdiv(rows.max_model_len + num_extra_tokens, self.tokens_per_block))
        self._rules = rules
        self._rows = rows
        self._context = context
        self._num_extra_tokens = num_extra_tokens
        self._divisor = np.int32(self.tokens_per_block)
        self._round_up = np.int32(num_extra_tokens + self.tokens_per_block - 1)
        self._max_held = [group.spec.max_admission_blocks_per_request(context.limits) for group in context.groups]
        self._dropping = [layer for layer, rule in enumerate(rules) if rule.drops_blocks]
        self._dropping_layers: Int32Array = np.array(self._dropping, np.int32)
        # [dropping layer, row]: columns before it that may go, have gone
        self._first_held: Int32Array = np.zeros((len(self._dropping), rows.max_rows), np.int32)
        self._shared_columns: dict[int, int] = {}  # row -> column of a hit's blocks that the row will write into
        self._can_share_tails = self.tokens_per_block > context.retention.alignment
        self._fresh: set[int] = set()  # entries under which blocks were cached in this step, if tails can be shared

    def start_step(self) -> None:
        """Blocks cached before can be copied from now on."""
        self._fresh.clear()

    def is_deferred(self, hits: HitBlocks, num_tokens: int) -> bool:
        """Whether a block that must be copied is written by a step that is still being put together.

        Blocks that are only read can be: keys and values are written before they are read, but after all copies.
        """
        if not self._fresh or num_tokens % self.tokens_per_block == 0:
            return False
        return any(self.pool.entry_of(int(block_ids[-1])) in self._fresh for block_ids in hits if len(block_ids))

    # one row

    def most_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once."""
        del num_encoder_tokens
        num_columns = cdiv(num_tokens + self._num_extra_tokens, self.tokens_per_block)
        return sum(min(num_columns, held) for held in self._max_held)

    def num_needed(self, row: int, demand: Demand, hits: HitBlocks) -> int:
        """Free blocks that go when the row adopts the hits and grows: new ones, and idle ones of the hits."""
        num_columns = cdiv(demand.num_slots + self._num_extra_tokens, self.tokens_per_block)
        num_held = int(self.stack.num_blocks[row])
        if num_held and not demand.is_admission:
            return len(self._rules) * max(0, num_columns - num_held)
        num_needed = 0
        for layer, block_ids in enumerate(hits):
            num_required = min(num_columns, self._max_held[layer]) if demand.is_admission else num_columns
            num_skipped = 0 if num_held else self._num_skipped_blocks(layer, row, demand)
            num_needed += max(0, num_required - max(num_skipped, len(block_ids), num_held))
            if len(block_ids):
                num_needed += self.pool.num_idle(block_ids[num_skipped:]) + int(self._ends_inside(demand, block_ids))
        return num_needed

    def adopt(self, row: int, demand: Demand, hits: HitBlocks) -> None:
        """Start a row with hits: their blocks get one owner more."""
        for layer, block_ids in enumerate(hits):
            num_skipped = self._num_skipped_blocks(layer, row, demand)
            held = block_ids[num_skipped:]
            self.pool.touch(held)
            if num_skipped:
                self.stack.write(layer, row, 0, np.zeros(num_skipped, np.int32))
            self.stack.write(layer, row, num_skipped, held)
        num_columns = len(hits[0])
        self.stack.num_blocks[row] = self.stack.num_cached[row] = num_columns
        if self._ends_inside(demand, hits[0]):
            self._shared_columns[row] = demand.num_local // self.tokens_per_block
            self.stack.num_cached[row] = self._shared_columns[row]
        self._keep_prompt(row)

    def take_external(self, row: int, demand: Demand) -> None:
        """Take blocks for tokens whose content comes from elsewhere and is still in reach."""
        num_local = int(self.stack.num_blocks[row])
        num_columns = cdiv(demand.num_total, self.tokens_per_block)
        for layer in range(len(self._rules)):
            first = max(num_local, self._num_skipped_blocks(layer, row, demand))
            self.stack.take(layer, row, first, num_columns)
        self.stack.num_blocks[row] = max(num_local, num_columns)

    def grow(self, row: int, demand: Demand) -> None:
        """Take what the row lacks."""
        num_held = int(self.stack.num_blocks[row])
        if not num_held:
            self._keep_prompt(row)
        num_columns = cdiv(demand.num_slots + self._num_extra_tokens, self.tokens_per_block)
        column = self._shared_columns.pop(row, None)
        if column is not None:
            for layer in range(len(self._rules)):
                self.stack.make_private(layer, row, column)
        self.stack.take_columns(row, num_held, num_columns)

    def skip(self, row: int, num_computed: int) -> None:
        """Free the row's blocks that no token after num_computed ever reads, the last one first."""
        num_held = int(self.stack.num_blocks[row])
        for place, layer in enumerate(self._dropping):
            stop = min(self._rules[layer].num_skipped(num_computed) // self.tokens_per_block, num_held)
            first = int(self._first_held[place, row])
            if stop > first:
                columns = np.arange(stop - 1, first - 1, -1, dtype=np.int32)
                self.stack.free_entries(layer, np.full(len(columns), row, np.int32), columns)
                self._first_held[place, row] = stop

    def drop(self, row: int) -> list[Int32Array]:
        """Forget a row and return its blocks per group, in table order; their owner count is untouched."""
        self._shared_columns.pop(row, None)
        self._first_held[:, row] = 0
        return self.stack.drop(row)

    # all decoding rows at once

    def lacks_blocks(self, demand: DecodeDemand) -> BoolArray:
        """Which rows must take any; shape [R]."""
        num_slots = demand.num_slots
        if self._num_extra_tokens:
            num_slots = num_slots + np.int32(self._num_extra_tokens)
        held = self.stack.num_blocks[demand.rows]
        held *= self._divisor  # in place: half the time
        lacks: BoolArray = num_slots > held
        return lacks

    def num_missing_in(self, demand: DecodeDemand) -> Int32Array:
        """Blocks that each row must take in each of the groups; shape [R]."""
        missing = (demand.num_slots + self._round_up) // self._divisor - self.stack.num_blocks.take(demand.rows)
        np.maximum(missing, _ZERO, out=missing)
        return missing

    def grow_in(self, demand: DecodeDemand, num_blocks: Int32Array) -> None:
        """Take num_blocks [R], all >= 1, in each of the groups for the demand's rows."""
        self.stack.take_in(demand.rows, num_blocks)

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R], of which each has its blocks."""
        if not self._dropping:
            return
        stop = np.empty((len(self._dropping), len(rows)), np.int32)
        for place, layer in enumerate(self._dropping):
            stop[place] = self._rules[layer].num_skipped(num_computed)
        stop //= self._divisor
        places, chosen = (stop > self._first_held.take(rows, axis=1)).nonzero()
        if not len(places):
            return
        rows, stop = rows[chosen], stop[places, chosen]
        counts = stop - self._first_held[places, rows]
        self._first_held[places, rows] = stop
        columns = stop - 1
        if (counts > 1).any():
            places, rows = np.repeat(places, counts), np.repeat(rows, counts)
            columns = np.repeat(columns, counts) - count_up(counts)
        self.stack.free_entries(self._dropping_layers[places], rows, columns)

    # caching

    def wish_in(self, rows: Int32Array, num_tokens: Int32Array) -> CacheWish | None:
        """What of the first num_tokens [R] of rows [R] is full and not cached yet; counts as cached from now on."""
        stop = num_tokens // self._divisor
        first = self.stack.num_cached.take(rows)
        counts = stop - first
        columns = first
        if np.count_nonzero(counts == 1) == len(rows):  # the usual case, told with the fewest operations
            self.stack.num_cached[rows] = stop
        else:
            is_due = counts > 0
            rows, counts, first = rows[is_due], counts[is_due], first[is_due]
            if not len(rows):
                return None
            self.stack.num_cached[rows] = stop[is_due]
            rows, columns = np.repeat(rows, counts), np.repeat(first, counts) + count_up(counts)
        block_ids = self.stack.entries(rows, columns)
        chosen = self._chosen(rows, columns, block_ids)
        return make_wish(rows, columns, block_ids, chosen)

    def wish_tail(self, row: int, num_tokens: int) -> TailWish | None:
        """The last length that a hit on the whole prompt can have, if types can resume inside a block."""
        hash_block_size = self._context.hash_block_size
        if self.tokens_per_block == hash_block_size:
            return None
        length = int(self._context.kept_lengths[row, 0]) // hash_block_size * hash_block_size
        column = length // self.tokens_per_block
        if length % self.tokens_per_block == 0 or length > num_tokens or column >= self.stack.num_blocks[row]:
            return None
        layers = [layer for layer, rule in enumerate(self._rules) if rule.resumes_inside]
        return TailWish(layers=layers, column=column, num_tokens=length) if layers else None

    def cached(self, entries: Int32Array) -> None:
        """Blocks are found from now on, but copied from the next step on."""
        if self._can_share_tails:
            self._fresh.update(entries.tolist())

    def tail_cached(self, row: int, wish: TailWish, entry: int) -> None:
        """As of cached(); the row goes on writing behind the tail."""
        del row, wish
        self._fresh.add(entry)

    def _chosen(self, rows: Int32Array, columns: Int32Array, block_ids: Int32Array) -> BoolArray | None:
        """Which of block_ids [groups, C] can serve a hit; None: all of them."""
        chosen: BoolArray | None = None
        for layer in self._dropping:
            kept = self._rules[layer].kept_columns(
                columns,
                self._context.kept_lengths[rows],
                tokens_per_block=self.tokens_per_block,
                retention=self._context.retention,
            )
            if kept is not None:
                chosen = block_ids != 0 if chosen is None else chosen
                chosen[layer] &= kept
        if chosen is None and self._dropping:
            chosen = block_ids != 0
        return chosen

    def _keep_prompt(self, row: int) -> None:
        """A row begins: columns that its groups never let go of are as good as gone."""
        for place, layer in enumerate(self._dropping):
            self._first_held[place, row] = self._first_skippable(layer, row)

    def _num_skipped_blocks(self, layer: int, row: int, demand: Demand) -> int:
        if self._first_skippable(layer, row):
            return 0
        return max(0, self._rules[layer].num_skipped(demand.num_total) // self.tokens_per_block)

    def _first_skippable(self, layer: int, row: int) -> int:
        return self._rules[layer].first_skippable(int(self._rows.num_prompt_tokens[row]), self.tokens_per_block)

    def _ends_inside(self, demand: Demand, block_ids: Int32Array) -> bool:
        return len(block_ids) > 0 and demand.num_local % self.tokens_per_block != 0
