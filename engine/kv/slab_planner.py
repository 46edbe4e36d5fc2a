"""Plans with pages of each group's own size: one group per kind of cache, no padding layers.

Forms the groups and places their pages; slab_geometry.py says how the pool is cut. After Jenga (Zhang et al., "Jenga:
Effective Memory Management for Serving LLM with Heterogeneity", SOSP 2025): one pool of large pages, each given to one
cache type at a time and carved into small pages of that type's size. Owns no memory, and refuses no pool for being too
small for a sequence: planners.py does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence

from blockferry.engine.errors import PoolTooSmall, UnplannableLayers
from blockferry.engine.kv.plan import KVCachePlan, PageRegion, Planner, PlanRequest
from blockferry.engine.kv.plan_groups import cached_layers, group_spec
from blockferry.engine.kv.plan_layout import is_block_outermost, lay_out_pages
from blockferry.engine.kv.planning import plan_unified, plan_uniform
from blockferry.engine.kv.reach import NEVER_DROPPING, SequenceLimits
from blockferry.engine.kv.slab_geometry import (
    MAX_PADDING,
    PageDemand,
    choose_geometry,
    sequences_that_fit,
    whole_sequences_that_fit,
)
from blockferry.engine.kv.spec import KVCacheGroup, SlabGeometry


def plan_slab(request: PlanRequest) -> KVCachePlan:
    """Plan of one group per kind of cache, however many layers each has.

    Layers share a group when they need the same blocks of any sequence and all or none of them are of a draft model;
    where that makes one group, the plan is the uniform one. A pool too small for max_model_len is planned all the
    same. Raises UnplannableLayers for a layout with layers outermost, PoolTooSmall for a pool that cannot give every
    group a slab.
    """
    if not is_block_outermost(request.layout):
        raise UnplannableLayers(
            0,
            f"layout {request.layout} has layers outermost, where pages of several sizes cannot share a slab; use "
            "layout BLHNC, or the uniform planner",
        )
    plan = plan_slab_groups(group_by_table(request), request)
    for other in _uniform_plans(request):
        if other.capacity_tokens > plan.capacity_tokens:
            # smaller pages leave less over at the pool's end, which tells where uniform ones need no padding either
            regrouped = plan_slab_groups(other.groups, request)
            plan = max(
                plan, regrouped, key=lambda one: (one.useful_fraction > 1 - 2 * MAX_PADDING, one.capacity_tokens)
            )
    return plan


def group_by_table(request: PlanRequest) -> tuple[KVCacheGroup, ...]:
    """One group for all layers that need the same blocks; layers of a draft model apart."""
    layers = cached_layers(request)
    groups: dict[Hashable, list[int]] = {}
    for layer_id, spec in layers.items():
        groups.setdefault((spec.table_key, layer_id in request.draft_layer_ids), []).append(layer_id)
    return tuple(
        KVCacheGroup(
            layer_ids=tuple(layer_ids),
            spec=group_spec([layers[layer_id] for layer_id in layer_ids]),
            is_draft=layer_ids[0] in request.draft_layer_ids,
        )
        for layer_ids in groups.values()
    )


def plan_slab_groups(groups: Sequence[KVCacheGroup], request: PlanRequest) -> KVCachePlan:
    """Plan of these groups, with pages of each one's own size. Raises PoolTooSmall."""
    if not groups:
        return dataclasses.replace(plan_uniform(request), planner=Planner.SLAB)
    demands = [page_demand(group, request.limits) for group in groups]
    try:
        slab = choose_geometry(demands, request.memory_bytes)
    except ValueError as error:
        raise PoolTooSmall("", str(error), needed_bytes=sum(2 * one.page_bytes for one in demands)) from None
    cached = [group.spec.tokens_per_block for group in groups if group.spec.prefix_cacheable]
    tokens_per_block = cached or [group.spec.tokens_per_block for group in groups]
    max_concurrency = sequences_that_fit(slab, demands)
    return KVCachePlan(
        planner=Planner.SLAB,
        groups=tuple(groups),
        num_blocks=1 + max(slab.num_pages(index) for index in range(len(groups))),
        bytes_per_block=slab.slab_bytes,
        regions=tuple(_lay_out(groups, slab, request.layout)),
        hash_block_size=math.gcd(*tokens_per_block),
        scheduler_block_size=math.lcm(*tokens_per_block),
        useful_fraction=min(
            sum(spec.unpadded_page_size_bytes for spec in group.layer_specs) / stride
            for group, stride in zip(groups, slab.page_stride_bytes, strict=True)
        ),
        capacity_tokens=int(max_concurrency * request.limits.max_model_len),
        max_concurrency=max_concurrency,
        num_whole_sequences=whole_sequences_that_fit(slab, demands),
        pool_bytes=slab.pool_bytes,
        slab=slab,
    )


def blocks_per_sequence(group: KVCacheGroup, limits: SequenceLimits) -> int:
    """Most blocks that one sequence of max_model_len ever holds of a group: never more than its table has columns."""
    spec = group.spec
    return min(spec.max_admission_blocks_per_request(limits), spec.max_num_blocks_per_req(limits))


def page_demand(group: KVCacheGroup, limits: SequenceLimits) -> PageDemand:
    """What a group asks of a pool."""
    return PageDemand(
        page_bytes=sum(spec.page_size_bytes for spec in group.layer_specs),
        blocks_per_sequence=blocks_per_sequence(group, limits),
        is_dropping=group.spec.kind not in NEVER_DROPPING,
    )


def _lay_out(groups: Sequence[KVCacheGroup], slab: SlabGeometry, layout: str) -> Iterator[PageRegion]:
    """Regions of all groups: a page as a uniform plan lays it out, page 1 of every group at the start of slab 0."""
    for index, (group, stride) in enumerate(zip(groups, slab.page_stride_bytes, strict=True)):
        for region in lay_out_pages([group], layout, 1):
            offset = slab.null_bytes - stride + region.offset
            yield dataclasses.replace(region, group=index, offset=offset, block_stride=stride)


def _uniform_plans(request: PlanRequest) -> Iterator[KVCachePlan]:
    """Plans of the other planners, of those that are possible here."""
    for plan in (plan_uniform, plan_unified):
        for layout in ("BLHNC", "LBHNC"):
            try:
                yield plan(dataclasses.replace(request, layout=layout))
            except (UnplannableLayers, PoolTooSmall):
                continue
