"""Caching: makes the full blocks of rows findable, in all groups at once.

Groups that fill the same tokens share one entry of the index, so that hashes are looked up once however many groups
there are. Owns how far each row was cached; which blocks are worth caching is the type managers' to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blockferry.engine.kv.announcer import Announcer
from blockferry.engine.kv.hit_search import CacheSizes
from blockferry.engine.kv.prefix_index import Entries, PrefixIndex
from blockferry.engine.kv.type_manager import CacheWish, TypeManager
from blockferry.engine.request import Int32Array, Int64Array

_ROW_SHIFT = 32


class _Wish(NamedTuple):
    manager: TypeManager
    blocks: CacheWish
    numbers: Int32Array  # of the hash block that each column ends with


class PrefixCacher:
    """Caches rows of one ledger. chains is indexed by row: the digests of each row's hash blocks."""

    def __init__(
        self,
        managers: Sequence[TypeManager],
        index: PrefixIndex,
        sizes: CacheSizes,
        *,
        max_rows: int,
        announcer: Announcer | None,
    ) -> None:
        self._managers = [manager for manager in managers if any(rule is not None for rule in manager.rules)]
        self._group_numbers = {id(manager): np.array(manager.groups, np.int32) for manager in self._managers}
        self._index = index
        self._sizes = sizes
        self._announcer = announcer
        self._finest = np.int32(min([manager.tokens_per_block for manager in self._managers], default=1))
        self._next_due: Int32Array = np.zeros(max_rows, np.int32)  # tokens from which on a row is worth asking about

    def start_row(self, row: int) -> None:
        """Nothing of the row is cached yet."""
        self._next_due[row] = self._finest

    def is_due(self, rows: Int32Array, num_tokens: Int32Array) -> Int64Array:
        """Indices of those of rows [R] that may have something to cache among their first num_tokens [R]."""
        return (num_tokens >= self._next_due[rows]).nonzero()[0]

    def cache_in(self, rows: Int32Array, num_tokens: Int32Array, chains: Sequence[Sequence[bytes]]) -> None:
        """Cache the full blocks among the first num_tokens [R] of rows [R]; their hashes are known."""
        self._next_due[rows] = (num_tokens // self._finest + np.int32(1)) * self._finest
        wishes: list[_Wish] = []
        for manager in self._managers:
            blocks = manager.wish_in(rows, self._limits(manager, num_tokens))
            if blocks is not None:
                step = manager.tokens_per_block // self._sizes.hash_block_size
                numbers = blocks.columns if step == 1 else (blocks.columns + 1) * step - 1
                wishes.append(_Wish(manager=manager, blocks=blocks, numbers=numbers))
        if not wishes:
            return
        if _are_alike(wishes):
            entries = [self._obtain(wishes[0].blocks.rows, wishes[0].numbers, chains)] * len(wishes)
        else:
            entries = self._obtain_each(wishes, chains)
        for wish, mine in zip(wishes, entries, strict=True):
            self._cache(wish, mine)
            wish.manager.cached(mine.ids)
            if self._announcer is not None:
                self._announcer.announce(wish.manager, wish.blocks, chains)

    def cache_row(self, row: int, num_tokens: int, chains: Sequence[Sequence[bytes]]) -> None:
        """cache_in() for one row that has reached exactly num_tokens, and what hits may find inside its blocks."""
        self.cache_in(np.array([row], np.int32), np.array([num_tokens], np.int32), chains)
        for manager in self._managers:
            wish = manager.wish_tail(row, int(self._limits(manager, np.array([num_tokens], np.int32))[0]))
            if wish is None:
                continue
            number = wish.num_tokens // self._sizes.hash_block_size - 1
            if number >= len(chains[row]):
                continue
            entry = int(self._index.obtain([chains[row][number]]).ids[0])
            layers = [layer for layer in wish.layers if self._cache_tail(manager, layer, row, wish.column, entry)]
            if layers:
                manager.tail_cached(row, wish, entry)
            if self._announcer is not None:
                for layer in layers:
                    self._announcer.announce_tail(manager, layer, row, wish, chains[row])

    def _limits(self, manager: TypeManager, num_tokens: Int32Array) -> Int32Array:
        """Tokens of each row whose blocks can serve a hit: a draft group's hits need one block more."""
        alignment = self._sizes.alignment
        aligned = num_tokens
        if alignment != self._sizes.hash_block_size:
            aligned = num_tokens // alignment * alignment
        if not manager.is_draft:
            return aligned
        return np.where(aligned > 0, np.minimum(num_tokens, aligned + manager.tokens_per_block), 0)

    def _obtain(self, rows: Int32Array, numbers: Int32Array, chains: Sequence[Sequence[bytes]]) -> Entries:
        if rows[0] == rows[-1] and numbers[-1] - numbers[0] == len(numbers) - 1:  # one row, all hash blocks
            return self._index.obtain(chains[rows[0]][numbers[0] : numbers[-1] + 1])
        return self._index.obtain([chains[row][number] for row, number in zip(rows.tolist(), numbers.tolist())])

    def _obtain_each(self, wishes: Sequence[_Wish], chains: Sequence[Sequence[bytes]]) -> list[Entries]:
        """Entries of wishes that differ; those that they share are looked up once."""
        keys = [wish.blocks.rows.astype(np.int64) << _ROW_SHIFT | wish.numbers for wish in wishes]
        distinct = np.unique(np.concatenate(keys))
        entries = self._obtain(
            (distinct >> _ROW_SHIFT).astype(np.int32), (distinct & 0xFFFFFFFF).astype(np.int32), chains
        )
        return [Entries(ids=entries.ids[np.searchsorted(distinct, mine)], are_fresh=entries.are_fresh) for mine in keys]

    def _cache(self, wish: _Wish, entries: Entries) -> None:
        groups, blocks = self._group_numbers[id(wish.manager)], wish.blocks
        if blocks.chosen is None:
            if len(groups) > 1:
                ids = np.broadcast_to(entries.ids, (len(groups), len(entries.ids))).ravel()
                groups = np.repeat(groups, len(entries.ids))
                entries = Entries(ids=ids, are_fresh=entries.are_fresh)
            wish.manager.pool.cache(groups, blocks.block_ids.ravel(), entries)
        else:
            layers, columns = blocks.chosen.nonzero()
            chosen = Entries(ids=entries.ids[columns], are_fresh=entries.are_fresh)
            wish.manager.pool.cache(groups[layers], blocks.block_ids[layers, columns], chosen)

    def _cache_tail(self, manager: TypeManager, layer: int, row: int, column: int, entry: int) -> bool:
        """Let one tail be found; False if it is already."""
        group, block_id = manager.groups[layer], int(manager.stack.tables[layer, row, column])
        if self._index.carries(self._index.place(group, entry), block_id):
            return False
        manager.pool.cache_also(group, block_id, entry)
        return True


def _are_alike(wishes: Sequence[_Wish]) -> bool:
    """Whether all want the same hashes, as types with one block size do."""
    first = wishes[0]
    return all(
        len(wish.numbers) == len(first.numbers)
        and bool((wish.numbers == first.numbers).all() and (wish.blocks.rows == first.blocks.rows).all())
        for wish in wishes[1:]
    )
