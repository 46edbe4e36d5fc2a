"""Tells observers what became findable: one event per run of consecutive blocks of a sequence.

Owns nothing; the EventLog keeps what it adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.events import BlockStored, EventLog
from blockferry.engine.kv.spec import KVCacheGroup, window_of
from blockferry.engine.kv.type_manager import CacheWish, TailWish, TypeManager
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable


class Announcer:
    """Makes BlockStored events, with what a group's blocks are. A chain is the digests of a sequence's hash blocks."""

    def __init__(
        self, events: EventLog, rows: RowTable, *, groups: Sequence[KVCacheGroup], hash_block_size: int
    ) -> None:
        self._events = events
        self._rows = rows
        self._kinds = [group.spec.kind for group in groups]
        self._windows = [window_of(group.spec) for group in groups]
        self._hash_block_size = hash_block_size

    def announce(self, manager: TypeManager, wish: CacheWish, chains: Sequence[Sequence[bytes]]) -> None:
        """Whole blocks of a manager's groups; chains is indexed by row."""
        size, step = manager.tokens_per_block, manager.tokens_per_block // self._hash_block_size
        for layer in range(len(manager.groups)):
            rows, columns = wish.rows, wish.columns
            if wish.chosen is not None:
                rows, columns = rows[wish.chosen[layer]], columns[wish.chosen[layer]]
            breaks = (np.diff(rows) != 0) | (np.diff(columns) != 1)
            for run in np.split(np.arange(len(rows)), breaks.nonzero()[0] + 1):
                if len(run):
                    row, first, stop = int(rows[run[0]]), int(columns[run[0]]), int(columns[run[-1]]) + 1
                    hashes = tuple(chains[row][(first + 1) * step - 1 : stop * step : step])
                    parent = self._parent(chains[row], first * size)
                    tokens = self._rows.token_ids[row, first * size : stop * size].copy()
                    self._add(manager, layer, parent, hashes, tokens)

    def announce_tail(self, manager: TypeManager, layer: int, row: int, wish: TailWish, chain: Sequence[bytes]) -> None:
        """The head of a block that is not full."""
        start = wish.column * manager.tokens_per_block
        last = chain[wish.num_tokens // self._hash_block_size - 1]
        tokens = self._rows.token_ids[row, start : wish.num_tokens].copy()
        self._add(manager, layer, self._parent(chain, start), (last,), tokens)

    def _parent(self, chain: Sequence[bytes], start: int) -> bytes | None:
        return chain[start // self._hash_block_size - 1] if start else None

    def _add(
        self, manager: TypeManager, layer: int, parent: bytes | None, hashes: tuple[bytes, ...], tokens: Int32Array
    ) -> None:
        group = manager.groups[layer]
        self._events.add(
            BlockStored(
                group=group,
                kind=self._kinds[group].value,
                block_size=manager.tokens_per_block,
                sliding_window=self._windows[group],
                parent_hash=parent,
                block_hashes=hashes,
                token_ids=tokens,
            )
        )
