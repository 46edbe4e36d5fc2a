"""Caching: makes the full blocks of rows findable, in all groups at once.

Groups that fill the same tokens share one entry of the index, so that hashes are looked up once however many groups
there are. Owns nothing; which blocks are worth caching is the type managers' to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.announcer import Announcer
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.type_manager import CacheWish, TypeManager
from blockferry.engine.request import Int32Array, Int64Array

_ROW_SHIFT = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    manager: TypeManager
    blocks: CacheWish
    keys: Int64Array  # row << _ROW_SHIFT | number of the hash block that the block ends with


class PrefixCacher:
    """Caches rows of one ledger. chains is indexed by row: the digests of each row's hash blocks."""

    def __init__(
        self,
        managers: Sequence[TypeManager],
        index: PrefixIndex,
        *,
        hash_block_size: int,
        alignment: int,
        announcer: Announcer | None,
    ) -> None:
        """Alignment: hits have multiples of it, so blocks beyond the last one are not worth caching yet."""
        self._managers = [manager for manager in managers if manager.rule is not None]
        self._index = index
        self._hash_block_size = hash_block_size
        self._alignment = alignment
        self._announcer = announcer
        self._finest = min([manager.tokens_per_block for manager in self._managers], default=0)

    def is_due(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Indices of those of rows [R] that have something to cache among their first num_tokens [R]."""
        due = np.zeros(len(rows), np.bool_)
        for manager in self._managers:
            due |= self._limits(manager, num_tokens) >= (manager.num_cached.take(rows) + np.int32(1)) * np.int32(
                manager.tokens_per_block
            )
        indices: Int32Array = due.nonzero()[0].astype(np.int32)
        return indices

    def cache_in(self, rows: Int32Array, num_tokens: Int32Array, chains: Sequence[Sequence[bytes]]) -> None:
        """Cache the full blocks among the first num_tokens [R] of rows [R]; their hashes are known."""
        wishes: list[_Wish] = []
        for manager in self._managers:
            blocks = manager.wish_in(rows, self._limits(manager, num_tokens))
            if blocks is not None:
                step = manager.tokens_per_block // self._hash_block_size
                ends = (blocks.columns.astype(np.int64) + 1) * step - 1
                wishes.append(
                    _Wish(manager=manager, blocks=blocks, keys=ends | (blocks.rows.astype(np.int64) << _ROW_SHIFT))
                )
        if not wishes:
            return
        keys = wishes[0].keys
        is_same = [len(wish.keys) == len(keys) and bool((wish.keys == keys).all()) for wish in wishes]
        if not all(is_same):
            keys = np.unique(np.concatenate([wish.keys for wish in wishes]))
        entries = self._obtain(keys, chains)
        for wish in wishes:
            mine = entries if all(is_same) else entries[np.searchsorted(keys, wish.keys)]
            wish.manager.cache(wish.blocks, mine)
            if self._announcer is not None:
                self._announcer.announce(wish.manager, wish.blocks, chains)

    def cache_row(self, row: int, num_tokens: int, chains: Sequence[Sequence[bytes]]) -> None:
        """cache_in() for one row that has reached exactly num_tokens, and what hits may find inside its blocks."""
        self.cache_in(np.array([row], np.int32), np.array([num_tokens], np.int32), chains)
        for manager in self._managers:
            wish = manager.wish_tail(row, int(self._limits(manager, np.array([num_tokens], np.int32))[0]))
            if wish is None:
                continue
            number = wish.num_tokens // self._hash_block_size - 1
            if number >= len(chains[row]):
                continue
            entry = int(self._index.obtain([chains[row][number]])[0])
            block_id = int(manager.table.block_ids[row, wish.column])
            if self._index.carries(manager.group, entry, block_id):
                continue
            manager.cache_tail(row, wish, entry)
            if self._announcer is not None:
                self._announcer.announce_tail(manager, row, wish, chains[row])

    def _limits(self, manager: TypeManager, num_tokens: Int32Array) -> Int32Array:
        """Tokens of each row whose blocks can serve a hit: a draft group's hits need one block more."""
        aligned = num_tokens // self._alignment * self._alignment
        if self._alignment == self._hash_block_size:
            aligned = num_tokens
        if not manager.is_draft:
            return aligned
        return np.where(aligned > 0, np.minimum(num_tokens, aligned + manager.tokens_per_block), 0)

    def _obtain(self, keys: Int64Array, chains: Sequence[Sequence[bytes]]) -> Int32Array:
        rows, numbers = (keys >> _ROW_SHIFT).tolist(), (keys & 0xFFFFFFFF).tolist()
        return self._index.obtain([chains[row][number] for row, number in zip(rows, numbers, strict=True)])
