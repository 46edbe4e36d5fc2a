"""Full attention: every token of a sequence is kept as long as the sequence lives.

Owns one group's block table and how much of each row is cached. Blocks themselves are the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.block_table import BlockTable, DeltaLog
from blockferry.engine.kv.events import BlockStored
from blockferry.engine.kv.spec import FullAttentionSpec
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable


class FullAttentionManager:
    """The TypeManager (see coordinator.py) of a full-attention group.

    columns of a row:  | cached ......... | full or partly filled | lookahead |
                       0            num_cached              computed      num_blocks
    """

    def __init__(
        self,
        spec: FullAttentionSpec,
        *,
        group: int,
        hash_block_size: int,
        pool: BlockPool,
        rows: RowTable,
        deltas: DeltaLog,
    ) -> None:
        self.spec = spec
        self.group = group
        self.block_size = spec.block_size
        self.table = BlockTable(max_rows=rows.max_rows, max_blocks=spec.num_blocks_for(rows.max_model_len))
        self.num_cached: Int32Array = np.zeros(rows.max_rows, np.int32)  # leading blocks hashed, per row
        self._digests_per_block = spec.block_size // hash_block_size
        self._pool = pool
        self._rows = rows
        self._deltas = deltas

    def find_hit(self, hashes: RequestHashes, max_tokens: int) -> Int32Array:
        """Cached blocks from the head of the sequence on, at most max_tokens of it."""
        run = self._pool.prefix_maps[self.group].longest_run(self._digests(hashes, 0, max_tokens // self.block_size))
        return np.asarray(run, np.int32)

    def trim_hit(self, block_ids: Int32Array, num_tokens: int) -> Int32Array:
        """Blocks of a hit that other groups shortened to num_tokens."""
        return block_ids[: num_tokens // self.block_size]

    def is_current(self, hashes: RequestHashes, block_ids: Int32Array) -> bool:
        """Whether a hit's blocks still carry the sequence's hashes."""
        digests = self._digests(hashes, 0, len(block_ids))
        carried = self._pool.digests
        return all(carried[block_id] == digest for block_id, digest in zip(block_ids.tolist(), digests, strict=True))

    def num_missing(self, row: int, num_tokens: int, num_hit_blocks: int) -> int:
        """Blocks to take so that the row, after adopting num_hit_blocks, holds num_tokens."""
        held = int(self.table.num_blocks[row]) + num_hit_blocks
        return max(0, self.spec.num_blocks_for(num_tokens) - held)

    def num_missing_in(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Blocks to take so that each of rows [R] holds num_tokens [R]; shape [R]."""
        missing: Int32Array = (num_tokens + (self.block_size - 1)) // self.block_size - self.table.num_blocks[rows]
        return np.maximum(missing, 0, out=missing)

    def num_blocks_at_most(self, num_tokens: int) -> int:
        """Most blocks that a sequence of num_tokens ever holds at once."""
        return self.spec.num_blocks_for(num_tokens)

    def adopt(self, row: int, block_ids: Int32Array) -> None:
        """Start a row with the blocks of a hit, already touched."""
        self.append(row, block_ids)
        self.num_cached[row] = len(block_ids)

    def append(self, row: int, block_ids: Int32Array) -> None:
        """Give a row further blocks."""
        first = int(self.table.num_blocks[row])
        columns = np.arange(first, first + len(block_ids), dtype=np.int32)
        self._write(np.full(len(block_ids), row, np.int32), columns, block_ids)

    def append_to(self, rows: Int32Array, num_blocks: Int32Array, block_ids: Int32Array) -> None:
        """Give num_blocks [R] blocks to each of rows [R]; block_ids [sum(num_blocks)] in the rows' order."""
        due = num_blocks.nonzero()[0]
        rows, num_blocks = rows[due], num_blocks[due]
        columns = self.table.num_blocks[rows]
        if len(due) != len(block_ids):
            offsets = np.arange(len(block_ids), dtype=np.int32)
            offsets -= np.repeat(np.cumsum(num_blocks, dtype=np.int32) - num_blocks, num_blocks)
            rows, columns = np.repeat(rows, num_blocks), np.repeat(columns, num_blocks) + offsets
        self._write(rows, columns, block_ids)

    def cache(self, row: int, hashes: RequestHashes, num_tokens: int) -> None:
        """Let the row's full blocks among its first num_tokens be found."""
        first, stop = int(self.num_cached[row]), num_tokens // self.block_size
        if stop <= first:
            return
        digests = self._digests(hashes, first, stop)
        self._pool.cache(self.group, self.table.block_ids[row, first:stop], digests)
        self.num_cached[row] = stop
        if self._pool.events is not None:
            self._pool.events.add(self._stored(row, hashes, first, digests))

    def cache_in(self, rows: Int32Array, hashes: Sequence[RequestHashes | None], num_tokens: Int32Array) -> None:
        """cache() for rows [R] and num_tokens [R]; hashes is indexed by row."""
        num_full = num_tokens // self.block_size
        num_cached = self.num_cached[rows]
        due = (num_full > num_cached).nonzero()[0]
        if not len(due):
            return
        rows, num_full, num_cached = rows[due], num_full[due], num_cached[due]
        if self._pool.events is not None or (num_full - num_cached != 1).any():
            for row, stop in zip(rows.tolist(), num_full.tolist()):
                row_hashes = hashes[row]
                assert row_hashes is not None, row
                self.cache(row, row_hashes, stop * self.block_size)
            return
        last = (num_full * self._digests_per_block - 1).tolist()
        digests = [hashes[row].digests[index] for row, index in zip(rows.tolist(), last)]
        self._pool.cache(self.group, self.table.block_ids[rows, num_cached], digests)
        self.num_cached[rows] = num_full

    def drop(self, row: int) -> Int32Array:
        """Forget a row and return its blocks in table order; their owner count is untouched."""
        block_ids = self.table.row(row).copy()
        self.table.clear(row)
        self.num_cached[row] = 0
        return block_ids

    def _write(self, rows: Int32Array, columns: Int32Array, block_ids: Int32Array) -> None:
        self.table.set(rows, columns, block_ids)
        self._deltas.add(self.group, rows, columns, block_ids)

    def _digests(self, hashes: RequestHashes, first: int, stop: int) -> list[bytes]:
        """Digests of blocks [first, stop): a block larger than a hash block uses its last one."""
        step = self._digests_per_block
        return hashes.digests[(first + 1) * step - 1 : stop * step : step]

    def _stored(self, row: int, hashes: RequestHashes, first: int, digests: list[bytes]) -> BlockStored:
        start, stop = first * self.block_size, (first + len(digests)) * self.block_size
        return BlockStored(
            group=self.group,
            kind="full_attention",
            block_size=self.block_size,
            sliding_window=None,
            parent_hash=self._digests(hashes, first - 1, first)[0] if first else None,
            block_hashes=tuple(digests),
            token_ids=self._rows.token_ids[row, start:stop].copy(),
        )
