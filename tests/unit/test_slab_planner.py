"""Slab plans: groups by block table, pages of their own sizes, geometry that loses next to nothing."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.engine.errors import PoolTooSmall, UnplannableLayers
from blockferry.engine.kv.plan import KVCachePlan, Planner, PlanRequest
from blockferry.engine.kv.planners import attempt, best_plan, plan_all, plan_with
from blockferry.engine.kv.planning import plan_uniform
from blockferry.engine.kv.reach import FullReach, KVContent, LatentContent, Reach, SequenceLimits, SpecKind, WindowReach
from blockferry.engine.kv.slab_geometry import (
    MAX_PADDING,
    STRIDE_ALIGNMENT,
    PageDemand,
    choose_geometry,
    sequences_that_fit,
    slabs_taken,
    whole_sequences_that_fit,
)
from blockferry.engine.kv.slab_planner import plan_slab
from blockferry.engine.kv.spec import AttentionSpec, LayerSpec, MambaSpec, SlabGeometry

MIB = 1 << 20
LIMITS = SequenceLimits(max_model_len=8192, max_in_flight_tokens=2048)


def attention(reach: Reach | None = None, *, heads: int = 2, dim: int = 64) -> AttentionSpec:
    content = KVContent(num_kv_heads=heads, head_dim=dim, dtype_bytes=2)
    return AttentionSpec(block_size=16, content=content, reach=reach or FullReach())


FULL = attention()
WINDOW = attention(WindowReach(window=512))
MAMBA = MambaSpec(block_size=16, shapes=((3, 16), (64, 64)), dtype_bytes=(2, 4))
LATENT = AttentionSpec(block_size=16, content=LatentContent(latent_dim=576, dtype_bytes=2))


def request(*layers: LayerSpec, memory_bytes: int = 1024 * MIB) -> PlanRequest:
    return PlanRequest(layers=layers, limits=LIMITS, memory_bytes=memory_bytes)


def spans(plan: KVCachePlan, group: int, block_id: int) -> list[range]:
    """Byte ranges of one block of a group, one per layer."""
    return [
        range(start, start + region.spec.page_size_bytes)
        for region in plan.regions
        if region.group == group
        for i in range(len(region.layer_ids))
        for start in [region.offset + i * region.layer_stride + block_id * region.block_stride]
    ]


def test_layers_of_one_spec_form_one_group_however_many_they_are() -> None:
    plan = plan_slab(request(*[FULL] + [WINDOW] * 23))
    assert [len(group.layer_ids) for group in plan.groups] == [1, 23]


def test_uneven_layer_counts_waste_nothing() -> None:
    layers = [FULL if i % 6 == 5 else WINDOW for i in range(62)]
    assert plan_uniform(request(*layers)).useful_fraction < 0.9
    assert plan_slab(request(*layers)).useful_fraction == 1.0


def test_pages_that_no_uniform_plan_can_make_alike_are_carved_side_by_side() -> None:
    plan = plan_slab(request(LATENT, LATENT, LATENT, WINDOW, MAMBA, MAMBA))
    assert {group.spec.kind for group in plan.groups} == {SpecKind.MLA, SpecKind.SLIDING_WINDOW, SpecKind.MAMBA}
    assert plan.useful_fraction >= 0.99


def test_full_layers_of_other_head_counts_share_a_group() -> None:
    wide = attention(heads=8)
    plan = plan_slab(request(FULL, wide, FULL, wide))
    assert [group.layer_ids for group in plan.groups] == [(0, 1, 2, 3)]
    assert plan.bytes_per_block == 2 * FULL.page_size_bytes + 2 * wide.page_size_bytes


def test_draft_layers_are_a_group_of_their_own() -> None:
    plan = plan_slab(dataclasses.replace(request(FULL, FULL, FULL), draft_layer_ids=frozenset({2})))
    assert [(group.layer_ids, group.is_draft) for group in plan.groups] == [((0, 1), False), ((2,), True)]


def test_one_spec_gives_the_uniform_plan() -> None:
    layers = request(*[FULL] * 7)
    slab, uniform = plan_slab(layers), plan_uniform(layers)
    assert slab.slab is not None
    assert slab.slab.pages_per_slab == (1,)
    assert dataclasses.replace(slab, planner=Planner.UNIFORM, slab=None) == uniform


def test_an_encoder_has_nothing_to_plan() -> None:
    assert plan_slab(request()).groups == ()


def test_blocks_of_a_group_do_not_overlap() -> None:
    plan = plan_slab(request(FULL, FULL, WINDOW, MAMBA, MAMBA, MAMBA))
    for group in range(len(plan.groups)):
        taken = [span for block_id in range(1, 40) for span in spans(plan, group, block_id)]
        ordered = sorted(taken, key=lambda span: span.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(ordered))


def test_every_block_of_a_slab_lies_in_it() -> None:
    plan = plan_slab(request(FULL, FULL, WINDOW, MAMBA, MAMBA, MAMBA))
    slab = plan.slab
    assert slab is not None
    for group, pages in enumerate(slab.pages_per_slab):
        for block_id in (1, pages, pages + 1, slab.num_slabs * pages):
            number = (block_id - 1) // pages
            start = slab.null_bytes + number * slab.slab_bytes
            for span in spans(plan, group, block_id):
                assert start <= span.start
                assert span.stop <= start + slab.slab_bytes


def test_null_pages_lie_before_the_first_slab_and_tail_pages_within_the_pool() -> None:
    plan = plan_slab(request(FULL, FULL, WINDOW, WINDOW, WINDOW, memory_bytes=100 * MIB + 12345))
    slab = plan.slab
    assert slab is not None
    for group in range(len(plan.groups)):
        assert all(span.start >= 0 and span.stop <= slab.null_bytes for span in spans(plan, group, 0))
        last = spans(plan, group, slab.num_pages(group))
        assert all(span.stop <= plan.pool_bytes <= 100 * MIB + 12345 for span in last)
    assert plan.num_blocks == 1 + max(slab.num_pages(0), slab.num_pages(1))


def test_layout_with_layers_outermost_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnplannableLayers, match=r"LBHNC.*use layout BLHNC"):
        plan_slab(dataclasses.replace(request(FULL, WINDOW), layout="LBHNC"))


def test_pool_without_a_slab_for_each_group_is_refused() -> None:
    with pytest.raises(PoolTooSmall, match="give more memory"):
        plan_slab(request(FULL, WINDOW, memory_bytes=3 * FULL.page_size_bytes - 1))


def test_capacity_is_of_sequences_of_maximal_length() -> None:
    plan = plan_slab(request(FULL, WINDOW))
    blocks = 512 + (512 - 1 + 2048 + 15) // 16 + 1
    num_pages = 1024 * MIB // FULL.page_size_bytes
    assert plan.max_concurrency == pytest.approx(num_pages / blocks)
    assert plan.capacity_tokens == int(num_pages / blocks * 8192)


def test_window_that_never_closes_needs_no_more_blocks_than_full_attention() -> None:
    open_window = attention(WindowReach(window=8000))
    plan = plan_slab(request(FULL, open_window))
    assert plan.capacity_tokens == plan_with(Planner.UNIFIED, request(FULL, open_window)).capacity_tokens


def test_best_plan_is_the_one_that_holds_most() -> None:
    assert best_plan(request(*[FULL] * 10 + [WINDOW] * 52)).planner is Planner.SLAB


def test_best_plan_of_equal_ones_has_fewest_groups() -> None:
    assert best_plan(request(*[FULL] * 4)).planner is Planner.UNIFORM
    few = best_plan(request(*[FULL] + [WINDOW] * 23))
    assert (few.planner, len(few.groups)) == (Planner.SLAB, 2)


def test_best_plan_refuses_what_holds_no_sequence() -> None:
    with pytest.raises(PoolTooSmall, match="max_model_len"):
        best_plan(request(FULL, WINDOW, memory_bytes=4 * MIB))


def test_slab_plan_that_holds_no_sequence_names_one_that_it_holds() -> None:
    with pytest.raises(PoolTooSmall, match="set max_model_len to") as raised:
        plan_with(Planner.SLAB, request(FULL, WINDOW, memory_bytes=4 * MIB))
    assert plan_with(Planner.SLAB, request(FULL, WINDOW, memory_bytes=raised.value.needed_bytes)).max_concurrency >= 1
    length = int(str(raised.value).split("max_model_len to ")[1].split()[0])
    shorter = dataclasses.replace(LIMITS, max_model_len=length)
    assert plan_with(Planner.SLAB, PlanRequest(layers=(FULL, WINDOW), limits=shorter, memory_bytes=4 * MIB)).groups


def test_every_planner_answers_or_says_why_not() -> None:
    attempts = plan_all(request(FULL, MAMBA))
    assert [one.planner for one in attempts] == list(Planner)
    assert [one.plan is not None for one in attempts] == [True, True, False]
    assert attempts[2].error is not None
    assert attempt(Planner.UNIFORM, request(FULL, MAMBA)).plan == attempts[0].plan


PAGE_SIZES = st.integers(1, 60).map(lambda n: n * 8192) | st.integers(256, 100_000).map(lambda n: n * 32)
DEMANDS = st.builds(PageDemand, page_bytes=PAGE_SIZES, blocks_per_sequence=st.integers(1, 2000))


@given(demands=st.lists(DEMANDS, min_size=1, max_size=5), memory_mib=st.integers(512, 16384))
@settings(max_examples=50, deadline=None)
def test_every_geometry_is_whole_pages_in_whole_slabs_in_the_pool(demands: list[PageDemand], memory_mib: int) -> None:
    slab = choose_geometry(demands, memory_mib * MIB)
    assert slab.pool_bytes <= memory_mib * MIB
    assert slab.null_bytes >= max(slab.page_stride_bytes)
    assert slab.num_slabs >= len(demands)
    for demand, pages, stride in zip(demands, slab.pages_per_slab, slab.page_stride_bytes, strict=True):
        assert pages * stride == slab.slab_bytes
        assert stride >= demand.page_bytes
        assert stride % math.gcd(STRIDE_ALIGNMENT, demand.page_bytes) == 0


@given(demands=st.lists(DEMANDS, min_size=2, max_size=2), memory_mib=st.integers(1024, 16384))
@settings(max_examples=50, deadline=None)
def test_two_page_sizes_of_any_ratio_waste_less_than_a_percent(demands: list[PageDemand], memory_mib: int) -> None:
    slab = choose_geometry(demands, memory_mib * MIB)
    for demand, stride in zip(demands, slab.page_stride_bytes, strict=True):
        assert 1 - demand.page_bytes / stride <= MAX_PADDING


def test_whole_sequences_need_whole_slabs_of_each_group() -> None:
    demands = [PageDemand(page_bytes=480, blocks_per_sequence=4), PageDemand(page_bytes=96, blocks_per_sequence=4)]
    slab = SlabGeometry(
        slab_bytes=2400, num_slabs=2, pages_per_slab=(5, 25), page_stride_bytes=(480, 96), null_bytes=480
    )

    assert sequences_that_fit(slab, demands) > 2
    assert whole_sequences_that_fit(slab, demands) == 1
    assert slabs_taken(slab, demands, 2) == 3


def test_small_pool_prefers_slabs_that_let_one_sequence_run() -> None:
    large, small = (
        PageDemand(page_bytes=1 << 20, blocks_per_sequence=9),
        PageDemand(page_bytes=70_000, blocks_per_sequence=3),
    )
    slab = choose_geometry([large, small], 12 << 20)
    assert slabs_taken(slab, [large, small]) <= slab.num_slabs
