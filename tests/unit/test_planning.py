import dataclasses
import logging
from collections.abc import Callable

import pytest

from blockferry.engine.errors import ConfigError, PoolTooSmall, UnplannableLayers
from blockferry.engine.kv.plan import KVCachePlan, Planner, PlanRequest
from blockferry.engine.kv.plan_groups import group_spec
from blockferry.engine.kv.plan_layout import check_layout
from blockferry.engine.kv.planning import RankShare, longest_sequence, plan_ranks, plan_unified, plan_uniform
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
from blockferry.engine.kv.spec import (
    AttentionSpec,
    KVCacheGroup,
    LayerSpec,
    MambaMode,
    MambaSpec,
    ScratchRingSpec,
    UniformTypeSpec,
)

LIMITS = SequenceLimits(max_model_len=256, max_in_flight_tokens=32)


def attention(
    reach: Reach | None = None, heads: int = 2, head_dim: int = 32, context_parallel: int = 1
) -> AttentionSpec:
    """A layer with pages of heads * head_dim * 64 bytes."""
    return AttentionSpec(
        block_size=16,
        content=KVContent(num_kv_heads=heads, head_dim=head_dim, dtype_bytes=2),
        reach=reach or FullReach(),
        context_parallel_size=context_parallel,
    )


FULL = attention()
SLIDING = attention(WindowReach(window=64))
CHUNKED = attention(ChunkReach(chunk=64))
LATENT = AttentionSpec(block_size=16, content=LatentContent(latent_dim=144, dtype_bytes=2))
STATE = MambaSpec(block_size=16, shapes=((300,),), dtype_bytes=(4,))


def request(*layers: LayerSpec, layout: str = "LBHNC", memory_bytes: int = 1 << 26) -> PlanRequest:
    return PlanRequest(layers=layers, limits=LIMITS, memory_bytes=memory_bytes, layout=layout)


def groups_of(plan: KVCachePlan) -> list[tuple[int, ...]]:
    return [group.layer_ids for group in plan.groups]


def test_equal_layers_form_one_group_of_their_spec() -> None:
    plan = plan_uniform(request(FULL, FULL, FULL))
    assert plan.groups == (KVCacheGroup(layer_ids=(0, 1, 2), spec=FULL),)
    assert plan.useful_fraction == 1.0


def test_one_type_with_pages_of_several_sizes_is_one_group_of_all_their_specs() -> None:
    wide = attention(heads=4)
    plan = plan_uniform(request(FULL, wide, FULL))
    assert plan.groups == (KVCacheGroup(layer_ids=(0, 1, 2), spec=UniformTypeSpec(layer_specs=(FULL, wide, FULL))),)
    assert [(region.layer_ids, region.offset) for region in plan.regions] == [
        ((0, 2), 0),
        ((1,), 2 * FULL.page_size_bytes * plan.num_blocks),
    ]


def test_latent_and_full_layers_share_blocks() -> None:
    assert groups_of(plan_uniform(request(FULL, LATENT))) == [(0, 1)]


def test_groups_are_as_large_as_the_rarest_spec_is_frequent() -> None:
    plan = plan_uniform(request(*[FULL, SLIDING, SLIDING] * 2))
    assert groups_of(plan) == [(0, 3), (1, 4), (2, 5)]


def test_groups_are_as_large_as_the_most_frequent_spec_where_counts_are_close() -> None:
    plan = plan_uniform(request(*[FULL, SLIDING] * 5, FULL, FULL))
    assert [len(layer_ids) for layer_ids in groups_of(plan)] == [7, 5]
    assert plan.useful_fraction == pytest.approx(12 / 14)


def test_counts_exactly_half_again_as_large_take_the_smaller_group() -> None:
    plan = plan_uniform(request(*[FULL] * 3, *[SLIDING] * 2))
    assert groups_of(plan) == [(0, 2), (1,), (3, 4)]


def test_smaller_pages_grow_to_more_tokens_where_sizes_divide() -> None:
    plan = plan_uniform(request(attention(heads=6), SLIDING))
    assert plan.groups[1].spec == dataclasses.replace(SLIDING, block_size=48)
    assert (plan.scheduler_block_size, plan.hash_block_size) == (48, 16)


def test_smaller_pages_are_padded_where_sizes_do_not_divide() -> None:
    wide = attention(heads=3)
    plan = plan_uniform(request(wide, SLIDING))
    assert plan.groups[1].spec == dataclasses.replace(SLIDING, page_size_padded=wide.page_size_bytes)
    assert plan.useful_fraction == pytest.approx(5 / 6)


def test_states_are_padded_even_where_sizes_divide() -> None:
    half = MambaSpec(block_size=16, shapes=((512,),), dtype_bytes=(4,))
    assert half.page_size_bytes * 2 == FULL.page_size_bytes
    plan = plan_uniform(request(FULL, half))
    assert plan.groups[1].spec == dataclasses.replace(half, page_size_padded=FULL.page_size_bytes)


def test_a_padded_page_grows_with_its_padding() -> None:
    padded = dataclasses.replace(SLIDING, page_size_padded=5000)
    assert padded.with_page_size(15000) == dataclasses.replace(SLIDING, block_size=48, page_size_padded=15000)


def test_latent_pages_are_never_padded_so_that_local_layers_are_kept_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = attention(WindowReach(window=64), heads=3)
    with caplog.at_level(logging.WARNING):
        plan = plan_uniform(request(LATENT, wide))
    whole = dataclasses.replace(wide, reach=FullReach(computes_window=64))
    assert plan.groups == (KVCacheGroup(layer_ids=(0, 1), spec=UniformTypeSpec(layer_specs=(LATENT, whole))),)
    assert "all layers store every token" in caplog.text


def test_latent_pages_grow_where_sizes_divide() -> None:
    wide = attention(WindowReach(window=64), heads=9)
    assert LATENT.page_size_bytes * 4 == wide.page_size_bytes
    plan = plan_uniform(request(LATENT, wide))
    assert plan.groups[0].spec == dataclasses.replace(LATENT, block_size=64)


def test_latent_pages_beside_larger_states_are_refused_with_the_way_out() -> None:
    big_state = MambaSpec(block_size=16, shapes=((5000,),), dtype_bytes=(1,))
    with pytest.raises(UnplannableLayers, match=r"layer 1: its pages of 4608 bytes .* use layout BLHNC") as refusal:
        plan_uniform(request(big_state, LATENT))
    assert refusal.value.layer_id == 1
    assert groups_of(plan_uniform(request(big_state, LATENT, layout="BLHNC"))) == [(0,), (1,)]


def test_blocks_outermost_hold_pages_of_each_group_in_its_own_size() -> None:
    plan = plan_uniform(request(FULL, STATE, FULL, STATE, layout="BLHNC"))
    assert [(group.layer_ids, group.spec) for group in plan.groups] == [((0, 2), FULL), ((1, 3), STATE)]
    assert plan.bytes_per_block == 2 * FULL.page_size_bytes
    assert [(r.offset, r.layer_stride, r.block_stride) for r in plan.regions] == [
        (0, FULL.page_size_bytes, plan.bytes_per_block),
        (0, STATE.page_size_bytes, plan.bytes_per_block),
    ]


def test_packing_splits_states_and_windows_to_fit_the_block_that_full_layers_need() -> None:
    wide_window = attention(WindowReach(window=64), heads=3)
    plan = plan_uniform(request(FULL, FULL, *[wide_window] * 3, *[STATE] * 7, layout="BLHNC"))
    assert groups_of(plan) == [(0, 1), (2,), (3,), (4,), (5, 7, 9, 11), (6, 8, 10)]
    assert plan.bytes_per_block == 2 * FULL.page_size_bytes


def test_packing_never_splits_layers_whose_need_grows_with_the_sequence() -> None:
    plan = plan_uniform(request(*[FULL] * 5, attention(WindowReach(window=64), heads=1), layout="BLHNC"))
    assert groups_of(plan) == [(0, 1, 2, 3, 4), (5,)]


def test_packing_loses_no_layer_of_an_uneven_bucket_of_states() -> None:
    small_state = MambaSpec(block_size=16, shapes=((100,),), dtype_bytes=(4,))
    layers = [attention(heads=1), small_state, STATE, small_state, small_state, STATE, small_state]
    plan = plan_uniform(request(*layers, layout="BLHNC"))
    assert sorted(layer_id for layer_ids in groups_of(plan) for layer_id in layer_ids) == list(range(7))
    assert plan.bytes_per_block == attention(heads=1).page_size_bytes


def test_packing_takes_equal_repeats_where_an_even_bucket_mixes_page_sizes() -> None:
    wide = attention(heads=4)
    plan = plan_uniform(request(*[FULL, wide] * 2, *[SLIDING] * 4, layout="BLHNC"))
    assert groups_of(plan) == [(0, 1, 2, 3), (4, 6), (5, 7)]


def test_packing_takes_fewer_larger_groups_where_padding_is_equal() -> None:
    wide = attention(heads=4)
    plan = plan_uniform(request(*[FULL, wide] * 2, *[SLIDING] * 3, layout="BLHNC"))
    assert groups_of(plan) == [(0, 1, 2, 3), (4, 5, 6)]


def test_heads_outermost_in_a_block_lie_one_slice_apart_per_layer() -> None:
    (region,) = plan_uniform(request(FULL, FULL, layout="BHLNC")).regions
    assert region.layer_stride == FULL.page_size_bytes // 2
    assert region.block_stride == 2 * FULL.page_size_bytes


def test_layers_outermost_hold_one_run_of_blocks_per_layer() -> None:
    plan = plan_uniform(request(FULL, FULL, layout="LBNHC"))
    assert plan.regions[0].layer_stride == plan.num_blocks * FULL.page_size_bytes
    assert plan.regions[0].block_stride == FULL.page_size_bytes
    assert plan.pool_bytes == 2 * plan.regions[0].layer_stride


def test_layers_outermost_cannot_hold_groups_with_pages_of_several_sizes() -> None:
    groups = (KVCacheGroup(layer_ids=(0,), spec=FULL), KVCacheGroup(layer_ids=(1,), spec=STATE))
    with pytest.raises(UnplannableLayers, match=r"layer 1: layout LBHNC cannot hold .* 1200, 4096 bytes"):
        check_layout("LBHNC", groups)
    check_layout("BHLNC", groups)


def test_unknown_layout_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="layout: 'NHD' is unknown; use one of BHLNC, BLHNC, LBHNC, LBNHC"):
        plan_uniform(request(FULL, layout="NHD"))


def test_an_encoders_own_attention_is_left_out() -> None:
    assert groups_of(plan_uniform(request(attention(NoReach()), FULL, attention(NoReach()), FULL))) == [(1, 3)]


@pytest.mark.parametrize("plan_any", [plan_uniform, plan_unified])
def test_a_model_without_cache_has_no_group_and_only_the_null_block(
    plan_any: Callable[[PlanRequest], KVCachePlan],
) -> None:
    plan = plan_any(request(attention(NoReach())))
    assert (plan.groups, plan.num_blocks, plan.pool_bytes, plan.capacity_tokens) == ((), 1, 0, 0)


def test_groups_with_layers_of_a_draft_model_are_marked() -> None:
    plan = plan_uniform(dataclasses.replace(request(FULL, SLIDING, SLIDING, FULL), draft_layer_ids=frozenset({3})))
    assert [(group.layer_ids, group.is_draft) for group in plan.groups] == [((0, 3), True), ((1, 2), False)]


def test_context_parallel_blocks_stand_for_more_tokens_of_the_sequence() -> None:
    plan = plan_uniform(request(attention(context_parallel=2), SLIDING))
    assert (plan.scheduler_block_size, plan.hash_block_size) == (32, 16)
    assert plan.max_concurrency == plan.num_blocks / (8 + 7)


def test_states_that_are_never_shared_do_not_decide_the_hash_block() -> None:
    running = dataclasses.replace(STATE, block_size=24, mode=MambaMode.NONE)
    plan = plan_uniform(request(FULL, running))
    assert (plan.scheduler_block_size, plan.hash_block_size) == (16, 16)


def test_scratch_rings_are_padded_beside_larger_pages() -> None:
    ring = ScratchRingSpec(block_size=8, page_bytes=100)
    plan = plan_uniform(request(FULL, ring))
    assert plan.groups[1].spec.page_size_bytes == FULL.page_size_bytes
    assert plan.groups[1].spec.unpadded_page_size_bytes == 100


def test_capacity_counts_the_most_blocks_that_a_sequence_holds_in_all_groups() -> None:
    plan = plan_uniform(request(FULL, SLIDING, memory_bytes=FULL.page_size_bytes * 69))
    per_sequence = 256 // 16 + (6 + 1)  # 63 + 32 tokens in the window's reach: 6 blocks, one more as they may straddle
    assert plan.num_blocks == 69
    assert plan.max_concurrency == 69 / per_sequence == 3.0
    assert plan.capacity_tokens == 3 * 256


def test_pool_too_small_says_how_much_it_takes_and_what_would_fit() -> None:
    small = request(FULL, memory_bytes=FULL.page_size_bytes * 10)
    text = "10 blocks of 4096 bytes, but one sequence of max_model_len=256 tokens takes 17, .*max_model_len to 144 or"
    with pytest.raises(PoolTooSmall, match=text) as refusal:
        plan_uniform(small)
    needed = refusal.value.needed_bytes
    assert plan_uniform(dataclasses.replace(small, memory_bytes=needed)).num_blocks == 17
    with pytest.raises(PoolTooSmall):
        plan_uniform(dataclasses.replace(small, memory_bytes=needed - 1))
    assert longest_sequence((KVCacheGroup(layer_ids=(0,), spec=FULL),), LIMITS, 9) == 144


@pytest.mark.parametrize("memory_bytes", [0, -5, 4096])
def test_pool_without_a_usable_block_promises_no_length(memory_bytes: int) -> None:
    with pytest.raises(PoolTooSmall, match=r"give the pool 0.07 MiB or more$"):
        plan_uniform(request(FULL, memory_bytes=memory_bytes))


def test_unified_plan_keeps_local_layers_whole_in_one_group() -> None:
    plan = plan_unified(request(SLIDING, FULL, SLIDING))
    whole = dataclasses.replace(FULL, reach=FullReach(computes_window=64))
    assert plan.groups == (KVCacheGroup(layer_ids=(0, 1, 2), spec=whole),)
    assert plan.planner is Planner.UNIFIED


def test_unified_plan_takes_the_full_layers_block_size() -> None:
    sliding = dataclasses.replace(SLIDING, block_size=32, page_size_padded=5000)
    (group,) = plan_unified(request(FULL, sliding)).groups
    whole = dataclasses.replace(FULL, reach=FullReach(computes_window=64), page_size_padded=5000)
    assert group.layer_specs == (FULL, whole)


def test_unified_plan_of_windows_alone_still_frees_what_they_do_not_reach() -> None:
    assert plan_unified(request(SLIDING, SLIDING)).groups == (KVCacheGroup(layer_ids=(0, 1), spec=SLIDING),)


def test_unified_plan_takes_one_window_and_one_chunk_size_together() -> None:
    assert groups_of(plan_unified(request(FULL, SLIDING, CHUNKED))) == [(0, 1, 2)]


def test_unified_plan_refuses_two_windows() -> None:
    with pytest.raises(UnplannableLayers, match="layer 2: attention windows of 64, 128 tokens in one group"):
        plan_unified(request(FULL, SLIDING, attention(WindowReach(window=128))))


def test_unified_plan_refuses_states() -> None:
    with pytest.raises(
        UnplannableLayers, match=r"layer 1: mamba .* cannot share one block table with layer 0, full_attention"
    ):
        plan_unified(request(FULL, STATE))


def test_unified_plan_refuses_two_windows_without_a_full_layer() -> None:
    with pytest.raises(
        UnplannableLayers, match=r"layer 1: sliding_window .* cannot share one block table with layer 0, sliding"
    ):
        plan_unified(request(SLIDING, attention(WindowReach(window=128))))


def test_layers_that_differ_only_in_a_computed_window_are_one_spec() -> None:
    whole = dataclasses.replace(FULL, reach=FullReach(computes_window=64))
    assert group_spec((FULL, whole, FULL)) == whole


def test_ranks_share_groups_and_the_smallest_number_of_blocks() -> None:
    layers = [FULL, SLIDING, SLIDING] * 4
    stages = (frozenset(range(6)), frozenset(range(6, 12)))
    memory_bytes = {0: FULL.page_size_bytes * 200, 1: FULL.page_size_bytes * 100}
    ranks = [RankShare(layer_ids=stages[stage], memory_bytes=memory_bytes[stage]) for stage in (0, 0, 1, 1)]
    plans = plan_ranks(request(*layers, memory_bytes=0), ranks)
    assert [plan.num_blocks for plan in plans] == [50] * 4
    assert groups_of(plans[0]) == groups_of(plans[1]) == [(0, 3), (1, 4), (2, 5)]
    assert groups_of(plans[2]) == [(6, 9), (7, 10), (8, 11)]
    assert plans[0].pool_bytes == 50 * 2 * FULL.page_size_bytes


def test_a_stage_without_layers_of_a_group_still_counts_its_blocks() -> None:
    ranks = [RankShare(layer_ids=frozenset({i}), memory_bytes=1 << 20) for i in range(3)]
    plans = plan_ranks(request(FULL, SLIDING, attention(NoReach())), ranks)
    assert [groups_of(plan) for plan in plans] == [[(0,), ()], [(), (1,)], [(), ()]]
    assert {plan.num_blocks for plan in plans} == {256}
    assert {plan.max_concurrency for plan in plans} == {256 / 23}
    assert plans[2].pool_bytes == 0


def test_ranks_of_a_mixed_group_hold_the_specs_of_their_layers() -> None:
    wide = attention(heads=4)
    ranks = [
        RankShare(layer_ids=frozenset({0, 2}), memory_bytes=1 << 20),
        RankShare(layer_ids=frozenset({1}), memory_bytes=1 << 20),
    ]
    plans = plan_ranks(request(FULL, wide, FULL), ranks, planner=Planner.UNIFIED)
    assert [plan.groups[0].spec for plan in plans] == [FULL, wide]
    assert [plan.useful_fraction for plan in plans] == [1.0, 1.0]


def test_a_rank_that_is_too_small_is_named() -> None:
    ranks = [
        RankShare(layer_ids=frozenset({0}), memory_bytes=1 << 20),
        RankShare(layer_ids=frozenset({1}), memory_bytes=1),
    ]
    with pytest.raises(PoolTooSmall, match=r"^ranks\[1\]: a pool of 0.00 MiB has 0 blocks"):
        plan_ranks(request(FULL, FULL), ranks)


def test_a_layer_on_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers \[1\] are on none of the 1 ranks"):
        plan_ranks(request(FULL, FULL), [RankShare(layer_ids=frozenset({0}), memory_bytes=1 << 20)])


def test_ranks_of_a_slab_plan_are_planned_elsewhere() -> None:
    with pytest.raises(ValueError, match="planner=slab does not form uniform blocks"):
        plan_ranks(request(FULL), [], planner=Planner.SLAB)
