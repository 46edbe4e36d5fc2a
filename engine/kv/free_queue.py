"""The order in which free blocks are reused: a doubly-ended LRU queue as a stamped ring.

Owns the ring and the stamps. Knows nothing of hashes or reference counts.
"""

from __future__ import annotations

import numpy as np

from blockferry.engine.request import Int32Array

_NOT_FREE = -1  # stamp of a block that is not in the queue
_SLACK = 32  # extra entries read per scan, so that a few dead ones cost no second scan


class FreeQueue:
    """Free block ids, first to be reused first. Mutated by its BlockPool only.

        ring:    ... | 7 | 3 | 9 | 3 | 5 | ...        cell = position & (capacity - 1)
                       head    ^dead       tail
        stamps:  stamps[3] = cell of its second entry, so the first one is dead

    An entry is live iff its block's stamp names the entry's cell: removing a block from the middle only
    clears its stamp (lazy deletion), and every operation is a few vector operations over the blocks moved.
    The order is exactly that of a linked list. Dead entries are dropped when passed or when the ring is full.
    """

    def __init__(self, num_blocks: int) -> None:
        """All blocks but block 0, the null block, are free, in ascending order."""
        self._capacity = 1 << (2 * num_blocks - 1).bit_length()
        self._mask = self._capacity - 1
        # np.empty maps pages lazily: an untouched half of the ring costs nothing
        self._ring: Int32Array = np.empty(self._capacity, np.int32)
        self._stamps: Int32Array = np.arange(-1, num_blocks - 1, dtype=np.int32)
        self._ring[: num_blocks - 1] = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self._tail = num_blocks - 1
        self.num_free = num_blocks - 1

    def take(self, num_blocks: int) -> Int32Array:
        """Remove and return the first num_blocks free blocks, in order. Cost: O(num_blocks) amortised."""
        assert num_blocks <= self.num_free, (num_blocks, self.num_free)
        found: list[Int32Array] = []
        missing = num_blocks
        while missing:
            cell = self._head & self._mask
            stop = min(cell + missing + _SLACK, cell + self._tail - self._head, self._capacity)
            ids = self._ring[cell:stop]
            live = (self._stamps[ids] == np.arange(cell, stop, dtype=np.int32)).nonzero()[0]
            if len(live) >= missing:
                ids = ids[live[:missing]]
                self._head += int(live[missing - 1]) + 1
            else:
                ids = ids[live]
                self._head += stop - cell
            found.append(ids)
            missing -= len(ids)
        taken: Int32Array = found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int32), *found])
        self._forget(taken)
        return taken

    def remove(self, block_ids: Int32Array) -> None:
        """Take these free blocks out, wherever they are."""
        self._forget(block_ids)

    def push_back(self, block_ids: Int32Array) -> None:
        """Append blocks: the first of them is reused before the second."""
        self._make_room(len(block_ids))
        self._write(self._tail, block_ids)
        self._tail += len(block_ids)

    def push_front(self, block_ids: Int32Array) -> None:
        """Prepend blocks: the first of them becomes the very next to be reused."""
        self._make_room(len(block_ids))
        self._head -= len(block_ids)
        self._write(self._head, block_ids)

    def is_free(self, block_ids: Int32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Which of these blocks are in the queue."""
        is_free: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = self._stamps[block_ids] != _NOT_FREE
        return is_free

    def order(self) -> Int32Array:
        """Every free block in the order of reuse; a copy, costs O(capacity)."""
        cells = (np.arange(self._head, self._tail) & self._mask).astype(np.int32)
        ids = self._ring[cells]
        order: Int32Array = ids[self._stamps[ids] == cells]
        return order

    def _write(self, position: int, block_ids: Int32Array) -> None:
        cells = np.arange(position, position + len(block_ids)) & self._mask
        self._ring[cells] = block_ids
        self._stamps[block_ids] = cells
        self.num_free += len(block_ids)

    def _forget(self, block_ids: Int32Array) -> None:
        self._stamps[block_ids] = _NOT_FREE
        self.num_free -= len(block_ids)
        if not self.num_free:
            self._tail = self._head

    def _make_room(self, num_blocks: int) -> None:
        """Compact when full: live entries fill at most half the ring, so this is rare."""
        if self._tail - self._head + num_blocks <= self._capacity:
            return
        live = self.order()
        self._head, self._tail, self.num_free = 0, len(live), 0
        self._write(0, live)
