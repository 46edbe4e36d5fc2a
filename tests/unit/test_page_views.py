"""Views of a pool's pages: where the plan says, sharing no byte, and whole blocks copied and cleared."""

import dataclasses

import numpy as np
import pytest
import torch

from blockferry.engine.kv.plan import KVCachePlan, Planner, PlanRequest
from blockferry.engine.kv.planners import plan_with
from blockferry.engine.kv.reach import FP8_DS_MLA_TOKEN_BYTES, KVContent, LatentContent, SequenceLimits, WindowReach
from blockferry.engine.kv.spec import AttentionSpec, LayerSpec, MambaSpec, ScratchRingSpec
from blockferry.engine.worker.page_views import PageDTypes, PageViews

LIMITS = SequenceLimits(max_model_len=64, max_in_flight_tokens=16)
DTYPES = PageDTypes(kv=torch.float16, states=(torch.float16, torch.float32))
KV = KVContent(num_kv_heads=2, head_dim=4, dtype_bytes=2)
FULL = AttentionSpec(block_size=4, content=KV)
WINDOW = AttentionSpec(block_size=4, content=KV, reach=WindowReach(window=8))
WIDE = AttentionSpec(block_size=4, content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=2, head_dim_v=16))
LATENT = AttentionSpec(block_size=4, content=LatentContent(latent_dim=24, dtype_bytes=2))
MAMBA = MambaSpec(block_size=4, shapes=((3, 4), (2, 8, 4)), dtype_bytes=(2, 4))
RING = ScratchRingSpec(block_size=8, page_bytes=96)
BLOCKS_OUTERMOST = ("BLHNC", "BHLNC")
ALL_LAYOUTS = (*BLOCKS_OUTERMOST, "LBHNC", "LBNHC")


def make_plan(layers: list[LayerSpec], planner: Planner = Planner.UNIFORM, layout: str = "BLHNC") -> KVCachePlan:
    return plan_with(planner, PlanRequest(layers=tuple(layers), limits=LIMITS, memory_bytes=1 << 16, layout=layout))


def make_views(plan: KVCachePlan, layout: str = "BLHNC") -> tuple[PageViews, torch.Tensor]:
    memory = torch.zeros(plan.pool_bytes, dtype=torch.uint8)
    return PageViews(plan, memory, layout=layout, dtypes=DTYPES), memory


def blocks_of(plan: KVCachePlan, group: int) -> list[int]:
    """Blocks that a ledger could give a group at the same time as the other groups have theirs."""
    if plan.slab is None:
        return list(range(1 + group, plan.num_blocks, len(plan.groups)))
    pages = plan.slab.pages_per_slab[group]
    owned = range(group, plan.slab.num_slabs, len(plan.groups))
    tail = range(plan.slab.num_slabs * pages + 1, plan.slab.num_pages(group) + 1)
    return [1 + slab * pages + page for slab in owned for page in range(pages)] + list(tail)


MIXES = {
    "one spec": [FULL] * 3,
    "full and windows": [FULL, WINDOW, WINDOW, FULL, WINDOW],
    "with states": [FULL, MAMBA, WINDOW, MAMBA, MAMBA],
}
PACKED = {
    "latent and states": [LATENT, MAMBA, LATENT, WINDOW, MAMBA],
    "several widths and a ring": [FULL, WIDE, FULL, RING, LATENT],
}
CASES = [
    (planner, layout, name)
    for planner, layouts in ((Planner.UNIFORM, ALL_LAYOUTS), (Planner.SLAB, BLOCKS_OUTERMOST))
    for layout in layouts
    for name in (MIXES | PACKED if layout in BLOCKS_OUTERMOST else MIXES)
]


@pytest.mark.parametrize(("planner", "layout", "name"), CASES)
def test_no_two_views_of_blocks_held_at_once_share_a_byte(planner: Planner, layout: str, name: str) -> None:
    plan = make_plan((MIXES | PACKED)[name], planner, layout)
    views, memory = make_views(plan, layout)
    num_bytes = 0
    for index, group in enumerate(plan.groups):
        for layer_id in group.layer_ids:
            for tensor in views.layers[layer_id]:
                for block_id in blocks_of(plan, index):
                    page = tensor[block_id].view(torch.uint8)
                    page += 1
                    num_bytes += page.numel()
    assert num_bytes > memory.numel() // 4
    assert memory.max() == 1
    assert memory.sum(dtype=torch.int64) == num_bytes


@pytest.mark.parametrize(("planner", "layout", "name"), CASES)
def test_views_lie_where_the_plan_says(planner: Planner, layout: str, name: str) -> None:
    plan = make_plan((MIXES | PACKED)[name], planner, layout)
    views, memory = make_views(plan, layout)
    for region in plan.regions:
        for index, layer_id in enumerate(region.layer_ids):
            for block_id in (0, 1, views.layers[layer_id][0].shape[0] - 1):
                place = views.layers[layer_id][0][block_id].data_ptr() - memory.data_ptr()
                assert place == region.offset + index * region.layer_stride + block_id * region.block_stride


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_heads_and_tokens_lie_as_the_layout_spells_them(layout: str) -> None:
    layers = [FULL] * 3
    views, _ = make_views(make_plan(layers, layout=layout), layout)
    strides = dict(zip("BHNC", views.layers[0][0].stride(), strict=True))
    strides["L"] = (views.layers[1][0].data_ptr() - views.layers[0][0].data_ptr()) // 2
    assert sorted(strides, key=lambda axis: -strides[axis]) == list(layout)


def test_shapes_are_what_kernels_take() -> None:
    plan = make_plan([FULL, WIDE, LATENT, MAMBA, RING], Planner.SLAB)
    views, _ = make_views(plan)
    shapes = [[tuple(tensor.shape[1:]) for tensor in views.layers[layer_id]] for layer_id in range(5)]
    assert shapes == [[(2, 4, 8)], [(1, 4, 24)], [(4, 24)], [(3, 4), (2, 8, 4)], [(96,)]]
    assert [tensor.dtype for tensor in views.layers[3]] == [torch.float16, torch.float32]
    assert plan.slab is not None
    for index, group in enumerate(plan.groups):
        assert views.layers[group.layer_ids[0]][0].shape[0] == 1 + plan.slab.num_pages(index)


def test_record_of_mixed_types_is_seen_as_bytes() -> None:
    content = LatentContent(latent_dim=576, dtype_bytes=1, is_fp8_ds_mla=True)
    views, _ = make_views(make_plan([AttentionSpec(block_size=1, content=content)], layout="BLHNC"))
    assert (views.layers[0][0].dtype, views.layers[0][0].shape[1:]) == (torch.uint8, (1, FP8_DS_MLA_TOKEN_BYTES))


def test_fp8_keys_of_an_indexer_lie_beside_latents_of_another_type() -> None:
    index_keys = AttentionSpec(block_size=4, content=LatentContent(latent_dim=132, dtype_bytes=1))
    views, _ = make_views(make_plan([LATENT, index_keys]))
    assert [views.layers[i][0].dtype for i in (0, 1)] == [torch.float16, torch.uint8]
    assert views.layers[1][0].shape[1:] == (4, 132)


def test_padded_pages_keep_their_content_at_the_front() -> None:
    padded = dataclasses.replace(MAMBA, page_size_padded=512)
    plan = make_plan([padded, padded])
    views, memory = make_views(plan)
    assert views.layers[1][0][3].data_ptr() - memory.data_ptr() == 3 * 1024 + 512


def test_views_write_into_the_memory_they_were_given() -> None:
    plan = make_plan([FULL])
    memory = torch.zeros(plan.pool_bytes + 64, dtype=torch.uint8)[64:]
    views = PageViews(plan, memory, layout="BLHNC", dtypes=DTYPES)
    views.layers[0][0][1] = 1.0
    assert memory.view(torch.float16).sum() == KV.num_kv_heads * FULL.block_size * 8


@pytest.mark.parametrize(("planner", "layout", "name"), CASES)
def test_copied_block_is_the_source_in_all_layers_and_no_other_changes(
    planner: Planner, layout: str, name: str
) -> None:
    plan = make_plan((MIXES | PACKED)[name], planner, layout)
    views, memory = make_views(plan, layout)
    memory[:] = torch.randint(0, 120, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = {i: [tensor.clone() for tensor in tensors] for i, tensors in views.layers.items()}
    for group, held in enumerate(plan.groups):
        source, destination, other = blocks_of(plan, group)[:3]
        views.copy_blocks(group, np.array([[source, destination]], np.int32))
        for layer_id in held.layer_ids:
            for tensor, old in zip(views.layers[layer_id], before[layer_id], strict=True):
                assert torch.equal(tensor[destination], old[source])
                assert torch.equal(tensor[source], old[source])
                assert torch.equal(tensor[other], old[other])


@pytest.mark.parametrize(("planner", "layout", "name"), CASES)
def test_cleared_block_is_zero_in_all_layers_and_no_other_is(planner: Planner, layout: str, name: str) -> None:
    plan = make_plan((MIXES | PACKED)[name], planner, layout)
    views, memory = make_views(plan, layout)
    memory[:] = 1
    for group, held in enumerate(plan.groups):
        cleared, kept = blocks_of(plan, group)[:2]
        views.zero_blocks(group, np.array([cleared], np.int32))
        for layer_id in held.layer_ids:
            assert all(not tensor[cleared].any() for tensor in views.layers[layer_id])
            assert all(tensor[kept].all() for tensor in views.layers[layer_id])


def test_nothing_to_copy_or_clear_changes_nothing() -> None:
    views, memory = make_views(make_plan([FULL]))
    memory[:] = 7
    views.copy_blocks(0, np.empty((0, 2), np.int32))
    views.zero_blocks(0, np.empty(0, np.int32))
    assert (memory == 7).all()


def test_memory_that_is_too_small_is_refused() -> None:
    plan = make_plan([FULL])
    with pytest.raises(ValueError, match=f"the plan needs {plan.pool_bytes} bytes"):
        PageViews(plan, torch.zeros(plan.pool_bytes - 1, dtype=torch.uint8), layout="BLHNC", dtypes=DTYPES)


@pytest.mark.parametrize(
    ("layer", "dtypes", "message"),
    [
        (FULL, PageDTypes(kv=torch.float32), "torch.float32 has 4 bytes, the plan was made for 2"),
        (MAMBA, PageDTypes(kv=torch.float16, states=(torch.float16,)), "1 element types for 2 state tensors"),
        (MAMBA, PageDTypes(kv=torch.float16, states=(torch.float32,) * 2), "torch.float32 has 4 bytes"),
        (dataclasses.replace(MAMBA, shapes=((3, 1), (2, 8, 4))), DTYPES, "make pages a multiple of 4 bytes"),
    ],
)
def test_element_types_that_do_not_fit_are_refused(layer: LayerSpec, dtypes: PageDTypes, message: str) -> None:
    plan = make_plan([layer])
    with pytest.raises(ValueError, match=message):
        PageViews(plan, torch.zeros(plan.pool_bytes, dtype=torch.uint8), layout="BLHNC", dtypes=dtypes)
