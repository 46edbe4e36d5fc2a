"""The seam between the coordinator and the cache types: what every group's manager does, and what it is made of.

Defines no behaviour. A type manager owns its group's block table and acts on its pool only when told to.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.hit_rules import HitRule, Retention
from blockferry.engine.kv.ledger_log import LedgerLog
from blockferry.engine.kv.reach import SequenceLimits, SpecKind
from blockferry.engine.kv.spec import KVCacheSpec
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

NO_BLOCKS: Int32Array = np.empty(0, np.int32)


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeDemand:
    """The same for one more token of each of rows [R] (no row twice); all arrays [R]."""

    rows: Int32Array
    num_main: Int32Array
    num_slots: Int32Array

    def keep(self, chosen: NDArray[np.integer]) -> DecodeDemand:
        """The same for some of the rows, by index."""
        return DecodeDemand(rows=self.rows[chosen], num_main=self.num_main[chosen], num_slots=self.num_slots[chosen])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """What a type manager is made from."""

    group: int
    spec: KVCacheSpec
    is_draft: bool
    limits: SequenceLimits
    retention: Retention
    hash_block_size: int
    pool: BlockPool
    rows: RowTable
    kept_lengths: Int32Array  # [rows, 2]: lengths always worth keeping, however sparse the rest; 0 for none
    log: LedgerLog


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheWish:
    """Full blocks of a group that may be found from now on; arrays [C], row after row, columns ascending."""

    rows: Int32Array
    columns: Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TailWish:
    """A block that may be found under the hash of its first tokens, up to num_tokens of the sequence."""

    column: int
    num_tokens: int


class TypeManager(Protocol):
    """One cache group of one type. Rows are those of the RowTable.

    An allocation asks num_needed of every group, and only when all of it is there: adopt (first allocation) in every
    group, then take_external in every group, then grow in every group.
    """

    group: int
    kind: SpecKind
    pool: BlockPool
    table: BlockTable
    num_cached: Int32Array  # per row: leading columns that caching is done with
    rule: HitRule | None  # None: nothing is ever shared
    tokens_per_block: int
    is_draft: bool

    def start_step(self) -> None:
        """A new step begins; what earlier ones computed may be used."""

    def is_deferred(self, hit_ids: Int32Array) -> bool:
        """Whether a hit's content is only computed in this very step, so that the next one may use it."""

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once."""

    def num_needed(self, row: int, demand: Demand, hit_ids: Int32Array) -> int:
        """Free blocks that go when the row adopts hit_ids and grows: new ones, and idle ones of the hit."""

    def adopt(self, row: int, demand: Demand, hit_ids: Int32Array) -> None:
        """Start a row with a hit: its blocks get one owner more."""

    def take_external(self, row: int, demand: Demand) -> None:
        """Take blocks for tokens whose content comes from elsewhere."""

    def grow(self, row: int, demand: Demand) -> None:
        """Take what the row lacks; the caller has checked that it is there."""

    def skip(self, row: int, num_computed: int) -> None:
        """Free the row's blocks that no token after num_computed ever reads."""

    def drop(self, row: int) -> Int32Array:
        """Forget a row and return its blocks in table order; their owner count is untouched."""

    def num_missing_in(self, demand: DecodeDemand) -> Int32Array:
        """Blocks that each row must take; shape [R]."""

    def grow_in(self, demand: DecodeDemand, num_blocks: Int32Array) -> None:
        """Take num_blocks [R], all >= 1, for the demand's rows; the caller has checked that they are there."""

    def skip_in(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """skip() for rows [R] and num_computed [R]."""

    def wish_in(self, rows: Int32Array, num_tokens: Int32Array) -> CacheWish | None:
        """What of the first num_tokens [R] of rows [R] is full and not cached yet; the manager counts it as cached."""

    def cache(self, wish: CacheWish, entries: Int32Array) -> None:
        """Let the wished blocks be found under entries [C]."""

    def wish_tail(self, row: int, num_tokens: int) -> TailWish | None:
        """What can be found of a block that is not full, now that num_tokens are computed."""

    def cache_tail(self, row: int, wish: TailWish, entry: int) -> None:
        """Let the wished tail be found under entry."""
