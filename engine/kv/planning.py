"""Plans of the KV cache with one block size in bytes for all groups: how many blocks, and what they are good for.

plan_groups.py forms the groups, plan_layout.py places their pages; here a pool's memory becomes blocks, and a plan that
could not serve one sequence of max_model_len is refused. Owns no memory and touches no model.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import sys
from collections.abc import Sequence

from blockferry.engine.errors import PoolTooSmall
from blockferry.engine.kv.plan import KVCachePlan, Planner, PlanRequest
from blockferry.engine.kv.plan_groups import project_group, unified_groups, uniform_groups
from blockferry.engine.kv.plan_layout import bytes_per_block, check_layout, lay_out_pages, useful_fraction
from blockferry.engine.kv.reach import SequenceLimits
from blockferry.engine.kv.spec import KVCacheGroup

GIB = 1 << 30
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank of an instance holds: its pipeline stage's layers, and memory for its pool."""

    layer_ids: frozenset[int]
    memory_bytes: int


def plan_uniform(request: PlanRequest) -> KVCachePlan:
    """Plan whose groups all take blocks of equal bytes, and free those that local layers no longer reach.

    Raises UnplannableLayers where pages cannot be made alike, PoolTooSmall where max_model_len does not fit,
    ConfigError for an unknown layout.
    """
    return plan_groups(Planner.UNIFORM, uniform_groups(request), request)


def plan_unified(request: PlanRequest) -> KVCachePlan:
    """Plan of one group, local layers kept whole. Raises as plan_uniform."""
    return plan_groups(Planner.UNIFIED, unified_groups(request), request)


def plan_groups(planner: Planner, groups: tuple[KVCacheGroup, ...], request: PlanRequest) -> KVCachePlan:
    """Plan of one rank that holds all layers of these groups. Raises PoolTooSmall, UnplannableLayers, ConfigError."""
    check_layout(request.layout, groups)
    num_blocks = _count_blocks(groups, request.limits, request.memory_bytes, path="")
    return _size_plan(planner, groups, request, num_blocks)


def plan_ranks(
    request: PlanRequest, ranks: Sequence[RankShare], *, planner: Planner = Planner.UNIFORM
) -> tuple[KVCachePlan, ...]:
    """Plans of the ranks of one instance: the same groups on all, the same num_blocks, each with its own layers.

    request.memory_bytes is not used; each rank brings its own. A group has no layers on a rank whose stage has none of
    its: it still takes blocks there, as block ids are the instance's. Raises as plan_uniform, and ValueError for ranks
    that leave a layer out or a planner of another module.
    """
    form_groups = {Planner.UNIFORM: uniform_groups, Planner.UNIFIED: unified_groups}.get(planner)
    if form_groups is None:
        raise ValueError(f"planner={planner} does not form uniform blocks; use uniform or unified, or its own module")
    groups = form_groups(request)
    check_layout(request.layout, groups)
    missing = {i for group in groups for i in group.layer_ids}.difference(*(rank.layer_ids for rank in ranks))
    if missing:
        raise ValueError(f"layers {sorted(missing)} are on none of the {len(ranks)} ranks; give each layer to a rank")
    shares = [tuple(project_group(group, rank.layer_ids) for group in groups) for rank in ranks]
    num_blocks = min(
        (
            _count_blocks(share, request.limits, rank.memory_bytes, path=f"ranks[{index}]")
            for index, (share, rank) in enumerate(zip(shares, ranks, strict=True))
            if bytes_per_block(share)
        ),
        default=1,
    )
    return tuple(_size_plan(planner, share, request, num_blocks) for share in shares)


def blocks_per_sequence(groups: Sequence[KVCacheGroup], limits: SequenceLimits) -> int:
    """Most blocks that one sequence of max_model_len ever holds at once, in all groups."""
    return sum(group.spec.max_admission_blocks_per_request(limits) for group in groups)


def longest_sequence(groups: Sequence[KVCacheGroup], limits: SequenceLimits, num_usable_blocks: int) -> int:
    """Greatest max_model_len, up to that of limits, of which one sequence fits; 0 where not even one token does."""
    lengths = range(1, min(limits.max_model_len, sys.maxsize - 1) + 1)
    return bisect.bisect_right(
        lengths,
        num_usable_blocks,
        key=lambda length: blocks_per_sequence(groups, dataclasses.replace(limits, max_model_len=length)),
    )


def pool_words(num_bytes: int) -> str:
    """Size of a pool as messages give it: MiB below 1 GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"


def pool_words_up(num_bytes: int) -> str:
    """The same, rounded up: a pool of that size is no smaller."""
    unit = GIB if num_bytes >= GIB else MIB
    return f"{math.ceil(num_bytes / unit * 100) / 100:.2f} {'GiB' if unit == GIB else 'MiB'}"


def _count_blocks(groups: Sequence[KVCacheGroup], limits: SequenceLimits, memory_bytes: int, *, path: str) -> int:
    """Blocks of the pool, the null block included. Raises PoolTooSmall."""
    block_bytes = bytes_per_block(groups)
    if not block_bytes:
        return 1
    num_blocks = max(memory_bytes, 0) // block_bytes
    needed = blocks_per_sequence(groups, limits) + 1
    if num_blocks >= needed:
        return num_blocks
    length = longest_sequence(groups, limits, num_blocks - 1)
    remedy = f", or set max_model_len to {length} or less" if length else ""
    raise PoolTooSmall(
        path,
        f"a pool of {pool_words(memory_bytes)} has {num_blocks} blocks of {block_bytes} bytes, but one sequence of"
        f" max_model_len={limits.max_model_len} tokens takes {needed}, the null block included; give the pool"
        f" {pool_words_up(needed * block_bytes)} or more{remedy}",
        needed_bytes=needed * block_bytes,
    )


def _size_plan(
    planner: Planner, groups: tuple[KVCacheGroup, ...], request: PlanRequest, num_blocks: int
) -> KVCachePlan:
    needed = blocks_per_sequence(groups, request.limits)
    # hits never end in blocks that are not shared, so those need no alignment, unless there are no others
    cached = [group for group in groups if group.spec.prefix_cacheable] or groups
    tokens_per_block = [group.spec.tokens_per_block for group in cached]
    return KVCachePlan(
        planner=planner,
        groups=groups,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block(groups),
        regions=lay_out_pages(groups, request.layout, num_blocks),
        hash_block_size=math.gcd(*tokens_per_block) or 1,
        scheduler_block_size=math.lcm(*tokens_per_block),
        useful_fraction=useful_fraction(groups),
        capacity_tokens=num_blocks * request.limits.max_model_len // needed if needed else 0,
        max_concurrency=num_blocks / needed if needed else 0.0,
        num_whole_sequences=(num_blocks - 1) // needed if needed else 0,
        pool_bytes=num_blocks * bytes_per_block(groups),
    )
