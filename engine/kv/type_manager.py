"""The seam between the coordinator and the cache types: what every type manager does, and what it is made of.

A type manager owns the block tables of its groups and acts on their pool only when told to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.hit_rules import HitRule, Retention
from blockferry.engine.kv.ledger_log import LedgerLog
from blockferry.engine.kv.reach import SequenceLimits
from blockferry.engine.kv.spec import KVCacheSpec
from blockferry.engine.request import BoolArray, Int32Array
from blockferry.engine.rows import RowTable

if TYPE_CHECKING:
    from blockferry.engine.kv.table_stack import TableStack

NO_BLOCKS: Int32Array = np.empty(0, np.int32)

HitBlocks = Sequence[Int32Array]
"""Blocks of a hit, one array per group of a manager, null entries 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one allocation asks of every group: token counts, each a position that the sequence reaches.

    | ... computed, hit | external | new | lookahead |
                   num_local   num_total  num_main  num_slots
    """

    num_local: int
    num_total: int  # num_local, and what comes from elsewhere
    num_main: int  # num_total, and what is computed now
    num_slots: int  # num_main, and slots for unverified drafts
    num_encoder: int = 0  # tokens of the encoder's input; 0 after the first allocation
    is_admission: bool = False  # asks for the whole sequence, of which a type may hold less at once


class DecodeDemand(NamedTuple):
    """The same for one more token of each of rows [R] (no row twice); all arrays [R].

    A NamedTuple, as are the other values of the hot path: a frozen dataclass costs a microsecond more to make.
    """

    rows: Int32Array
    num_main: Int32Array
    num_slots: Int32Array

    def keep(self, chosen: NDArray[np.integer]) -> DecodeDemand:
        """The same for some of the rows, by index."""
        rows, num_main = self.rows.take(chosen), self.num_main.take(chosen)
        num_slots = num_main if self.num_slots is self.num_main else self.num_slots.take(chosen)
        return DecodeDemand(rows=rows, num_main=num_main, num_slots=num_slots)

    def keep_leading(self, count: int) -> DecodeDemand:
        """The same for the first count rows."""
        return DecodeDemand(*(values[:count] for values in self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """One cache group of a manager."""

    number: int
    spec: KVCacheSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackContext:
    """What a type manager is made from: groups that share everything but their tables."""

    groups: tuple[GroupPlace, ...]
    tokens_per_block: int
    is_draft: bool
    limits: SequenceLimits
    retention: Retention
    hash_block_size: int
    pool: BlockPool
    rows: RowTable
    kept_lengths: Int32Array  # [rows, 2]: lengths always worth keeping, however sparse the rest; 0 for none
    log: LedgerLog

    @property
    def group_numbers(self) -> tuple[int, ...]:
        """Numbers of the groups, in order."""
        return tuple(group.number for group in self.groups)


class CacheWish(NamedTuple):
    """Full blocks that may be found from now on, of all groups of a manager; row after row, columns ascending."""

    rows: Int32Array  # [C]
    columns: Int32Array  # [C]
    block_ids: Int32Array  # [groups, C]
    chosen: BoolArray | None  # [groups, C]: which of them; None: all


def make_wish(
    rows: Int32Array, columns: Int32Array, block_ids: Int32Array, chosen: BoolArray | None
) -> CacheWish | None:
    """A wish without columns that no group has a block for; None when nothing is left."""
    if chosen is not None:
        used = chosen.any(axis=0)
        if not used.all():
            rows, columns, block_ids, chosen = rows[used], columns[used], block_ids[:, used], chosen[:, used]
        if chosen.all():
            chosen = None
    if not len(rows):
        return None
    return CacheWish(rows=rows, columns=columns, block_ids=block_ids, chosen=chosen)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TailWish:
    """A column whose blocks may be found under the hash of their first tokens, up to num_tokens of the sequence."""

    layers: list[int]  # of the manager's groups
    column: int
    num_tokens: int


class TypeManager(Protocol):
    """Cache groups of one type and block size. Rows are those of the RowTable; a layer is a group's place in `groups`.

    An allocation asks num_needed of every manager, and only when all of it is there: adopt (first allocation) in every
    one, then take_external in every one, then grow in every one.
    """

    groups: tuple[int, ...]
    rules: list[HitRule | None]  # per group; None: nothing is ever shared
    pool: BlockPool
    stack: TableStack
    tokens_per_block: int
    is_draft: bool

    def start_step(self) -> None:
        """A new step begins; what earlier ones computed may be used."""

    def is_deferred(self, hits: HitBlocks, num_tokens: int) -> bool:
        """Whether what a hit of num_tokens reads before the step computes is only computed in this very step."""

    def most_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once, in all groups."""

    def num_needed(self, row: int, demand: Demand, hits: HitBlocks) -> int:
        """Free blocks that go when the row adopts the hits and grows: new ones, and idle ones of the hits."""

    def adopt(self, row: int, demand: Demand, hits: HitBlocks) -> None:
        """Start a row with hits: their blocks get one owner more."""

    def take_external(self, row: int, demand: Demand) -> None:
        """Take blocks for tokens whose content comes from elsewhere."""

    def grow(self, row: int, demand: Demand) -> None:
        """Take what the row lacks; the caller has checked that it is there."""

    def skip(self, row: int, num_computed: int) -> None:
        """Free the row's blocks that no token after num_computed ever reads."""

    def drop(self, row: int) -> list[Int32Array]:
        """Forget a row and return its blocks per group, in table order; their owner count is untouched."""

    def lacks_blocks(self, demand: DecodeDemand) -> BoolArray:
        """Which rows must take any; shape [R]."""

    def num_missing_in(self, demand: DecodeDemand) -> Int32Array:
        """Blocks that each row must take in each of the groups; shape [R]."""

    def grow_in(self, demand: DecodeDemand, num_blocks: Int32Array) -> None:
        """Take num_blocks [R], all >= 1, in each of the groups; the caller has checked that they are there."""

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R]."""

    def wish_in(self, rows: Int32Array, num_tokens: Int32Array) -> CacheWish | None:
        """What of the first num_tokens [R] of rows [R] is full and not cached yet; the manager counts it as cached."""

    def cached(self, entries: Int32Array) -> None:
        """A wish was granted: its blocks can be found under entries [C]."""

    def wish_tail(self, row: int, num_tokens: int) -> TailWish | None:
        """What can be found of blocks that are not full, now that num_tokens are computed."""

    def tail_cached(self, row: int, wish: TailWish, entry: int) -> None:
        """A tail wish was granted: its blocks can be found under entry."""
