"""The ledger of a tier: which blocks' bytes lie in memory or on disk outside of the worker's pool, and where.

Owns what is known of a tier's blocks and units. Moves no bytes: who does, asks first and reports afterwards. A tier is
cut into units of one size; a block of group g takes units_per_block[g] of them, which need not lie together, so that
groups with pages of different sizes share a tier without breaking it into pieces. What is wasted is less than a unit a
block.

                begin_store                end_store
    unknown ----------------> STORING ---------------------> READY --pin--> READY, read by num_readers
       ^                         |                           |   ^             |  |
       |       fail_store        |   evicted, discarded      |   +---unpin-----+  | discarded
       +-------------------------+---------------------------+                    v
       +--------------------------------- unpin, the last one ---------------- LEAVING (found by nobody)
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.tier_policies import EvictionPolicy, TierKey
from blockferry.engine.request import Int32Array

NO_BLOCK = 0
"""In place of a tier block's id: there is none."""


class TierState(enum.IntEnum):
    """See the module's drawing."""

    UNKNOWN = 0
    STORING = 1
    READY = 2
    LEAVING = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counters of a tier, since it was made unless said otherwise."""

    num_units: int
    num_free_units: int  # now
    num_blocks: int  # ready, now
    num_stored_blocks: int
    num_read_blocks: int
    num_evicted_blocks: int
    num_refused_blocks: int  # not stored, as nothing could go for them


class TierLedger:
    """Blocks of one tier of one instance, the same on all of its ranks. Called from the scheduler's one thread."""

    def __init__(self, *, units_per_block: Sequence[int], num_units: int, policy: EvictionPolicy) -> None:
        """units_per_block: per cache group. Raises ValueError for a tier that cannot hold a block of every group."""
        if num_units < max(units_per_block):
            raise ValueError(
                f"a tier of {num_units} units cannot hold a block of {max(units_per_block)}; give it more memory"
            )
        self.units_per_block = tuple(units_per_block)
        self.num_units = num_units
        self._policy = policy
        most_blocks = num_units // min(units_per_block)
        self._index = PrefixIndex(len(units_per_block), num_expected=most_blocks)
        self._state: NDArray[np.int8] = np.zeros(most_blocks + 1, np.int8)
        self._num_readers: Int32Array = np.zeros(most_blocks + 1, np.int32)
        self._place: Int32Array = np.zeros(most_blocks + 1, np.int32)  # in the index
        self._is_spilled: NDArray[np.bool_] = np.zeros(most_blocks + 1, np.bool_)
        self._units: Int32Array = np.zeros((most_blocks + 1, max(units_per_block)), np.int32)
        self._free_blocks = list(range(most_blocks, 0, -1))
        self._free_units = list(range(num_units - 1, -1, -1))
        self._block_of: dict[TierKey, int] = {}  # of blocks in the policy
        self._num_stored = self._num_read = self._num_evicted = self._num_refused = 0

    # finding

    def find(self, digests: Sequence[bytes]) -> Int32Array:
        """The ready block of each digest [N] in each group, NO_BLOCK where there is none; shape [N, groups]."""
        blocks: Int32Array = self._index.blocks[self._index.find(digests)]
        return np.where(self._state[blocks] == TierState.READY, blocks, NO_BLOCK)

    def knows(self, groups: Int32Array, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which of these contents [N] are here or about to be."""
        is_known: NDArray[np.bool_] = self._index.blocks[self._index.find(digests), groups] != NO_BLOCK
        return is_known

    def digests_of(self, blocks: Int32Array) -> list[bytes]:
        """What each block is found under."""
        return [self._index.digest(place) for place in self._place[blocks].tolist()]

    def groups_of(self, blocks: Int32Array) -> Int32Array:
        """The cache group of each block."""
        return self._place[blocks] % np.int32(len(self.units_per_block))

    def are_ready(self, blocks: Int32Array) -> NDArray[np.bool_]:
        """Which of these blocks can be found."""
        are_ready: NDArray[np.bool_] = self._state[blocks] == TierState.READY
        return are_ready

    def units_of(self, blocks: Int32Array, group: int) -> Int32Array:
        """Where blocks [N] of one group lie, in the order of their bytes; shape [N, units_per_block[group]]."""
        units: Int32Array = self._units[blocks, : self.units_per_block[group]]
        return units

    # storing

    def begin_store(self, groups: Int32Array, digests: Sequence[bytes]) -> Int32Array:
        """Give each content [N] a block to be written into; NO_BLOCK for what is known and what finds no room.

        No content may come twice. What is evicted for it is gone at once.
        """
        blocks: Int32Array = np.zeros(len(groups), np.int32)
        fresh = np.flatnonzero(~self.knows(groups, digests)).tolist()
        for number in fresh:
            blocks[number] = self._give(TierKey(int(groups[number]), digests[number]))
        given = np.flatnonzero(blocks)
        self._num_refused += len(fresh) - len(given)
        if len(given):
            entries = self._index.obtain([digests[number] for number in given.tolist()]).ids
            places = self._index.places(groups[given], entries)
            self._place[blocks[given]] = places
            self._index.add(places, blocks[given])
        return blocks

    def end_store(self, blocks: Int32Array) -> None:
        """The bytes of these blocks are there."""
        self._require(blocks, TierState.STORING)
        self._state[blocks] = TierState.READY
        self._num_stored += len(blocks)
        for block in blocks.tolist():
            key = self._key_of(block)
            self._block_of[key] = block
            self._policy.insert(key, self.units_per_block[key.group])

    def fail_store(self, blocks: Int32Array) -> None:
        """The bytes of these blocks will not come; nothing writes there any more."""
        self._require(blocks, TierState.STORING)
        for block in blocks.tolist():
            self._forget(block)
            self._free(block)

    # reading

    def pin(self, blocks: Int32Array) -> None:
        """Keep ready blocks [N], none twice, where they are while somebody reads them."""
        self._require(blocks, TierState.READY)
        self._num_readers[blocks] += 1
        self._num_read += len(blocks)
        for block in blocks.tolist():
            self._policy.used(self._key_of(block))

    def spill(self, blocks: Int32Array) -> None:
        """pin() for a copy to a tier below, which does not count as use and is made once."""
        self._require(blocks, TierState.READY)
        self._num_readers[blocks] += 1
        self._is_spilled[blocks] = True

    def unpin(self, blocks: Int32Array) -> None:
        """End one pin() or spill() of each block."""
        assert (self._num_readers[blocks] > 0).all(), blocks
        self._num_readers[blocks] -= 1
        is_over = (self._state[blocks] == TierState.LEAVING) & (self._num_readers[blocks] == 0)
        for block in blocks[is_over].tolist():
            self._free(block)

    def coldest(self, count: int) -> Int32Array:
        """Those of about the first `count` blocks to go that were not spilled and are not read just now, in order."""
        blocks = np.array([self._block_of[key] for key in self._policy.coldest(count)], np.int32)
        coldest: Int32Array = blocks[(self._num_readers[blocks] == 0) & ~self._is_spilled[blocks]]
        return coldest

    def discard(self, blocks: Int32Array) -> None:
        """Let nobody find these ready blocks any more: their bytes are wrong or out of date."""
        self._require(blocks, TierState.READY)
        for block in blocks.tolist():
            self._leave(block)

    def stats(self) -> TierStats:
        """Counters for metrics and status."""
        return TierStats(
            num_units=self.num_units,
            num_free_units=len(self._free_units),
            num_blocks=len(self._block_of),
            num_stored_blocks=self._num_stored,
            num_read_blocks=self._num_read,
            num_evicted_blocks=self._num_evicted,
            num_refused_blocks=self._num_refused,
        )

    def check(self) -> None:
        """Prove that every unit is free or of one block, and that index, states and policy agree.

        Raises LedgerCorrupted. Cost: O(tier).
        """
        used = np.flatnonzero(self._state != TierState.UNKNOWN)
        groups = self._place[used] % len(self.units_per_block)
        units = [self._units[block, : self.units_per_block[group]] for block, group in zip(used, groups)]
        times = np.bincount(np.concatenate([self._free_units, *units]).astype(np.int64), minlength=self.num_units)
        if len(times) != self.num_units or (times != 1).any():
            raise LedgerCorrupted(f"units of a tier are lost or shared: {np.flatnonzero(times != 1)[:8].tolist()}")
        if sorted([*self._free_blocks, *used.tolist()]) != list(range(1, len(self._state))):
            raise LedgerCorrupted("blocks of a tier are lost, or free and in use")
        is_read = self._num_readers > 0
        if (is_read & (self._state < TierState.READY)).any() or (~is_read & (self._state == TierState.LEAVING)).any():
            raise LedgerCorrupted("blocks of a tier are read before they are ready, or stay when nobody reads them")
        ready = {self._key_of(block): block for block in np.flatnonzero(self._state == TierState.READY).tolist()}
        if ready != self._block_of or set(ready) != self._policy.residents():
            raise LedgerCorrupted("the policy of a tier knows other blocks than those that are ready")
        self._index.check()
        findable = used[self._state[used] != TierState.LEAVING]
        if self._index.num_carriers() != len(findable) or not all(
            self._index.carries(place, block) for place, block in zip(self._place[findable].tolist(), findable.tolist())
        ):
            raise LedgerCorrupted("blocks of a tier are not found under what they hold")

    # steps of the above

    def _give(self, key: TierKey) -> int:
        """A block with units; NO_BLOCK when nothing can go for it."""
        num_needed = self.units_per_block[key.group]
        if len(self._free_units) < num_needed or not self._free_blocks:
            self._policy.missed(key)
        while len(self._free_units) < num_needed or not self._free_blocks:
            victim = self._policy.evict_for(key, self._may_go)
            if victim is None:
                return NO_BLOCK
            self._num_evicted += 1
            block = self._block_of.pop(victim)
            self._forget(block)
            self._free(block)
        block = self._free_blocks.pop()
        self._state[block] = TierState.STORING
        self._is_spilled[block] = False
        self._units[block, :num_needed] = [self._free_units.pop() for _ in range(num_needed)]
        self._place[block] = key.group  # its entry is known at the end of the batch
        return block

    def _may_go(self, key: TierKey) -> bool:
        return not self._num_readers[self._block_of[key]]

    def _leave(self, block: int) -> None:
        key = self._key_of(block)
        del self._block_of[key]
        self._policy.remove(key)
        self._forget(block)
        if self._num_readers[block]:
            self._state[block] = TierState.LEAVING
        else:
            self._free(block)

    def _forget(self, block: int) -> None:
        self._index.remove(int(self._place[block]), block)

    def _free(self, block: int) -> None:
        num_units = self.units_per_block[int(self._place[block]) % len(self.units_per_block)]
        self._free_units += self._units[block, :num_units].tolist()
        self._state[block] = TierState.UNKNOWN
        self._free_blocks.append(block)

    def _key_of(self, block: int) -> TierKey:
        place = int(self._place[block])
        return TierKey(self._index.group(place), self._index.digest(place))

    def _require(self, blocks: Int32Array, state: TierState) -> None:
        assert (self._state[blocks] == state).all(), (blocks, self._state[blocks], state)
