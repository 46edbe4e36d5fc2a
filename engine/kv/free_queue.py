"""The order in which free blocks are reused: a doubly-ended LRU queue as a stamped ring.

Owns the ring and the stamps. Knows nothing of hashes or reference counts.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from blockferry.engine.request import BoolArray, Int32Array

_NOT_FREE = -1  # stamp of a block that is not in the queue
_SLACK = 32  # extra entries read per scan, so that a few dead ones cost no second scan


class FreeBlocks(Protocol):
    """What a BlockPool asks of the order of its free blocks. See FreeQueue for what each call does."""

    @property
    def num_free(self) -> int:
        """Free blocks."""

    @property
    def in_use(self) -> BoolArray:
        """Which block ids are part of the pool now; shape [num_blocks]."""

    def take(self, num_blocks: int) -> Int32Array:
        """Remove and return the first num_blocks free blocks, in order."""

    def remove(self, block_ids: Int32Array) -> None:
        """Take these free blocks out, wherever they are."""

    def push_back(self, block_ids: Int32Array) -> None:
        """Free these blocks: they are reused last."""

    def push_front(self, block_ids: Int32Array) -> None:
        """Free these blocks: they are reused first."""

    def is_free(self, block_ids: Int32Array) -> BoolArray:
        """Which of these blocks are free."""

    def order(self) -> Int32Array:
        """Every free block; a copy."""


class FreeQueue:
    """Free block ids, first to be reused first. Mutated by its BlockPool only.

        ring:    ... | 7 | 3 | 9 | 3 | 5 | ...        cell = position & (capacity - 1)
                       head    ^dead       tail
        stamps:  stamps[3] = cell of its second entry, so the first one is dead

    An entry is live iff its block's stamp names the entry's cell: removing a block from the middle only
    clears its stamp (lazy deletion), and every operation is a few vector operations over the blocks moved.
    The order is exactly that of a linked list. Dead entries are dropped when passed or when the ring is full.
    """

    def __init__(self, num_blocks: int, *, first_free: int = 1) -> None:
        """Blocks from first_free on are free, in ascending order; block 0, the null block, never is."""
        self._capacity = 1 << (2 * num_blocks - 1).bit_length()
        self._mask = self._capacity - 1
        # np.empty maps pages lazily: an untouched half of the ring costs nothing
        self._ring: Int32Array = np.empty(self._capacity, np.int32)
        self._stamps: Int32Array = np.arange(-first_free, num_blocks - first_free, dtype=np.int32)
        self._stamps[:first_free] = _NOT_FREE
        self.num_free = num_blocks - first_free
        self._ring[: self.num_free] = np.arange(first_free, num_blocks, dtype=np.int32)
        self._head = 0
        self._tail = self.num_free

    @property
    def in_use(self) -> BoolArray:
        """All block ids."""
        return np.ones(len(self._stamps), np.bool_)

    def take(self, num_blocks: int) -> Int32Array:
        """Remove and return the first num_blocks free blocks, in order. Cost: O(num_blocks) amortised."""
        assert num_blocks <= self.num_free, (num_blocks, self.num_free)
        taken, self._head = self._leading(num_blocks) or self._scan(num_blocks)
        self._forget(taken)
        return taken

    def peek(self, num_blocks: int) -> Int32Array:
        """The first num_blocks free blocks, or all if there are fewer, in order; they stay.

        Cost: O(num_blocks) amortised: dead entries between them are dropped.
        """
        first, end = self._scan(min(num_blocks, self.num_free))
        if end - self._head > len(first):
            self._head = end - len(first)
            self._write(self._head, first)
            self.num_free -= len(first)
        return first

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

    def is_free(self, block_ids: Int32Array) -> BoolArray:
        """Which of these blocks are in the queue."""
        is_free: BoolArray = self._stamps[block_ids] != _NOT_FREE
        return is_free

    def order(self) -> Int32Array:
        """Every free block in the order of reuse; a copy, costs O(capacity)."""
        cells = (np.arange(self._head, self._tail) & self._mask).astype(np.int32)
        ids = self._ring[cells]
        order: Int32Array = ids[self._stamps[ids] == cells]
        return order

    def _leading(self, num_blocks: int) -> tuple[Int32Array, int] | None:
        """_scan() where no entry is dead and the ring does not end, the usual case; None elsewhere."""
        cell = self._head & self._mask
        stop = cell + num_blocks
        if stop > self._capacity or self._head + num_blocks > self._tail:
            return None
        ids = self._ring[cell:stop]
        if np.count_nonzero(self._stamps.take(ids) == np.arange(cell, stop, dtype=np.int32)) < num_blocks:
            return None
        return ids.copy(), self._head + num_blocks

    def _scan(self, num_blocks: int) -> tuple[Int32Array, int]:
        """The first num_blocks free blocks, and the position after the last of them."""
        found: list[Int32Array] = []
        missing, head = num_blocks, self._head
        while missing:
            cell = head & self._mask
            stop = min(cell + missing + _SLACK, cell + self._tail - head, self._capacity)
            ids = self._ring[cell:stop]
            live = (self._stamps[ids] == np.arange(cell, stop, dtype=np.int32)).nonzero()[0]
            if len(live) >= missing:
                ids = ids[live[:missing]]
                head += int(live[missing - 1]) + 1
            else:
                ids = ids[live]
                head += stop - cell
            found.append(ids)
            missing -= len(ids)
        first: Int32Array = found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int32), *found])
        return first, head

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
