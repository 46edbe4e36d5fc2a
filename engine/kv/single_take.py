"""Groups whose blocks are taken once per sequence and shared with nobody: the encoder's states, and scratch rings.

No prefix cache, nothing to skip; decoding takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blockferry.engine.kv.group_table import GroupTable
from blockferry.engine.kv.hit_rules import HitRule
from blockferry.engine.kv.type_manager import CacheWish, DecodeDemand, Demand, GroupContext, TailWish
from blockferry.engine.request import Int32Array


class SingleTakeManager:
    """The TypeManager of such a group; num_blocks_of says how many blocks a first allocation takes."""

    def __init__(self, context: GroupContext, num_blocks_of: Callable[[Demand], int]) -> None:
        self.rule: HitRule | None = None
        self.group = context.group
        self.kind = context.spec.kind
        self.pool = context.pool
        self.tokens_per_block = context.spec.tokens_per_block
        self.is_draft = False
        self._max_held = context.spec.max_admission_blocks_per_request(context.limits)
        self._blocks = GroupTable(context, max_blocks=max(1, self._max_held))
        self.table, self.num_cached = self._blocks.table, self._blocks.num_cached
        self._num_blocks_of = num_blocks_of

    def start_step(self) -> None:
        """Nothing is shared, so nothing to do."""

    def is_deferred(self, hit_ids: Int32Array) -> bool:
        """There are no hits."""
        assert not len(hit_ids), hit_ids
        return False

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence ever holds at once."""
        del num_tokens
        return self._max_held

    def num_needed(self, row: int, demand: Demand, hit_ids: Int32Array) -> int:
        """What the first allocation takes; afterwards nothing."""
        assert not len(hit_ids), hit_ids
        return max(0, self._num_blocks_of(demand) - self._blocks.num_blocks(row))

    def adopt(self, row: int, demand: Demand, hit_ids: Int32Array) -> None:
        """There are no hits."""
        assert not len(hit_ids), (row, demand, hit_ids)

    def take_external(self, row: int, demand: Demand) -> None:
        """grow() takes everything."""

    def grow(self, row: int, demand: Demand) -> None:
        """Take what the row lacks."""
        self._blocks.take_until(row, self._num_blocks_of(demand))

    def skip(self, row: int, num_computed: int) -> None:
        """Nothing goes before the sequence ends."""

    def drop(self, row: int) -> Int32Array:
        """Forget a row and return its blocks in table order; their owner count is untouched."""
        return self._blocks.drop(row)

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

    def cache(self, wish: CacheWish, entries: Int32Array) -> None:
        """Never wished for."""
        raise AssertionError((wish, entries))

    def wish_tail(self, row: int, num_tokens: int) -> None:
        """Nothing is shared."""
        del row, num_tokens

    def cache_tail(self, row: int, wish: TailWish, entry: int) -> None:
        """Never wished for."""
        raise AssertionError((row, wish, entry))
