"""Norm, activation and rotary kernels against their oracles, and TritonOps against TorchOps."""

import pytest
import torch
from support.paged import DEVICE

from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.triton_ops import TritonOps
from blockferry.kernels import rms_norm, rotary, silu_mul

pytestmark = pytest.mark.triton

# The interpreter truncates to bfloat16 where GPUs round.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def _randn(*shape, dtype):
    return torch.randn(shape).to(dtype).to(DEVICE)


def _close(actual, expected):
    """Within one rounding of the dtype."""
    assert actual.dtype == expected.dtype
    rtol = 1e-5 if actual.dtype is torch.float32 else 2 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [64, 576, 1000])
def test_rms_norm_equals_the_oracle(hidden_size, dtype):
    torch.manual_seed(0)
    x, weight = _randn(3, 2 * hidden_size, dtype=dtype)[:, :hidden_size], _randn(hidden_size, dtype=dtype)
    _close(rms_norm.rms_norm(x, weight, 1e-5), rms_norm.rms_norm_torch(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_in_place_before_the_norm(dtype):
    torch.manual_seed(0)
    x, residual, weight = _randn(3, 576, dtype=dtype), _randn(3, 576, dtype=dtype), _randn(576, dtype=dtype)
    expected_residual = residual.clone()
    expected = rms_norm.add_rms_norm_torch(x, expected_residual, weight, 1e-5)
    _close(rms_norm.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(9, 64), (5, 80), (3, 256)])
def test_every_head_is_normed_on_its_own(num_heads, head_dim, dtype):
    torch.manual_seed(0)
    x = _randn(4, num_heads + 3, head_dim, dtype=dtype)[:, :num_heads]
    weight = _randn(head_dim, dtype=dtype)
    _close(rms_norm.rms_norm_heads(x, weight, 1e-6), rms_norm.rms_norm_torch(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1536])
def test_silu_mul_equals_the_oracle(size, dtype):
    torch.manual_seed(0)
    x = _randn(3, 2 * size, dtype=dtype)
    _close(silu_mul.silu_mul(x), silu_mul.silu_mul_torch(x))


def test_a_projection_of_odd_width_is_refused():
    with pytest.raises(ValueError, match="x has width 3; it must be twice the intermediate size"):
        silu_mul.silu_mul(_randn(1, 3, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "width"),
    [(9, 3, 64, 64), (4, 1, 80, 80), (2, 2, 64, 32), (70, 2, 128, 128)],
)
def test_rotation_in_place_equals_the_oracle(num_heads, num_kv_heads, head_dim, width, dtype):
    torch.manual_seed(0)
    fused = _randn(3, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    expected = fused.clone()
    table = torch.randn(50, width, device=DEVICE)
    positions = torch.tensor([0, 49, 7], device=DEVICE)
    heads = slice(0, num_heads), slice(num_heads, num_heads + num_kv_heads)

    rotary.rotate(fused[:, heads[0]], fused[:, heads[1]], cos_sin=table, positions_T=positions)

    rotary.rotate_torch(expected[:, heads[0]], expected[:, heads[1]], cos_sin=table, positions_T=positions)
    _close(fused, expected)


@pytest.mark.parametrize("width", [63, 128])
def test_a_table_wider_than_the_head_or_odd_is_refused(width):
    q = _randn(1, 1, 64, dtype=torch.float32)
    positions = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=f"cos_sin has width {width}; it must be even and at most head_dim=64"):
        rotary.rotate(q, q, cos_sin=torch.zeros(2, width, device=DEVICE), positions_T=positions)


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_ops_equal_torch_ops(dtype):
    torch.manual_seed(0)
    x, weight = _randn(2, 64, dtype=dtype), _randn(64, dtype=dtype)
    ours, theirs = TritonOps(), TorchOps()
    first, residual = ours.add_rms_norm(x.clone(), None, weight, 1e-5)
    expected_first, expected_residual = theirs.add_rms_norm(x.clone(), None, weight, 1e-5)
    second, residual = ours.add_rms_norm(first, residual, weight, 1e-5)
    expected_second, expected_residual = theirs.add_rms_norm(expected_first, expected_residual, weight, 1e-5)
    _close(second, expected_second)
    _close(residual, expected_residual)
    _close(ours.silu_and_mul(x), theirs.silu_and_mul(x))
    heads = x.view(2, 2, 32)
    _close(ours.rms_norm_heads(heads, weight[:32], 1e-5), theirs.rms_norm_heads(heads.clone(), weight[:32], 1e-5))
    table, positions = torch.randn(9, 32, device=DEVICE), torch.tensor([8, 2], device=DEVICE)
    mine, other = heads.clone(), heads.clone()
    ours.rotate(mine, mine[:, :1].clone(), table, positions)
    theirs.rotate(other, other[:, :1].clone(), table, positions)
    _close(mine, other)
