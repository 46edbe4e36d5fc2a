"""The audit: proves from the data alone that the ledger's books agree with each other.

Owns nothing, changes nothing. Runs in tests after every step, on idle in production and on demand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.coordinator import TypeManager
from blockferry.engine.request import BoolArray, Int32Array


def check_ledger(pool: BlockPool, managers: Sequence[TypeManager], popped: Int32Array) -> None:
    """Check blocks, owners, free queue and prefix cache against each other.

    popped [num_blocks] counts owners that are no longer rows. Raises LedgerCorrupted. Cost: O(pool + tables).
    """
    owners = popped.astype(np.int64)
    for manager in managers:
        columns = np.arange(manager.table.block_ids.shape[1])
        entries = manager.table.block_ids[columns < manager.table.num_blocks[:, None]]
        owners += np.bincount(entries, minlength=pool.num_blocks)
        ahead = manager.num_cached > manager.table.num_blocks
        _require_none(ahead, f"rows of group {manager.group} count more cached blocks than they hold")
    owners[NULL_BLOCK_ID] = 0
    _check_owners(pool, owners)
    _check_prefix_cache(pool)


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
    lost = ~(held | is_free)
    lost[NULL_BLOCK_ID] = False
    _require_none(lost, "blocks are neither free nor held")


def _check_prefix_cache(pool: BlockPool) -> None:
    hashed = np.flatnonzero(pool.hash_group >= 0)
    for block_id, group in zip(hashed.tolist(), pool.hash_group[hashed].tolist()):
        digest = pool.digests[block_id]
        if digest is None or not pool.prefix_maps[group].carries(digest, block_id):
            raise LedgerCorrupted(f"block {block_id} is marked as hashed in group {group} but cannot be found there")
    num_carriers = sum(prefix_map.num_carriers() for prefix_map in pool.prefix_maps)
    num_digests = sum(digest is not None for digest in pool.digests)
    if not num_carriers == num_digests == len(hashed):
        raise LedgerCorrupted(
            f"{num_carriers} blocks can be found, {num_digests} carry a hash, {len(hashed)} are marked as hashed"
        )
    if pool.hash_group[NULL_BLOCK_ID] >= 0:
        raise LedgerCorrupted("the null block carries a hash")


def _require_none(bad: BoolArray, what: str) -> None:
    if bad.any():
        raise LedgerCorrupted(f"{what}: {np.flatnonzero(bad)[:8].tolist()} ({int(np.count_nonzero(bad))} in all)")
