"""Groups whose blocks are taken once per sequence and shared with nobody: the encoder's states, and scratch rings.

No prefix cache, nothing to skip; decoding takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blockferry.engine.kv.hit_rules import HitRule
from blockferry.engine.kv.table_stack import TableStack
from blockferry.engine.kv.type_manager import DecodeDemand, Demand, HitBlocks, StackContext, TailWish
from blockferry.engine.request import BoolArray, Int32Array


class SingleTakeManager:
    """The TypeManager of such a group; num_blocks_of says how many blocks a first allocation takes."""

    def __init__(self, context: StackContext, num_blocks_of: Callable[[Demand], int]) -> None:
        self.groups = context.group_numbers
        self.pool = context.pool
        self.rules: list[HitRule | None] = [None for _ in self.groups]
        self.tokens_per_block = context.tokens_per_block
        self.is_draft = False
        max_held = context.groups[0].spec.max_admission_blocks_per_request(context.limits)
        self.stack = TableStack(context, max_blocks=max(1, max_held))
        self._num_blocks_of = num_blocks_of

    def start_step(self) -> None:
        """Nothing is shared, so nothing to do."""

    def is_deferred(self, hits: HitBlocks, num_tokens: int) -> bool:
        """There are no hits."""
        assert not any(map(len, hits)), (hits, num_tokens)
        return False

    def most_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """What the first allocation takes is all that a sequence ever holds."""
        demand = Demand(
            num_local=0, num_total=0, num_main=num_tokens, num_slots=num_tokens, num_encoder=num_encoder_tokens
        )
        return len(self.groups) * self._num_blocks_of(demand)

    def num_needed(self, row: int, demand: Demand, hits: HitBlocks) -> int:
        """What the first allocation takes; afterwards nothing."""
        assert not any(map(len, hits)), hits
        return len(self.groups) * max(0, self._num_blocks_of(demand) - int(self.stack.num_blocks[row]))

    def adopt(self, row: int, demand: Demand, hits: HitBlocks) -> None:
        """There are no hits."""
        assert not any(map(len, hits)), (row, demand, hits)

    def take_external(self, row: int, demand: Demand) -> None:
        """grow() takes everything."""

    def grow(self, row: int, demand: Demand) -> None:
        """Take what the row lacks."""
        num_held = int(self.stack.num_blocks[row])
        num_blocks = max(num_held, self._num_blocks_of(demand))
        for layer in range(len(self.groups)):
            self.stack.take(layer, row, num_held, num_blocks)
        self.stack.num_blocks[row] = num_blocks

    def skip(self, row: int, num_computed: int) -> None:
        """Nothing goes before the sequence ends."""

    def drop(self, row: int) -> list[Int32Array]:
        """Forget a row and return its blocks per group, in table order; their owner count is untouched."""
        return self.stack.drop(row)

    def lacks_blocks(self, demand: DecodeDemand) -> BoolArray:
        """None."""
        return np.zeros(len(demand.rows), np.bool_)

    def num_missing_in(self, demand: DecodeDemand) -> Int32Array:
        """None."""
        return np.zeros(len(demand.rows), np.int32)

    def grow_in(self, demand: DecodeDemand, num_blocks: Int32Array) -> None:
        """Never asked for: decoding lacks nothing."""
        raise AssertionError((demand, num_blocks))

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """Nothing goes."""

    def wish_in(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        """Nothing is shared."""
        del rows, num_tokens

    def cached(self, entries: Int32Array) -> None:
        """Never wished for."""
        raise AssertionError(entries)

    def wish_tail(self, row: int, num_tokens: int) -> None:
        """Nothing is shared."""
        del row, num_tokens

    def tail_cached(self, row: int, wish: TailWish, entry: int) -> None:
        """Never wished for."""
        raise AssertionError((row, wish, entry))
