import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.connectors.base import PoolLayout
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


def element_offset(layout, block_id, layer_id, head, token):
    index = {"B": block_id, "L": layout.layer_ids.index(layer_id), "H": head - layout.head_start, "N": token}
    sizes = {"B": layout.num_blocks, "L": len(layout.layer_ids), "H": layout.num_heads, "N": layout.block_size}
    offset = 0
    for axis in layout.order[:-1]:
        offset = offset * sizes[axis] + index[axis]
    return offset * layout.content_bytes


def naive_copy(src, dst, src_pool, dst_pool, src_ids, dst_ids, num_tokens, first_token):
    out = dst_pool.copy()
    heads = set(range(src.head_start, src.head_start + src.num_heads)) & set(
        range(dst.head_start, dst.head_start + dst.num_heads)
    )
    for token, layer_id, head in itertools.product(range(num_tokens), set(src.layer_ids) & set(dst.layer_ids), heads):
        s, d = first_token + token, token
        a = element_offset(src, src_ids[s // src.block_size], layer_id, head, s % src.block_size)
        b = element_offset(dst, dst_ids[d // dst.block_size], layer_id, head, d % dst.block_size)
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
    return PoolLayout(
        order=draw(st.sampled_from(ORDERS)),
        num_blocks=draw(st.integers(3, 6)),
        block_size=draw(st.integers(1, 6)),
        layer_ids=tuple(layer_ids if draw(st.booleans()) else sorted(layer_ids)),
        head_start=draw(st.integers(0, 2)),
        num_heads=draw(st.integers(1, 3)),
        content_bytes=content_bytes,
        dtype="x",
    )


@st.composite
def transfers(draw):
    content_bytes = draw(st.integers(1, 3))
    src = draw(layouts(content_bytes))
    dst = src if draw(st.integers(0, 3)) == 0 else draw(layouts(content_bytes))
    first_token = draw(st.integers(0, src.block_size - 1))
    most = min(src.num_blocks * src.block_size - first_token, dst.num_blocks * dst.block_size)
    num_tokens = draw(st.integers(0, most))
    src_ids = draw(st.permutations(range(src.num_blocks)))[: max(1, -(-(first_token + num_tokens) // src.block_size))]
    dst_ids = draw(st.permutations(range(dst.num_blocks)))[: max(1, -(-num_tokens // dst.block_size))]
    return src, dst, np.array(src_ids, np.int32), np.array(dst_ids, np.int32), num_tokens, first_token


@given(transfers())
@settings(max_examples=400, deadline=None)
def test_runs_copy_what_an_element_wise_copy_does(transfer):
    src, dst, src_ids, dst_ids, num_tokens, first_token = transfer
    rng = np.random.default_rng(0)
    src_pool = rng.integers(1, 255, src.num_bytes).astype(np.uint8)
    dst_pool = np.zeros(dst.num_bytes, np.uint8)
    runs = intersect_runs(
        src, dst, src_block_ids=src_ids, dst_block_ids=dst_ids, num_tokens=num_tokens, first_token=first_token
    )
    expected = naive_copy(src, dst, src_pool, dst_pool, src_ids, dst_ids, num_tokens, first_token)
    assert (apply_runs(runs, src_pool, dst_pool) == expected).all()
    assert runs.num_bytes == np.count_nonzero(expected)


@given(transfers())
@settings(max_examples=200, deadline=None)
def test_no_two_runs_continue_each_other(transfer):
    src, dst, src_ids, dst_ids, num_tokens, first_token = transfer
    runs = intersect_runs(
        src, dst, src_block_ids=src_ids, dst_block_ids=dst_ids, num_tokens=num_tokens, first_token=first_token
    )
    ends = set(zip((runs.src_offsets + runs.lengths).tolist(), (runs.dst_offsets + runs.lengths).tolist()))
    starts = set(zip(runs.src_offsets.tolist(), runs.dst_offsets.tolist()))
    assert not ends & starts


@given(transfers(), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_split_runs_are_the_same_bytes_in_bounded_runs(transfer, max_bytes):
    src, dst, src_ids, dst_ids, num_tokens, first_token = transfer
    runs = intersect_runs(
        src, dst, src_block_ids=src_ids, dst_block_ids=dst_ids, num_tokens=num_tokens, first_token=first_token
    )
    pieces = split_runs(runs, max_bytes)
    src_pool = np.random.default_rng(0).integers(1, 255, src.num_bytes).astype(np.uint8)
    dst_pool = np.zeros(dst.num_bytes, np.uint8)
    assert (apply_runs(pieces, src_pool, dst_pool) == apply_runs(runs, src_pool, dst_pool)).all()
    assert pieces.num_bytes == runs.num_bytes
    assert not len(pieces) or int(pieces.lengths.max()) <= max_bytes


def test_equal_layouts_give_one_run_per_block():
    layout = make_layout()
    runs = intersect_runs(
        layout,
        layout,
        src_block_ids=np.array([1, 3, 5], np.int32),
        dst_block_ids=np.array([2, 6, 4], np.int32),
        num_tokens=12,
    )
    page = layout.num_bytes // layout.num_blocks
    assert runs.lengths.tolist() == [page] * 3


def test_neighbouring_blocks_on_both_sides_join():
    layout = make_layout()
    runs = intersect_runs(
        layout,
        layout,
        src_block_ids=np.array([1, 2, 3, 6], np.int32),
        dst_block_ids=np.array([4, 5, 6, 7], np.int32),
        num_tokens=16,
    )
    page = layout.num_bytes // layout.num_blocks
    assert runs.lengths.tolist() == [4 * page - page, page]


def test_one_tensor_parallel_slice_of_a_bhlnc_page_is_one_run():
    whole = make_layout(num_heads=4)
    half = make_layout(num_heads=2, head_start=2)
    runs = intersect_runs(
        whole, half, src_block_ids=np.array([2], np.int32), dst_block_ids=np.array([5], np.int32), num_tokens=4
    )
    assert len(runs) == 1


def test_pools_without_common_layers_share_nothing():
    runs = intersect_runs(
        make_layout(layer_ids=(0, 1)),
        make_layout(layer_ids=(2, 3)),
        src_block_ids=np.array([2], np.int32),
        dst_block_ids=np.array([5], np.int32),
        num_tokens=4,
    )
    assert len(runs) == 0


def test_strides_of_the_default_order():
    layout = make_layout(num_blocks=3, num_heads=2, block_size=4, content_bytes=8)
    assert strides(layout) == (2 * 3 * 4 * 8, 4 * 8, 3 * 4 * 8, 8)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="BHLN"):
        strides(make_layout(order="BHLN"))


def test_tokens_beyond_the_blocks_are_refused():
    with pytest.raises(ValueError, match="5 tokens do not fit the 1 source blocks"):
        intersect_runs(
            make_layout(),
            make_layout(),
            src_block_ids=np.array([2], np.int32),
            dst_block_ids=np.array([5, 6], np.int32),
            num_tokens=5,
        )


def test_block_ids_outside_the_pool_are_refused():
    with pytest.raises(ValueError, match=r"\[0, 8\)"):
        intersect_runs(
            make_layout(),
            make_layout(),
            src_block_ids=np.array([2], np.int32),
            dst_block_ids=np.array([8], np.int32),
            num_tokens=4,
        )
