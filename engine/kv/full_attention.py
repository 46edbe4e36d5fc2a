"""Full attention: every token of a sequence is kept as long as the sequence lives.

Owns one group's block table and how much of each row is cached. Blocks themselves are the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.block_table import BlockTable, DeltaLog
from blockferry.engine.kv.events import BlockStored
from blockferry.engine.kv.spec import KVCacheSpec
from blockferry.engine.request import BoolArray, Int32Array
from blockferry.engine.rows import RowTable


class FullAttentionManager:
    """The TypeManager (see coordinator.py) of a full-attention group.

    A chain is the digests of a sequence's hash blocks, as RequestHashes keeps them.

    columns of a row:  | cached ......... | full or partly filled | lookahead |
                       0            num_cached              computed      num_blocks
    """

    def __init__(
        self,
        spec: KVCacheSpec,
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

    def find_hit(self, chain: Sequence[bytes], max_tokens: int) -> Int32Array:
        """Cached blocks from the head of the sequence on, at most max_tokens of it."""
        run = self._pool.prefix_maps[self.group].longest_run(self._of_blocks(chain, 0, max_tokens // self.block_size))
        return np.asarray(run, np.int32)

    def trim_hit(self, block_ids: Int32Array, num_tokens: int) -> Int32Array:
        """Blocks of a hit that other groups shortened to num_tokens."""
        return block_ids[: num_tokens // self.block_size]

    def is_current(self, chain: Sequence[bytes], block_ids: Int32Array) -> bool:
        """Whether a hit's blocks still carry the sequence's hashes."""
        digests = self._of_blocks(chain, 0, len(block_ids))
        carried = self._pool.digests
        return all(carried[block_id] == digest for block_id, digest in zip(block_ids.tolist(), digests, strict=True))

    def num_missing(self, row: int, num_tokens: int, num_hit_blocks: int) -> int:
        """Blocks to take so that the row, after adopting num_hit_blocks, holds num_tokens."""
        held = int(self.table.num_blocks[row]) + num_hit_blocks
        return max(0, self.spec.num_blocks_for(num_tokens) - held)

    def lacks_blocks(self, rows: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Which of rows [R] must take blocks to hold num_tokens [R]; shape [R]."""
        lacks: BoolArray = num_tokens > self.table.num_blocks.take(rows) * self.block_size
        return lacks

    def num_missing_in(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Blocks to take so that each of rows [R] holds num_tokens [R]; shape [R]."""
        missing = (num_tokens + (self.block_size - 1)) // self.block_size - self.table.num_blocks.take(rows)
        np.maximum(missing, 0, out=missing)
        return missing

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
        """Give num_blocks [R], all >= 1, to each of rows [R]; block_ids [sum(num_blocks)] in the rows' order."""
        columns = self.table.num_blocks.take(rows)
        if len(rows) != len(block_ids):
            offsets = np.arange(len(block_ids), dtype=np.int32)
            offsets -= np.repeat(np.cumsum(num_blocks, dtype=np.int32) - num_blocks, num_blocks)
            rows, columns = np.repeat(rows, num_blocks), np.repeat(columns, num_blocks) + offsets
        self._write(rows, columns, block_ids)

    def cache(self, row: int, chain: Sequence[bytes], num_tokens: int) -> None:
        """Let the row's full blocks among its first num_tokens be found."""
        first, stop = int(self.num_cached[row]), num_tokens // self.block_size
        if stop <= first:
            return
        digests = self._of_blocks(chain, first, stop)
        self._pool.cache(self.group, self.table.block_ids[row, first:stop], digests)
        self.num_cached[row] = stop
        if self._pool.events is not None:
            self._pool.events.add(self._stored(row, chain, first, digests))

    def has_uncached(self, rows: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Which of rows [R] have full blocks among their first num_tokens [R] that cannot be found yet."""
        has_uncached: BoolArray = num_tokens >= (self.num_cached.take(rows) + np.int32(1)) * self.block_size
        return has_uncached

    def cache_in(self, rows: Int32Array, chains: Sequence[Sequence[bytes]], num_tokens: Int32Array) -> None:
        """cache() for rows [R] and num_tokens [R]; chains is indexed by row."""
        num_full = num_tokens // self.block_size
        num_cached = self.num_cached.take(rows)
        if self._pool.events is not None or (num_full - num_cached != 1).any():
            for row, stop in zip(rows.tolist(), num_tokens.tolist()):
                self.cache(row, chains[row], stop)
            return
        last = (num_full * self._digests_per_block - 1).tolist()
        digests = [chains[row][index] for row, index in zip(rows.tolist(), last)]
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

    def _of_blocks(self, chain: Sequence[bytes], first: int, stop: int) -> Sequence[bytes]:
        """Digests of blocks [first, stop): a block larger than a hash block uses its last one."""
        step = self._digests_per_block
        return chain[(first + 1) * step - 1 : stop * step : step]

    def _stored(self, row: int, chain: Sequence[bytes], first: int, digests: Sequence[bytes]) -> BlockStored:
        start, stop = first * self.block_size, (first + len(digests)) * self.block_size
        return BlockStored(
            group=self.group,
            kind="full_attention",
            block_size=self.block_size,
            sliding_window=None,
            parent_hash=self._of_blocks(chain, first - 1, first)[0] if first else None,
            block_hashes=tuple(digests),
            token_ids=self._rows.token_ids[row, start:stop].copy(),
        )
