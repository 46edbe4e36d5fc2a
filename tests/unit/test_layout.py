import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.connectors.base import PoolLayout, Strides, TransferPart
from blockferry.connectors.layout import intersect_runs, split_runs, strides

ORDERS = ["".join(axes) + "C" for axes in itertools.permutations("BLHN")]


def make_layout(**changes):
    values = {
        "order": "BHLNC",
        "num_blocks": 8,
        "block_size": 4,
        "layer_ids": (0, 1, 2),
        "head_start": 0,
        "num_heads": 2,
        "content_bytes": 4,
        "dtype": "x",
    }
    return PoolLayout(**(values | changes))


def make_part(src_block_ids, dst_block_ids, num_tokens, **offsets):
    src_block_ids, dst_block_ids = np.array(src_block_ids, np.int32), np.array(dst_block_ids, np.int32)
    return TransferPart(
        src_group=0,
        dst_group=0,
        src_block_ids=src_block_ids,
        dst_block_ids=dst_block_ids,
        num_tokens=num_tokens,
        **offsets,
    )


def element_offset(layout, block_id, layer_id, head, token):
    index = {"B": block_id, "L": layout.layer_ids.index(layer_id), "H": head - layout.head_start, "N": token}
    if layout.strides is not None:
        return layout.offset + sum(index[axis] * step for axis, step in zip("BLHN", layout.strides))
    sizes = {"B": layout.num_blocks, "L": len(layout.layer_ids), "H": layout.num_heads, "N": layout.block_size}
    offset = 0
    for axis in layout.order[:-1]:
        offset = offset * sizes[axis] + index[axis]
    return layout.offset + offset * layout.content_bytes


def naive_copy(src, dst, src_pool, dst_pool, part):
    out = dst_pool.copy()
    heads = set(range(src.head_start, src.head_start + src.num_heads)) & set(
        range(dst.head_start, dst.head_start + dst.num_heads)
    )
    for token, layer_id, head in itertools.product(
        range(part.num_tokens), set(src.layer_ids) & set(dst.layer_ids), heads
    ):
        s, d = part.first_token + token, part.dst_first_token + token
        a = element_offset(src, part.src_block_ids[s // src.block_size], layer_id, head, s % src.block_size)
        b = element_offset(dst, part.dst_block_ids[d // dst.block_size], layer_id, head, d % dst.block_size)
        out[b : b + dst.content_bytes] = src_pool[a : a + src.content_bytes]
    return out


def apply_runs(runs, src_pool, dst_pool):
    out = dst_pool.copy()
    for s, d, n in zip(runs.src_offsets.tolist(), runs.dst_offsets.tolist(), runs.lengths.tolist()):
        out[d : d + n] = src_pool[s : s + n]
    return out


@st.composite
def layouts(draw, content_bytes):
    layer_ids = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
    layout = PoolLayout(
        order=draw(st.sampled_from(ORDERS)),
        offset=draw(st.sampled_from([0, 0, 5])),
        num_blocks=draw(st.integers(3, 6)),
        block_size=draw(st.integers(1, 6)),
        layer_ids=tuple(layer_ids if draw(st.booleans()) else sorted(layer_ids)),
        head_start=draw(st.integers(0, 2)),
        num_heads=draw(st.integers(1, 3)),
        content_bytes=content_bytes,
        dtype="x",
    )
    gap = draw(st.sampled_from([None, None, 0, 3]))
    return layout if gap is None else with_gaps(layout, draw(st.sampled_from("BLHN")), gap)


def with_gaps(layout, gap_axis, gap):
    """The same, spelled by strides, with bytes of others between the elements of one axis."""
    sizes = {"B": layout.num_blocks, "L": len(layout.layer_ids), "H": layout.num_heads, "N": layout.block_size}
    step, steps = layout.content_bytes, {}
    for axis in reversed(layout.order[:-1]):
        step += gap if axis == gap_axis else 0
        steps[axis] = step
        step *= sizes[axis]
    return dataclasses.replace(layout, strides=Strides(*(steps[axis] for axis in "BLHN")))


@st.composite
def transfers(draw):
    content_bytes = draw(st.integers(1, 3))
    src = draw(layouts(content_bytes))
    dst = src if draw(st.integers(0, 3)) == 0 else draw(layouts(content_bytes))
    first_token = draw(st.integers(0, src.block_size - 1))
    dst_first_token = draw(st.integers(0, dst.block_size - 1))
    most = min(
        src.num_blocks * src.block_size - first_token,
        dst.num_blocks * dst.block_size - dst_first_token,
    )
    num_tokens = draw(st.integers(0, most))
    src_ids = draw(st.permutations(range(src.num_blocks)))[: max(1, -(-(first_token + num_tokens) // src.block_size))]
    dst_ids = draw(st.permutations(range(dst.num_blocks)))[
        : max(1, -(-(dst_first_token + num_tokens) // dst.block_size))
    ]
    return src, dst, make_part(src_ids, dst_ids, num_tokens, first_token=first_token, dst_first_token=dst_first_token)


@given(transfers())
@settings(max_examples=400, deadline=None)
def test_runs_copy_what_an_element_wise_copy_does(transfer):
    src, dst, part = transfer
    rng = np.random.default_rng(0)
    src_pool = rng.integers(1, 255, src.num_bytes).astype(np.uint8)
    dst_pool = np.zeros(dst.num_bytes, np.uint8)
    runs = intersect_runs(src, dst, part)
    expected = naive_copy(src, dst, src_pool, dst_pool, part)
    assert (apply_runs(runs, src_pool, dst_pool) == expected).all()
    assert runs.num_bytes == np.count_nonzero(expected)


@given(transfers())
@settings(max_examples=200, deadline=None)
def test_no_two_runs_continue_each_other(transfer):
    src, dst, part = transfer
    runs = intersect_runs(src, dst, part)
    ends = set(zip((runs.src_offsets + runs.lengths).tolist(), (runs.dst_offsets + runs.lengths).tolist()))
    starts = set(zip(runs.src_offsets.tolist(), runs.dst_offsets.tolist()))
    assert not ends & starts


@given(transfers(), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_split_runs_are_the_same_bytes_in_bounded_runs(transfer, max_bytes):
    src, dst, part = transfer
    runs = intersect_runs(src, dst, part)
    pieces = split_runs(runs, max_bytes)
    src_pool = np.random.default_rng(0).integers(1, 255, src.num_bytes).astype(np.uint8)
    dst_pool = np.zeros(dst.num_bytes, np.uint8)
    assert (apply_runs(pieces, src_pool, dst_pool) == apply_runs(runs, src_pool, dst_pool)).all()
    assert pieces.num_bytes == runs.num_bytes
    assert not len(pieces) or int(pieces.lengths.max()) <= max_bytes


def test_equal_layouts_give_one_run_per_block():
    layout = make_layout()
    runs = intersect_runs(layout, layout, make_part([1, 3, 5], [2, 6, 4], 12))
    page = layout.num_bytes // layout.num_blocks
    assert runs.lengths.tolist() == [page] * 3


def test_neighbouring_blocks_on_both_sides_join():
    layout = make_layout()
    runs = intersect_runs(layout, layout, make_part([1, 2, 3, 6], [4, 5, 6, 7], 16))
    page = layout.num_bytes // layout.num_blocks
    assert runs.lengths.tolist() == [4 * page - page, page]


def test_one_tensor_parallel_slice_of_a_bhlnc_page_is_one_run():
    whole = make_layout(num_heads=4)
    half = make_layout(num_heads=2, head_start=2)
    runs = intersect_runs(whole, half, make_part([2], [5], 4))
    assert len(runs) == 1


def test_pools_without_common_layers_share_nothing():
    runs = intersect_runs(make_layout(layer_ids=(0, 1)), make_layout(layer_ids=(2, 3)), make_part([2], [5], 4))
    assert len(runs) == 0


def test_strides_of_the_default_order():
    layout = make_layout(num_blocks=3, num_heads=2, block_size=4, content_bytes=8)
    assert strides(layout) == (2 * 3 * 4 * 8, 4 * 8, 3 * 4 * 8, 8)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="BHLN"):
        strides(make_layout(order="BHLN"))


def test_tokens_beyond_the_blocks_are_refused():
    with pytest.raises(ValueError, match="5 tokens do not fit the 1 source blocks"):
        intersect_runs(make_layout(), make_layout(), make_part([2], [5, 6], 5))


def test_block_ids_outside_the_pool_are_refused():
    with pytest.raises(ValueError, match=r"\[0, 8\)"):
        intersect_runs(make_layout(), make_layout(), make_part([2], [8], 4))
