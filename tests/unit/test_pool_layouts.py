"""A plan's pool as connectors know it: addresses are those that kernels use, and transfers move just those bytes."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.plan_pools import (
    MIXES,
    ORDERS,
    PoolKey,
    copy_naively,
    group_pairs,
    is_state,
    layers_of,
    layouts_of,
    new_pool,
    owned_blocks,
    plan_of,
    views_of,
)

from blockferry.connectors.base import ContentKind, PoolLayout, TransferPart
from blockferry.connectors.layout import intersect_runs, strides
from blockferry.engine.kv.plan import Planner
from blockferry.engine.kv.reach import SpecKind
from blockferry.engine.models.sharding import Span
from blockferry.engine.worker.pool_layouts import HeldHeads, pool_layouts

PLANNERS = (Planner.UNIFORM, Planner.SLAB, Planner.UNIFIED)
KEYS = [
    key
    for mix, planner, order in itertools.product(MIXES, PLANNERS, ORDERS)
    if plan_of(key := PoolKey(mix=mix, planner=planner, order=order)) is not None
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("planner", [Planner.UNIFORM, Planner.UNIFIED])
def test_pool_of_one_group_lies_as_one_dense_layout(order, planner):
    key = PoolKey(mix="full", planner=planner, order=order)
    (layout,) = layouts_of(key)
    dense = PoolLayout(
        order=order,
        num_blocks=plan_of(key).num_blocks,
        block_size=4,
        layer_ids=(0, 1, 2),
        head_start=0,
        num_heads=4,
        content_bytes=16,
        dtype="float16",
    )
    assert strides(layout) == strides(dense)
    assert layout.num_bytes == dense.num_bytes
    assert dataclasses.replace(layout, strides=None) == dense


@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{key.mix}-{key.planner}-{key.order}")
def test_every_token_lies_where_the_kernels_view_has_it(key):
    pool = new_pool(key, seed=0)
    views = views_of(key, pool)
    start = pool.__array_interface__["data"][0]
    for layout in layouts_of(key):
        assert layout.num_bytes <= plan_of(key).pool_bytes
        for slot, layer_id in enumerate(layout.layer_ids):
            view = views[layer_id][layout.field == "recurrent"]
            assert view.shape[0] == layout.num_blocks
            address = start + layout.offset + slot * layout.strides.layer
            if layout.field in ("", "conv.x", "recurrent"):  # the first of their tensors
                assert view.__array_interface__["data"][0] == address
            assert view.strides[0] == layout.strides.block
            if layout.content is not ContentKind.STATE:
                assert view.shape[1:] == (layout.num_heads, layout.block_size, layout.content_bytes)
                steps = zip(view.shape[1:3], view.strides[1:3], (layout.strides.head, layout.strides.token))
                assert all(step == stride for size, step, stride in steps if size > 1)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{key.mix}-{key.planner}-{key.order}")
def test_every_layer_with_something_to_ferry_has_one_layout_a_field(key):
    described = [(layer_id, layout.field) for layout in layouts_of(key) for layer_id in layout.layer_ids]
    names = {SpecKind.MAMBA: ["conv.x", "conv.b", "conv.c", "recurrent"], SpecKind.SCRATCH_RING: []}
    specs = layers_of(key.mix, key.block_size, key.tp_size)
    wanted = [(layer_id, field) for layer_id, spec in enumerate(specs) for field in names.get(spec.kind, [""])]
    assert sorted(described) == sorted(wanted)


def test_rank_with_fewer_heads_than_planned_keeps_the_plans_strides():
    key = PoolKey(mix="full and windows", tp_size=2)
    arguments = {"order": "BHLNC", "dtype": "float16", "tp_rank": 1, "tp_size": 2}
    whole = pool_layouts(plan_of(key), kv_heads=HeldHeads(span=Span(start=2, stop=4)), **arguments)
    fewer = pool_layouts(plan_of(key), kv_heads=HeldHeads(span=Span(start=2, stop=3)), **arguments)
    assert [(one.head_start, one.num_heads) for one in fewer] == [(2, 1)] * len(whole)
    assert [one.strides for one in fewer] == [one.strides for one in whole]


def test_more_heads_than_planned_are_refused():
    key = PoolKey(mix="full", tp_size=2)
    with pytest.raises(ValueError, match="planned with 2 KV heads, but this rank holds 3"):
        pool_layouts(
            plan_of(key),
            order="BHLNC",
            dtype="x",
            kv_heads=HeldHeads(span=Span(start=0, stop=3)),
            tp_rank=0,
            tp_size=2,
        )


def test_ranks_say_which_units_of_all_ranks_they_hold_and_in_how_many_copies():
    layouts = layouts_of(PoolKey(mix="latents and states", tp_size=2, tp_rank=1))
    held = {(one.content, one.field, one.head_start, one.num_heads, one.num_copies, one.copy) for one in layouts}
    assert held == {
        (ContentKind.STATE, "conv.x", 2, 2, 1, 0),
        (ContentKind.STATE, "conv.b", 0, 1, 2, 1),
        (ContentKind.STATE, "conv.c", 1, 1, 1, 0),
        (ContentKind.STATE, "recurrent", 4, 4, 1, 0),
        (ContentKind.LATENT, "", 0, 1, 2, 1),
        (ContentKind.KV, "", 2, 2, 1, 0),
    }


def test_states_whose_fields_are_not_known_are_refused_by_name():
    plan = plan_of(PoolKey(mix="full and states"))
    regions = [
        dataclasses.replace(one, spec=dataclasses.replace(one.spec, fields=())) if one.group else one
        for one in plan.regions
    ]
    heads = HeldHeads(span=Span(start=0, stop=4))
    with pytest.raises(ValueError, match="2 tensors, of which 0 have known fields, cannot be ferried"):
        pool_layouts(
            dataclasses.replace(plan, regions=tuple(regions)),
            order="BHLNC",
            dtype="x",
            kv_heads=heads,
            tp_rank=0,
            tp_size=1,
        )


@st.composite
def pools(draw, mix):
    tp_size = draw(st.sampled_from([1, 2, 4, 8]))
    planner = draw(st.sampled_from(PLANNERS))
    pp_size = 1 if planner is Planner.SLAB else draw(st.sampled_from([1, 1, 2, 3]))
    key = PoolKey(
        mix=mix,
        planner=planner,
        order=draw(st.sampled_from(ORDERS)),
        block_size=draw(st.sampled_from([4, 8, 16])),
        tp_size=tp_size,
        tp_rank=draw(st.integers(0, tp_size - 1)),
        pp_size=pp_size,
        pp_rank=draw(st.integers(0, pp_size - 1)),
    )
    assume(plan_of(key) is not None)
    return key


@st.composite
def parts_between(draw, src, dst):
    """A part for each pair of groups that have layers in common, in blocks that share no byte."""
    parts = []
    for pair in group_pairs(src, dst):
        places = list(zip((src, dst), pair))
        sizes = [1 if is_state(*place) else plan_of(place[0]).groups[place[1]].spec.block_size for place in places]
        first, dst_first = (draw(st.integers(0, size - 1)) for size in sizes)
        owned = [owned_blocks(plan_of(key), group)[:5] for key, group in places]
        most = min(len(owned[0]) * sizes[0] - first, len(owned[1]) * sizes[1] - dst_first, 24)
        num_tokens = 1 if is_state(*places[0]) else draw(st.integers(0, most))
        ids = [draw(st.permutations(blocks)) for blocks in owned]
        parts.append(
            TransferPart(
                src_group=pair.src,
                dst_group=pair.dst,
                src_block_ids=np.array(ids[0], np.int32),
                dst_block_ids=np.array(ids[1], np.int32),
                num_tokens=num_tokens,
                first_token=first,
                dst_first_token=dst_first,
            )
        )
    return parts


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_transfer_of_all_groups_copies_what_a_token_wise_copy_does(data):
    mix = data.draw(st.sampled_from(MIXES))
    src, dst = data.draw(pools(mix)), data.draw(pools(mix))
    parts = data.draw(parts_between(src, dst))
    src_pool, dst_pool, expected = new_pool(src, seed=1), new_pool(dst), new_pool(dst)
    for part in parts:
        for mine, theirs in itertools.product(layouts_of(src), layouts_of(dst)):
            if (mine.group, theirs.group) == (part.src_group, part.dst_group):
                runs = intersect_runs(mine, theirs, part)
                for s, d, n in zip(runs.src_offsets.tolist(), runs.dst_offsets.tolist(), runs.lengths.tolist()):
                    dst_pool[d : d + n] = src_pool[s : s + n]
    copy_naively(src, dst, src_pool, expected, parts)
    assert (dst_pool == expected).all()
