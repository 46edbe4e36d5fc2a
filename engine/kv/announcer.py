"""Tells observers what became findable: one event per run of consecutive blocks of a sequence.

Owns nothing; the EventLog keeps what it adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.events import BlockStored, EventLog
from blockferry.engine.kv.type_manager import CacheWish, TailWish, TypeManager
from blockferry.engine.rows import RowTable


class Announcer:
    """Makes BlockStored events, with what a group's blocks are. A chain is the digests of a sequence's hash blocks."""

    def __init__(
        self, events: EventLog, rows: RowTable, *, windows: Sequence[int | None], hash_block_size: int
    ) -> None:
        """Windows: tokens of each group's sliding window, where it has one."""
        self._events = events
        self._rows = rows
        self._windows = windows
        self._hash_block_size = hash_block_size

    def announce(self, manager: TypeManager, blocks: CacheWish, chains: Sequence[Sequence[bytes]]) -> None:
        """Whole blocks of a group; chains is indexed by row."""
        size, step = manager.tokens_per_block, manager.tokens_per_block // self._hash_block_size
        breaks = (np.diff(blocks.rows) != 0) | (np.diff(blocks.columns) != 1)
        for run in np.split(np.arange(len(blocks.rows)), breaks.nonzero()[0] + 1):
            row, first, stop = int(blocks.rows[run[0]]), int(blocks.columns[run[0]]), int(blocks.columns[run[-1]]) + 1
            hashes = tuple(chains[row][(first + 1) * step - 1 : stop * step : step])
            self._add(manager, row, chains[row], start=first * size, hashes=hashes, stop=stop * size)

    def announce_tail(self, manager: TypeManager, row: int, wish: TailWish, chain: Sequence[bytes]) -> None:
        """The head of a block that is not full."""
        last = chain[wish.num_tokens // self._hash_block_size - 1]
        start = wish.column * manager.tokens_per_block
        self._add(manager, row, chain, start=start, hashes=(last,), stop=wish.num_tokens)

    def _add(
        self,
        manager: TypeManager,
        row: int,
        chain: Sequence[bytes],
        *,
        start: int,
        stop: int,
        hashes: tuple[bytes, ...],
    ) -> None:
        parent = start // self._hash_block_size - 1
        self._events.add(
            BlockStored(
                group=manager.group,
                kind=manager.kind.value,
                block_size=manager.tokens_per_block,
                sliding_window=self._windows[manager.group],
                parent_hash=chain[parent] if parent >= 0 else None,
                block_hashes=hashes,
                token_ids=self._rows.token_ids[row, start:stop].copy(),
            )
        )
