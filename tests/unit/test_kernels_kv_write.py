"""The KV write kernel against its oracle, over every page layout."""

import pytest
import torch
from support.paged import DEVICE, LAYOUTS, make_pool

from blockferry.kernels.kv_write import kv_write, kv_write_torch

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [(3, 64, torch.bfloat16), (2, 80, torch.float16), (1, 256, torch.float32), (40, 128, torch.float32)],
)
def test_write_equals_the_oracle_and_touches_nothing_else(layout, num_heads, head_dim, dtype):
    torch.manual_seed(0)
    pool = make_pool(layout, num_blocks=5, num_heads=num_heads, head_dim=head_dim, dtype=dtype)
    expected = pool.clone()
    fused = torch.randn(4, 3 * num_heads * head_dim).to(dtype).to(DEVICE)
    _, k, v = fused.view(4, 3, num_heads, head_dim).unbind(1)  # strided, as the projection's slices are
    slots = torch.tensor([19, -1, 64, 0], device=DEVICE)

    kv_write(k, v, kv_cache=pool[:, 1], slot_mapping_T=slots)

    kv_write_torch(k, v, kv_cache=expected[:, 1], slot_mapping_T=slots)
    assert torch.equal(pool, expected)


def test_values_are_cast_to_the_dtype_of_the_cache():
    pool = make_pool("BHLNC", num_blocks=2, num_heads=1, head_dim=16, dtype=torch.float16, fill=0.0)
    k = torch.randn(1, 1, 16, device=DEVICE)
    kv_write(k, -k, kv_cache=pool[:, 0], slot_mapping_T=torch.tensor([17], device=DEVICE))
    assert torch.equal(pool[1, 0, 0, 1], torch.cat((k, -k), -1)[0, 0].half())


def test_tokens_without_a_slot_are_not_written():
    pool = make_pool("BHLNC", num_blocks=2, num_heads=1, head_dim=16, dtype=torch.float32, fill=0.0)
    k = torch.ones(3, 1, 16, device=DEVICE)
    kv_write(k, k, kv_cache=pool[:, 0], slot_mapping_T=torch.tensor([4], device=DEVICE))
    assert pool.count_nonzero() == 32


def test_a_cache_of_another_head_count_is_refused_by_shape():
    pool = make_pool("BHLNC", num_blocks=2, num_heads=2, head_dim=16, dtype=torch.float32)
    k = torch.ones(1, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"kv_cache has shape \[2, 2, 16, 32\], the kernel needs \[any, 1, any, 32\]"):
        kv_write(k, k, kv_cache=pool[:, 0], slot_mapping_T=torch.tensor([0], device=DEVICE))
