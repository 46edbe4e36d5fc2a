"""The block copy and block zero kernels against their oracles."""

import pytest
import torch
from support.paged import DEVICE, LAYOUTS, make_pool

from blockferry.kernels.block_copy import block_copy, block_copy_torch, block_zero, block_zero_torch

pytestmark = pytest.mark.triton

SHAPES = [(3, 16, 64, torch.bfloat16), (2, 12, 80, torch.float16), (1, 32, 256, torch.float32)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_heads", "block_size", "head_dim", "dtype"), SHAPES)
def test_copy_moves_whole_blocks_of_every_layer(layout, num_heads, block_size, head_dim, dtype):
    torch.manual_seed(0)
    pool = make_pool(layout, num_blocks=6, num_heads=num_heads, block_size=block_size, head_dim=head_dim, dtype=dtype)
    expected = pool.clone()
    pairs = torch.tensor([[1, 4], [-1, 2], [3, 5]], dtype=torch.int32, device=DEVICE)
    block_copy(pool, pairs)
    block_copy_torch(expected, pairs)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_heads", "block_size", "head_dim", "dtype"), SHAPES)
def test_zero_clears_whole_blocks_of_every_layer(layout, num_heads, block_size, head_dim, dtype):
    torch.manual_seed(0)
    pool = make_pool(layout, num_blocks=4, num_heads=num_heads, block_size=block_size, head_dim=head_dim, dtype=dtype)
    expected = pool.clone()
    block_ids = torch.tensor([3, -1, 1], dtype=torch.int32, device=DEVICE)
    block_zero(pool, block_ids)
    block_zero_torch(expected, block_ids)
    assert torch.equal(pool, expected)


def test_nothing_to_copy_or_clear_changes_nothing():
    pool = make_pool("BHLNC", num_blocks=2, num_heads=1, head_dim=16, dtype=torch.float32, fill=1.0)
    block_copy(pool, torch.empty(0, 2, dtype=torch.int32, device=DEVICE))
    block_zero(pool, torch.empty(0, dtype=torch.int32, device=DEVICE))
    assert bool((pool == 1).all())


def test_a_pool_without_a_layer_axis_is_refused():
    pool = make_pool("BHLNC", num_blocks=2, num_heads=1, head_dim=16, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"pool has shape \[2, 1, 16, 32\], the kernel needs \[any, any, any, any, any\]"
    ):
        block_zero(pool[:, 0], torch.tensor([1], dtype=torch.int32, device=DEVICE))
