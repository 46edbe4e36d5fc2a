"""Whole blocks as rows of bytes: gathered, scattered, copied and zeroed as the oracles do it, at any alignment."""

import numpy as np
import pytest
import torch
from support.paged import DEVICE

from blockferry.engine.config import Device
from blockferry.engine.kv.plan import Planner, PlanRequest
from blockferry.engine.kv.planners import plan_with
from blockferry.engine.kv.reach import KVContent, LatentContent, SequenceLimits
from blockferry.engine.kv.spec import AttentionSpec, MambaSpec
from blockferry.engine.worker.backends import block_ops
from blockferry.engine.worker.page_views import TORCH_BLOCKS, PageDTypes, PageViews
from blockferry.kernels import block_pack
from blockferry.kernels.block_pack import (
    block_copy,
    block_copy_torch,
    block_gather,
    block_gather_torch,
    block_scatter,
    block_scatter_torch,
    block_zero,
    block_zero_torch,
)

pytestmark = pytest.mark.triton

NUM_BLOCKS = 7
ROWS = [  # (bytes of a row, bytes between rows, where the first begins): accesses of 16, 8, 4, 2 and 1 bytes
    (4096, 4096, 0),
    (20_000, 20_016, 32),  # more than one tile
    (4112, 8192, 16),
    (1000, 1032, 8),
    (528, 1056, 4),
    (5000, 5002, 2),
    (1031, 1031, 0),  # odd, and more than one tile of bytes
    (64, 80, 1),
    (1, 1, 0),
]


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def make_pages(num_bytes, stride, start):
    """(pages [B, Y], all the memory that they lie in)."""
    memory = random_bytes(start + NUM_BLOCKS * stride)
    return memory.as_strided((NUM_BLOCKS, num_bytes), (stride, 1), start), memory


def ids(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("row", ROWS)
def test_gather_reads_the_named_blocks_and_leaves_rows_of_negative_ids(row, dtype):
    pages, _ = make_pages(*row)
    out = torch.zeros(5, row[0], dtype=torch.uint8, device=DEVICE)
    expected = out.clone()
    block_ids = ids([6, 0, -1, 3, 6], dtype)
    block_gather(pages, block_ids, out)
    block_gather_torch(pages, block_ids, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("row", ROWS)
def test_scatter_writes_the_named_blocks_and_no_byte_between_them(row, dtype):
    pages, memory = make_pages(*row)
    expected, expected_memory = make_pages(*row)
    packed, block_ids = random_bytes(4, row[0]), ids([5, -1, 0, 2], dtype)
    block_scatter(packed, block_ids, pages)
    block_scatter_torch(packed, block_ids, expected)
    assert torch.equal(memory, expected_memory)


@pytest.mark.parametrize("row", ROWS)
def test_copy_moves_whole_blocks_and_no_byte_between_them(row):
    pages, memory = make_pages(*row)
    expected, expected_memory = make_pages(*row)
    pairs = ids([[1, 4], [-1, 2], [3, 5], [1, 6], [0, -1]])
    block_copy(pages, pairs)
    block_copy_torch(expected, pairs)
    assert torch.equal(memory, expected_memory)


@pytest.mark.parametrize("row", ROWS)
def test_zero_clears_whole_blocks_and_no_byte_between_them(row):
    pages, memory = make_pages(*row)
    expected, expected_memory = make_pages(*row)
    block_ids = ids([3, -1, 6])
    block_zero(pages, block_ids)
    block_zero_torch(expected, block_ids)
    assert torch.equal(memory, expected_memory)


def test_what_was_gathered_scatters_back_to_other_blocks():
    pages, _ = make_pages(1000, 1032, 8)
    packed = torch.empty(2, 1000, dtype=torch.uint8, device=DEVICE)
    block_gather(pages, ids([1, 2]), packed)
    block_scatter(packed, ids([5, 4]), pages)
    assert torch.equal(pages[ids([5, 4])], pages[ids([1, 2])])


def test_a_buffer_may_be_aligned_worse_than_the_pages():
    pages, _ = make_pages(4096, 4096, 0)
    out = torch.zeros(2 * 4099 + 1, dtype=torch.uint8, device=DEVICE).as_strided((2, 4096), (4099, 1), 1)
    block_gather(pages, ids([2, 5]), out)
    assert torch.equal(out, pages[ids([2, 5])])


def test_few_programs_loop_over_a_long_row(monkeypatch):
    monkeypatch.setattr(block_pack, "MAX_ROW_PROGRAMS", 2)
    pages, memory = make_pages(50_000, 50_016, 0)  # seven tiles
    out = torch.zeros(1, 50_000, dtype=torch.uint8, device=DEVICE)
    block_gather(pages, ids([3]), out)
    assert torch.equal(out[0], pages[3])
    block_zero(pages, ids([3]))
    assert not pages[3].any()
    assert memory[3 * 50_016 + 50_000 : 4 * 50_016].any()


def test_nothing_to_move_changes_nothing():
    pages, memory = make_pages(64, 64, 0)
    before, none = memory.clone(), ids([])
    block_gather(pages, none, pages[:0].clone())
    block_scatter(pages[:0].clone(), none, pages)
    block_copy(pages, none.view(0, 2))
    block_zero(pages, none)
    assert torch.equal(memory, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda pages: block_gather(pages, ids([1]), pages[:1, :8]),
            r"out has shape \[1, 8\], the kernel needs \[1, ",
        ),
        (lambda pages: block_scatter(pages[:2], ids([1]), pages), r"packed has shape \[2, 64\]"),
        (lambda pages: block_zero(pages.view(torch.int32), ids([1])), "pages is torch.int32, the kernel takes torch.u"),
        (lambda pages: block_copy(pages, ids([1])), r"pairs has shape \[1\], the kernel needs \[any, 2\]"),
        (lambda pages: block_zero(pages, ids([1.0], torch.float32)), "block_ids is torch.float32"),
        (lambda pages: block_zero(pages.t(), ids([1])), "pages has stride 64 on its last dim"),
    ],
)
def test_other_shapes_dtypes_and_strides_are_refused(call, message):
    pages, _ = make_pages(64, 64, 0)
    with pytest.raises(ValueError, match=message):
        call(pages)


def make_views(layout, planner, ops):
    """Views of a pool of random bytes for a plan of keys and values, latents and states, and the pool."""
    kv = AttentionSpec(block_size=4, content=KVContent(num_kv_heads=2, head_dim=4, dtype_bytes=2))
    latent = AttentionSpec(block_size=4, content=LatentContent(latent_dim=24, dtype_bytes=2))
    state = MambaSpec(block_size=4, shapes=((3, 4), (2, 8, 4)), dtype_bytes=(2, 4))
    limits = SequenceLimits(max_model_len=64, max_in_flight_tokens=16)
    layers = (kv, latent, state, kv) if layout == "BLHNC" else (kv, kv)
    request = PlanRequest(layers=layers, limits=limits, memory_bytes=1 << 14, layout=layout)
    plan = plan_with(planner, request)
    memory = random_bytes(plan.pool_bytes)
    dtypes = PageDTypes(kv=torch.float16, states=(torch.float16, torch.float32))
    return PageViews(plan, memory, layout=layout, dtypes=dtypes, block_ops=ops), memory, len(plan.groups)


@pytest.mark.parametrize(
    ("layout", "planner"), [("BLHNC", Planner.UNIFORM), ("BLHNC", Planner.SLAB), ("LBHNC", Planner.UNIFORM)]
)
def test_a_gpus_blocks_move_within_a_pool_as_a_cpus_do(layout, planner):
    views, memory, num_groups = make_views(layout, planner, block_ops(Device.CUDA))
    torch_views, torch_memory, _ = make_views(layout, planner, TORCH_BLOCKS)
    for group in range(num_groups):
        for one in (views, torch_views):
            one.copy_blocks(group, np.array([[1, 2]], np.int32))
            one.zero_blocks(group, np.array([3], np.int32))
    assert torch.equal(memory, torch_memory)
