"""The index of the prefix cache: from block hash to the blocks that carry it, of all groups at once.

Owns the map and nothing else; which hash a block carries is the BlockPool's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.request import BoolArray, Int32Array

NO_ENTRY = 0
"""Entry of a hash that no block carries; its blocks are all null."""

NO_PLACE = 0
"""Place of a block that carries no hash."""


class Entries(NamedTuple):
    """Entries of digests, in their order; a NamedTuple as one is made per decode step."""

    ids: Int32Array
    are_fresh: bool  # just made and all different, so that no block is under them yet


class PrefixIndex:
    """Entries: one per hash, with one block per group. Mutated by its BlockPool only.

        digest --dict--> entry --blocks[entry, group]--> block, 0 for none
                                       place = entry * num_groups + group

    Groups that cache the same tokens share the entry, so a sequence is looked up once however many groups there are,
    and everything after that is array operations. Several blocks of one group may carry one hash; none is merged away:
    the first to be added is found, and when it goes, the next in order is.
    """

    def __init__(self, num_groups: int, *, num_expected: int) -> None:
        """num_expected entries fit before the arrays grow; only those in use take memory."""
        self._entry_of: dict[bytes, int] = {}
        self._digests: list[bytes | None] = [None]
        self._unused: list[int] = []
        self._others: dict[int, list[int]] = {}  # place -> further blocks, in order
        self.blocks: NDArray[np.int32] = np.zeros((num_expected + 1, num_groups), np.int32)
        self._flat = self.blocks.reshape(-1)  # one index is cheaper than two
        self.num_groups = num_groups
        self._factor = np.int32(num_groups)
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

    def obtain(self, digests: Sequence[bytes]) -> Entries:
        """The entry of each digest, made where there is none; the caller adds blocks to all of them."""
        num_before = len(self._digests)
        candidates = self._candidates(len(digests))
        ids = [*map(self._entry_of.setdefault, digests, candidates)]
        are_fresh = ids == candidates
        if are_fresh and ids[0] == num_before:
            self._digests += digests
            entries = np.arange(num_before, len(self._digests), dtype=np.int32)
        else:
            entries = np.array(ids, np.int32)
            self._digests += [None] * (candidates[-1] + 1 - num_before)
            for entry, candidate, digest in zip(ids, candidates, digests, strict=True):
                if entry == candidate:
                    self._digests[entry] = digest
                else:
                    self._unused.append(candidate)
        while len(self._digests) > len(self.blocks):
            self._grow()
        return Entries(ids=entries, are_fresh=are_fresh)

    def place(self, group: int, entry: int) -> int:
        """Where a group's block under an entry is found."""
        return entry * self.num_groups + group

    def places(self, groups: Int32Array, entries: Int32Array) -> Int32Array:
        """place() of each entry [N] in groups ([N] or [1])."""
        if self.num_groups == 1:
            return entries
        places: Int32Array = entries * self._factor + groups
        return places

    def group(self, place: int) -> int:
        """The group of a place."""
        return place % self.num_groups

    def digest(self, place: int) -> bytes:
        """The hash of a place in use."""
        digest = self._digests[place // self.num_groups]
        assert digest is not None, place
        return digest

    def add(self, places: Int32Array, block_ids: Int32Array) -> None:
        """Let each block [N] be found at its place [N]; no block twice at one."""
        is_first = self._flat.take(places) == 0
        if not is_first.all():
            self._add_others(places[~is_first], block_ids[~is_first])
            places, block_ids = places[is_first], block_ids[is_first]
        self._flat[places] = block_ids
        self.num_keys += len(places)
        if len(places) > 1 and not (self._flat.take(places) == block_ids).all():  # one hash twice in the batch
            _, first = np.unique(places, return_index=True)
            self._flat[places[first]] = block_ids[first]
            is_later: BoolArray = np.ones(len(places), np.bool_)
            is_later[first] = False
            self.num_keys -= int(np.count_nonzero(is_later))
            self._add_others(places[is_later], block_ids[is_later])

    def add_to_fresh(self, places: Int32Array, block_ids: Int32Array) -> None:
        """add() at places of entries that were just made, none of which comes twice."""
        self._flat[places] = block_ids
        self.num_keys += len(block_ids)

    def remove(self, place: int, block_id: int) -> None:
        """Forget one carrier; others stay findable, and an entry without any goes."""
        self.num_drops += 1
        others = self._others.get(place)
        if others is None:
            assert self._flat[place] == block_id, (place, block_id)
            self._flat[place] = 0
            self.num_keys -= 1
            self._forget_if_empty(place // self.num_groups)
            return
        if self._flat[place] == block_id:
            self._flat[place] = others.pop(0)
        else:
            others.remove(block_id)
        if not others:
            del self._others[place]

    def remove_in(self, places: Int32Array, block_ids: Int32Array) -> None:
        """remove() of each block [N] at its place [N], no place twice."""
        if self._others:
            is_alone = np.array([place not in self._others for place in places.tolist()], np.bool_)
            for place, block_id in zip(places[~is_alone].tolist(), block_ids[~is_alone].tolist(), strict=True):
                self.remove(place, block_id)
            places, block_ids = places[is_alone], block_ids[is_alone]
        assert (self._flat.take(places) == block_ids).all(), (places, block_ids)
        self._flat[places] = 0
        self.num_keys -= len(places)
        self.num_drops += len(places)
        entries = places // self._factor
        if self.num_groups > 1:
            entries = np.unique(entries[~self.blocks[entries].any(axis=1)])
        for entry in entries.tolist():
            self._forget(entry)

    def carries(self, place: int, block_id: int) -> bool:
        """Whether block_id is one of the blocks at a place."""
        return bool(self._flat[place] == block_id) or block_id in self._others.get(place, ())

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
        self._flat = self.blocks.reshape(-1)
        self.num_keys = 0
        self.num_drops += 1

    def _candidates(self, count: int) -> list[int]:
        """Entries that are not in use, ascending from the last reused one on, no longer counted as unused."""
        unused, first = self._unused, len(self._digests)
        if not unused:
            return [*range(first, first + count)]
        num_used = min(count, len(unused))
        candidates = unused[len(unused) - num_used :]
        del unused[len(unused) - num_used :]
        return [*candidates, *range(first, first + count - num_used)]

    def _grow(self) -> None:
        self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
        self._flat = self.blocks.reshape(-1)

    def _forget_if_empty(self, entry: int) -> None:
        if not self.blocks[entry].any():
            self._forget(entry)

    def _forget(self, entry: int) -> None:
        digest = self._digests[entry]
        assert digest is not None, entry
        del self._entry_of[digest]
        self._digests[entry] = None
        self._unused.append(entry)

    def _add_others(self, places: Int32Array, block_ids: Int32Array) -> None:
        for place, block_id in zip(places.tolist(), block_ids.tolist(), strict=True):
            self._others.setdefault(place, []).append(block_id)
