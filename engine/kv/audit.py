"""The audit: proves from the data alone that the ledger's books agree with each other, and says who holds what.

Owns nothing, changes nothing. Runs in tests after every step, on idle in production and on demand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.coordinator import Coordinator
from blockferry.engine.kv.ledger_log import LedgerLog
from blockferry.engine.kv.prefix_index import NO_PLACE, PrefixIndex
from blockferry.engine.kv.type_manager import TypeManager
from blockferry.engine.request import BoolArray, Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockOwner:
    """One table entry that holds a block."""

    group: int
    row: int
    column: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """Who holds a block and why."""

    block_id: int
    is_free: bool
    ref_cnt: int
    owners: tuple[BlockOwner, ...]
    num_popped: int  # owners whose row has ended and whose blocks are still to be released
    num_copies: int  # copies that are to be made from or to it
    hashes: tuple[bytes, ...]  # that it can be found under
    hash_group: int | None
    is_in_use: bool = True  # False: its memory belongs to another group of a slab ledger, or to none

    def __str__(self) -> str:
        """One line for a person."""
        if self.block_id == NULL_BLOCK_ID:
            return "block 0 is the null block"
        if not self.is_in_use:
            return f"block {self.block_id} is not in use; its slab belongs to another group or to none"
        why = [f"row {owner.row} (group {owner.group}, column {owner.column})" for owner in self.owners]
        why += [f"{self.num_popped} ended rows to be released"] if self.num_popped else []
        why += [f"{self.num_copies} copies to be made"] if self.num_copies else []
        held = "free" if self.is_free else "held by " + (", ".join(why) or "nobody (lost)")
        found = f", found under {len(self.hashes)} hashes of group {self.hash_group}" if self.hashes else ""
        return f"block {self.block_id} is {held}{found}"


def report_block(
    block_id: int, group: int, coordinator: Coordinator, popped: Sequence[Int32Array], log: LedgerLog
) -> BlockReport:
    """What the books say of a block of a group's pool. Raises ValueError for a block that there is not. O(tables)."""
    number = coordinator.pools.pool_of(group)
    pool = coordinator.pools.pools[number]
    if not 0 <= block_id < pool.num_blocks:
        raise ValueError(f"block {block_id} is not in the pool; its blocks are 0 to {pool.num_blocks - 1}")
    owners = []
    for manager in _managers_of(coordinator, number):
        layers, rows, columns = (_entries(manager) == block_id).nonzero()
        owners += [
            BlockOwner(group=manager.groups[layer], row=row, column=column)
            for layer, row, column in zip(layers.tolist(), rows.tolist(), columns.tolist(), strict=True)
            if block_id != NULL_BLOCK_ID
        ]
    places = pool.places_of(block_id)
    copies = [copy for copy in log.copies if coordinator.pools.pool_of(copy.group) == number]
    return BlockReport(
        block_id=block_id,
        is_free=bool(pool.queue.is_free(np.array([block_id], np.int32))[0]),
        ref_cnt=int(pool.ref_cnt[block_id]),
        owners=tuple(owners),
        num_popped=int(popped[number][block_id]),
        num_copies=sum((copy.source == block_id) + (copy.target == block_id) for copy in copies),
        hashes=tuple(pool.index.digest(place) for place in places),
        hash_group=pool.index.group(places[0]) if places else None,
        is_in_use=bool(pool.in_use[block_id]),
    )


def check_ledger(coordinator: Coordinator, index: PrefixIndex, popped: Sequence[Int32Array], log: LedgerLog) -> None:
    """Check blocks, owners, free queues and prefix cache against each other.

    popped[p] counts owners of pool p's blocks that are no longer rows. Raises LedgerCorrupted. Cost: O(pool + tables).
    """
    num_hashes = 0
    for number, pool in enumerate(coordinator.pools.pools):
        owners = popped[number].astype(np.int64)
        for manager in _managers_of(coordinator, number):
            owners += np.bincount(_entries(manager).ravel(), minlength=pool.num_blocks)
            ahead = manager.stack.num_cached > manager.stack.num_blocks
            _require_none(ahead, f"rows of groups {manager.groups} count more cached blocks than they hold")
        for copy in log.copies:
            if coordinator.pools.pool_of(copy.group) == number:
                owners[[copy.source, copy.target]] += 1
        owners[NULL_BLOCK_ID] = 0
        _check_owners(pool, owners)
        num_hashes += _check_hashes(pool, index)
    if index.num_carriers() != num_hashes:
        raise LedgerCorrupted(f"{index.num_carriers()} blocks can be found, but blocks carry {num_hashes} hashes")
    if index.num_keys != np.count_nonzero(index.blocks):
        raise LedgerCorrupted(f"the index counts {index.num_keys} keys but holds {np.count_nonzero(index.blocks)}")
    index.check()
    coordinator.pools.check()


def _entries(manager: TypeManager) -> Int32Array:
    """The groups' tables with undefined entries null, shape [groups, rows, columns]."""
    stack = manager.stack
    columns = np.arange(stack.tables.shape[2])
    entries: Int32Array = np.where(columns < stack.num_blocks[:, None], stack.tables, NULL_BLOCK_ID)
    return entries


def _managers_of(coordinator: Coordinator, number: int) -> list[TypeManager]:
    return [manager for manager in coordinator.managers if coordinator.pools.pool_of(manager.groups[0]) == number]


def _check_owners(pool: BlockPool, owners: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    free = pool.queue.order()
    times_free = np.bincount(free, minlength=pool.num_blocks)
    _require_none(times_free > 1, "blocks are in the free queue more than once")
    if len(free) != pool.num_free:
        raise LedgerCorrupted(f"the free queue holds {len(free)} blocks but counts {pool.num_free}")
    if times_free[NULL_BLOCK_ID]:
        raise LedgerCorrupted("the null block is free; nobody may ever get it")
    _require_none(pool.ref_cnt != owners, "ref_cnt differs from the number of owners of blocks")
    held = owners > 0
    is_free = times_free > 0
    _require_none(held & is_free, "blocks are both free and held")
    lost = ~(held | is_free) & pool.in_use
    lost[NULL_BLOCK_ID] = False
    _require_none(lost, "blocks are neither free nor held")


def _check_hashes(pool: BlockPool, index: PrefixIndex) -> int:
    """Number of hashes that blocks carry, each found in the index."""
    hashed = np.flatnonzero(pool.place != NO_PLACE)
    found = index.blocks.reshape(-1)[pool.place[hashed]] == hashed
    for block_id in hashed[~found].tolist():
        if not index.carries(int(pool.place[block_id]), block_id):
            raise LedgerCorrupted(f"block {block_id} is marked as hashed but cannot be found")
    for block_id, places in pool.further.items():
        if pool.place[block_id] == NO_PLACE or not all(index.carries(place, block_id) for place in places):
            raise LedgerCorrupted(f"block {block_id} has further hashes that do not find it")
    if pool.place[NULL_BLOCK_ID] != NO_PLACE:
        raise LedgerCorrupted("the null block carries a hash")
    return len(hashed) + sum(len(places) for places in pool.further.values())


def _require_none(bad: BoolArray, what: str) -> None:
    if bad.any():
        raise LedgerCorrupted(f"{what}: {np.flatnonzero(bad)[:8].tolist()} ({int(np.count_nonzero(bad))} in all)")
