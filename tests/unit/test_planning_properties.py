"""What must be true of every plan of any mix of layers, whatever the rules of grouping."""

import dataclasses
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blockferry.engine.errors import PoolTooSmall, UnplannableLayers
from blockferry.engine.kv.plan import KVCachePlan, PageRegion, PlanRequest
from blockferry.engine.kv.plan_groups import split_by_pattern
from blockferry.engine.kv.plan_layout import LAYOUTS
from blockferry.engine.kv.planning import RankShare, plan_ranks, plan_unified, plan_uniform
from blockferry.engine.kv.reach import (
    ChunkReach,
    FullReach,
    KVContent,
    LatentContent,
    NoReach,
    Reach,
    SequenceLimits,
    WindowReach,
)
from blockferry.engine.kv.spec import AttentionSpec, LayerSpec, MambaSpec

CHECKED = settings(max_examples=150, deadline=None, derandomize=True)
REACHES: tuple[Reach, ...] = (
    FullReach(),
    WindowReach(window=16),
    WindowReach(window=40),
    ChunkReach(chunk=32),
    NoReach(),
)
ATTENTION = st.builds(
    AttentionSpec,
    block_size=st.sampled_from([4, 8]),
    content=st.builds(
        KVContent, num_kv_heads=st.integers(1, 4), head_dim=st.sampled_from([4, 6]), dtype_bytes=st.just(2)
    ),
    reach=st.sampled_from(REACHES),
)
LATENT = st.builds(
    AttentionSpec,
    block_size=st.just(8),
    content=st.builds(LatentContent, latent_dim=st.sampled_from([8, 9]), dtype_bytes=st.just(2)),
)
STATE = st.builds(
    MambaSpec,
    block_size=st.sampled_from([4, 8]),
    shapes=st.integers(1, 300).map(lambda size: ((size,),)),
    dtype_bytes=st.just((2,)),
    num_speculative_blocks=st.integers(0, 1),
)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """Some specs repeated in any order, with just the memory for one sequence and a few blocks."""
    specs = draw(st.lists(st.one_of(ATTENTION, ATTENTION, LATENT, STATE), min_size=1, max_size=4))
    layers = draw(st.lists(st.sampled_from(specs), min_size=1, max_size=16))
    return PlanRequest(
        layers=tuple(layers),
        limits=SequenceLimits(max_model_len=draw(st.integers(1, 48)), max_in_flight_tokens=8),
        memory_bytes=1 << 22,
        layout=draw(st.sampled_from(LAYOUTS)),
    )


def plan_or_reject(request: PlanRequest) -> KVCachePlan:
    """A uniform plan with few blocks; cases that cannot be planned are no cases."""
    try:
        plan_uniform(dataclasses.replace(request, memory_bytes=0))
    except PoolTooSmall as error:
        return plan_uniform(dataclasses.replace(request, memory_bytes=error.needed_bytes * 5 // 4))
    except UnplannableLayers:
        assume(False)
    return plan_uniform(request)


def runs_of(region: PageRegion, layout: str, num_blocks: int) -> list[range]:
    """Every run of bytes of every page of a region."""
    slice_bytes = region.spec.head_slice_bytes
    page = region.spec.page_size_bytes
    num_heads, run = (page // slice_bytes, slice_bytes) if layout == "BHLNC" else (1, page)
    starts = (
        region.offset + i * region.layer_stride + block * region.block_stride + head * len(region.layer_ids) * run
        for i in range(len(region.layer_ids))
        for block in range(num_blocks)
        for head in range(num_heads)
    )
    return [range(start, start + run) for start in starts]


@CHECKED
@given(requests())
def test_every_cached_layer_is_in_exactly_one_group_and_one_region(request: PlanRequest) -> None:
    plan = plan_or_reject(request)
    cached = [
        i
        for i, spec in enumerate(request.layers)
        if not (isinstance(spec, AttentionSpec) and isinstance(spec.reach, NoReach))
    ]
    assert sorted(i for group in plan.groups for i in group.layer_ids) == cached
    assert sorted(i for region in plan.regions for i in region.layer_ids) == cached


@CHECKED
@given(requests())
def test_pages_of_one_group_neither_overlap_nor_leave_the_pool(request: PlanRequest) -> None:
    plan = plan_or_reject(request)
    for group in range(len(plan.groups)):
        regions = [region for region in plan.regions if region.group == group]
        runs = [run for region in regions for run in runs_of(region, request.layout, plan.num_blocks)]
        runs.sort(key=lambda run: run.start)
        assert all(left.stop <= right.start for left, right in itertools.pairwise(runs))
        assert runs[0].start >= 0
        assert runs[-1].stop <= plan.pool_bytes <= plan.num_blocks * plan.bytes_per_block


@CHECKED
@given(requests())
def test_useful_fraction_is_that_of_the_regions_content(request: PlanRequest) -> None:
    plan = plan_or_reject(request)
    content = sum(len(region.layer_ids) * region.spec.unpadded_page_size_bytes for region in plan.regions)
    assert plan.useful_fraction * len(plan.groups) * plan.bytes_per_block == pytest.approx(content)
    assert 0 < plan.useful_fraction <= 1


@CHECKED
@given(requests())
def test_all_layers_of_a_group_need_the_same_blocks(request: PlanRequest) -> None:
    for group in plan_or_reject(request).groups:
        assert len({spec.table_key for spec in group.layer_specs}) == 1
        needs = {spec.max_admission_blocks_per_request(request.limits) for spec in group.layer_specs}
        assert needs == {group.spec.max_admission_blocks_per_request(request.limits)}


@CHECKED
@given(requests())
def test_hash_blocks_divide_blocks_and_blocks_divide_scheduler_blocks(request: PlanRequest) -> None:
    plan = plan_or_reject(request)
    for group in plan.groups:
        assert group.spec.tokens_per_block % plan.hash_block_size == 0
        assert plan.scheduler_block_size % group.spec.tokens_per_block == 0


@CHECKED
@given(requests())
def test_a_unified_plan_has_one_group_and_wastes_nothing(request: PlanRequest) -> None:
    try:
        plan = plan_unified(request)
    except UnplannableLayers:
        assume(False)
    assert len(plan.groups) <= 1
    assert plan.useful_fraction == 1.0


@CHECKED
@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 40), st.integers(0, 40))
def test_every_stage_has_a_layer_of_each_group_where_it_has_enough(
    num_full: int, num_sliding: int, start: int, length: int
) -> None:
    content = KVContent(num_kv_heads=1, head_dim=4, dtype_bytes=2)
    full = AttentionSpec(block_size=4, content=content)
    sliding = dataclasses.replace(full, reach=WindowReach(window=16))
    order = sorted(
        [(i / num_full, full) for i in range(num_full)] + [(i / num_sliding, sliding) for i in range(num_sliding)],
        key=lambda pair: pair[0],
    )
    layers: dict[int, LayerSpec] = {i: spec for i, (_, spec) in enumerate(order)}
    stage = set(range(start, start + length))
    groups = split_by_pattern(layers)
    for spec in (full, sliding):
        groups_of_spec = [group for group in groups if layers[group[0]] == spec]
        held = [i for i in stage if layers.get(i) == spec]
        has_some = [not stage.isdisjoint(group) for group in groups_of_spec]
        assert all(has_some) if len(held) >= len(groups_of_spec) else sum(has_some) == len(held)


@CHECKED
@given(requests(), st.integers(0, 16), st.integers(1, 4))
def test_ranks_agree_on_groups_and_blocks_and_fit_their_memory(
    request: PlanRequest, cut: int, memory_ratio: int
) -> None:
    num_layers = len(request.layers)
    memory_bytes = (request.memory_bytes, request.memory_bytes * memory_ratio)
    stages = (frozenset(range(min(cut, num_layers))), frozenset(range(min(cut, num_layers), num_layers)))
    whole = plan_or_reject(request)
    plans = plan_ranks(
        request, [RankShare(layer_ids=ids, memory_bytes=size) for ids, size in zip(stages, memory_bytes, strict=True)]
    )
    assert len({plan.num_blocks for plan in plans}) == 1
    assert len({plan.max_concurrency for plan in plans}) == 1
    for plan, size in zip(plans, memory_bytes, strict=True):
        assert plan.pool_bytes <= size
    for group, parts in zip(whole.groups, zip(*(plan.groups for plan in plans), strict=True), strict=True):
        assert sorted(group.layer_ids) == sorted(i for part in parts for i in part.layer_ids)
