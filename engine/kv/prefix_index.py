"""The index of the prefix cache: from block hash to the blocks that carry it, of all groups at once.

Owns the map and nothing else; which hash a block carries is the BlockPool's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.request import BoolArray, Int32Array

NO_ENTRY = 0
"""Entry of a hash that no block carries; its blocks are all null."""


_GROUP_SHIFT = 16


class PrefixIndex:
    """Entries: one per hash, with one block per group. Mutated by its BlockPool only.

        digest --dict--> entry --blocks[entry, group]--> block, 0 for none

    Groups that cache the same tokens share the entry, so a sequence is looked up once however many groups there are,
    and everything after that is array operations. Several blocks of one group may carry one hash; none is merged away:
    the first to be added is found, and when it goes, the next in order is.
    """

    def __init__(self, num_groups: int, *, num_expected: int) -> None:
        """num_expected entries fit before the arrays grow; only those in use take memory."""
        self._entry_of: dict[bytes, int] = {}
        self._digests: list[bytes | None] = [None]
        self._unused: list[int] = []
        self._others: dict[tuple[int, int], list[int]] = {}  # (entry, group) -> further blocks, in order
        self.blocks: NDArray[np.int32] = np.zeros((num_expected + 1, num_groups), np.int32)
        self.num_keys = 0  # (hash, group) pairs that a block can be found under
        self.num_drops = 0  # carriers removed, ever: while it stands, what was found is still there

    @property
    def num_entries(self) -> int:
        """Distinct hashes."""
        return len(self._entry_of)

    def find(self, digests: Iterable[bytes]) -> Int32Array:
        """The entry of each digest, NO_ENTRY where there is none."""
        find = self._entry_of.get
        return np.array([find(digest, NO_ENTRY) for digest in digests], np.int32)

    def find_run(self, digests: Iterable[bytes]) -> Int32Array:
        """The entries of the leading digests that have one."""
        find = self._entry_of.get
        entries: list[int] = []
        for digest in digests:
            entry = find(digest)
            if entry is None:
                break
            entries.append(entry)
        return np.array(entries, np.int32)

    def obtain(self, digests: Sequence[bytes]) -> Int32Array:
        """The entry of each digest, made where there is none. Whoever adds no block to a new one discards it."""
        find = self._entry_of.get
        entries = [find(digest) or self._make(digest) for digest in digests]
        return np.array(entries, np.int32)

    def discard_empty(self, entries: Int32Array) -> None:
        """Forget those of entries that no block carries."""
        empty = ~self.blocks[entries].any(axis=1)
        for entry in entries[empty].tolist():
            self._forget(entry)

    def digest(self, entry: int) -> bytes:
        """The hash of an entry in use."""
        digest = self._digests[entry]
        assert digest is not None, entry
        return digest

    def add(self, groups: Int32Array, entries: Int32Array, block_ids: Int32Array) -> None:
        """Let each block [N] of a group [N] be found under its entry [N]; no block twice under one."""
        is_first = self.blocks[entries, groups] == 0
        if not is_first.all():
            later = ~is_first
            self._add_others(groups[later], entries[later], block_ids[later])
            groups, entries, block_ids = groups[is_first], entries[is_first], block_ids[is_first]
        self.blocks[entries, groups] = block_ids
        self.num_keys += len(entries)
        if len(entries) > 1 and not (self.blocks[entries, groups] == block_ids).all():  # one hash twice in the batch
            self._add_again(groups, entries, block_ids)

    def remove(self, group: int, entry: int, block_id: int) -> None:
        """Forget one carrier of an entry; others stay findable, and an entry without any goes."""
        self.num_drops += 1
        others = self._others.get((entry, group))
        if others is None:
            assert self.blocks[entry, group] == block_id, (entry, group, block_id)
            self.blocks[entry, group] = 0
            self.num_keys -= 1
            if not self.blocks[entry].any():
                self._forget(entry)
            return
        if self.blocks[entry, group] == block_id:
            self.blocks[entry, group] = others.pop(0)
        else:
            others.remove(block_id)
        if not others:
            del self._others[entry, group]

    def carries(self, group: int, entry: int, block_id: int) -> bool:
        """Whether block_id is one of the group's blocks under entry."""
        return bool(self.blocks[entry, group] == block_id) or block_id in self._others.get((entry, group), ())

    def num_carriers(self) -> int:
        """(Hash, block) pairs, duplicates counted each. Cost: O(entries)."""
        return int(np.count_nonzero(self.blocks)) + sum(len(others) for others in self._others.values())

    def check(self) -> None:
        """Prove that digests and entries name each other and that no entry is empty. Raises LedgerCorrupted."""
        for digest, entry in self._entry_of.items():
            if self._digests[entry] != digest:
                raise LedgerCorrupted(f"entry {entry} is found under a hash that it does not carry")
        in_use = np.fromiter(self._entry_of.values(), np.int64, len(self._entry_of))
        if len(np.unique(in_use)) != len(in_use) or not self.blocks[in_use].any(axis=1).all():
            raise LedgerCorrupted("an entry of the prefix index is empty or has two hashes")

    def clear(self) -> None:
        """Forget everything."""
        self._entry_of.clear()
        self._digests = [None]
        self._unused.clear()
        self._others.clear()
        self.blocks = np.zeros_like(self.blocks)
        self.num_keys = 0
        self.num_drops += 1

    def _make(self, digest: bytes) -> int:
        if self._unused:
            entry = self._unused.pop()
            self._digests[entry] = digest
        else:
            entry = len(self._digests)
            self._digests.append(digest)
            if entry >= len(self.blocks):
                self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
        self._entry_of[digest] = entry
        return entry

    def _forget(self, entry: int) -> None:
        digest = self._digests[entry]
        if digest is not None:
            del self._entry_of[digest]
            self._digests[entry] = None
            self._unused.append(entry)

    def _add_again(self, groups: Int32Array, entries: Int32Array, block_ids: Int32Array) -> None:
        """Undo what add() wrote over itself: the first block of each hash is found, further ones follow in order."""
        _, first = np.unique(entries.astype(np.int64) << _GROUP_SHIFT | groups, return_index=True)
        self.blocks[entries[first], groups[first]] = block_ids[first]
        is_later: BoolArray = np.ones(len(entries), np.bool_)
        is_later[first] = False
        self.num_keys -= int(np.count_nonzero(is_later))
        self._add_others(groups[is_later], entries[is_later], block_ids[is_later])

    def _add_others(self, groups: Int32Array, entries: Int32Array, block_ids: Int32Array) -> None:
        for group, entry, block_id in zip(groups.tolist(), entries.tolist(), block_ids.tolist(), strict=True):
            self._others.setdefault((entry, group), []).append(block_id)
