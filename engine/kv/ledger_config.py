"""From a plan to what the ledger is built from.

Owns nothing; what a plan is, planners decide.
"""

from __future__ import annotations

from blockferry.engine.kv.plan import KVCachePlan
from blockferry.engine.kv.spec import KVCacheConfig


def ledger_config(plan: KVCachePlan) -> KVCacheConfig:
    """The ledger's view of a plan. Raises ValueError for one without a usable block.

    A group that has the pool for itself has pages of one size, whatever slabs they lie in: it needs no slab books.
    """
    return KVCacheConfig(
        num_blocks=plan.num_blocks,
        groups=plan.groups,
        hash_block_size=plan.hash_block_size,
        slab=plan.slab if len(plan.groups) > 1 else None,
    )
