"""Jitted CPU kernels against their torch oracles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from blockferry.engine.models.cpu_linear import CpuLinear, can_tile
from blockferry.engine.models.cpu_ops import CpuOps
from blockferry.engine.models.ops import TorchOps
from blockferry.kernels.cpu_amx import has_amx
from blockferry.kernels.cpu_kv_write import KvWrite, kv_write_oracle
from blockferry.kernels.cpu_launch import KernelStore, Launcher
from blockferry.kernels.cpu_linear import linear_oracle
from blockferry.kernels.cpu_rms_norm import rms_norm_oracle
from blockferry.kernels.cpu_rotary import rotate_oracle
from blockferry.kernels.cpu_silu_mul import silu_mul_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def ops():
    return CpuOps()


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 576), (3, 16), (2, 100), (300, 64)])
def test_add_rms_norm_matches_its_oracle(ops, dtype, num_tokens, width):
    x, residual = random(num_tokens, width, dtype=dtype), random(num_tokens, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    total = x + residual
    normed, new_residual = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert_close(normed, rms_norm_oracle(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_norm_leaves_x_as_the_residual(ops, dtype):
    x, weight = random(5, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    before = x.clone()
    normed, residual = ops.add_rms_norm(x, None, weight, 1e-6)
    assert torch.equal(residual, before)
    assert_close(normed, rms_norm_oracle(before, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_rms_norm_of_heads_matches_its_oracle_inside_a_wider_tensor(ops, dtype, head_dim):
    qkv, weight = random(4, 7, head_dim, dtype=dtype), random(head_dim, dtype=dtype, seed=1)
    expected = rms_norm_oracle(qkv[:, 2:5].clone(), weight, 1e-6)
    rest = qkv[:, 5:].clone()
    assert_close(ops.rms_norm_heads(qkv[:, 2:5], weight, 1e-6), expected)
    assert torch.equal(qkv[:, 5:], rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1536), (5, 16), (2, 20), (200, 48)])
def test_silu_and_mul_matches_its_oracle(ops, dtype, num_tokens, width):
    x = random(num_tokens, 2 * width, dtype=dtype, scale=8.0)
    assert_close(ops.silu_and_mul(x), silu_mul_oracle(x))


def test_silu_of_extremes_is_exact_and_nan_stays_nan(ops):
    gate = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4, torch.inf, torch.nan] * 2)
    actual = ops.silu_and_mul(torch.cat((gate, torch.ones(16)))[None])
    expected = silu_mul_oracle(torch.cat((gate, torch.ones(16)))[None])
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 1)])
def test_rotate_matches_its_oracle_inside_one_qkv_tensor(ops, dtype, head_dim, num_heads, num_kv_heads):
    qkv = random(6, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    expected = qkv.clone()
    angles = random(50, head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([49, 0, 3, 3, 17, 1])
    heads = (num_heads, num_kv_heads, num_kv_heads)
    rotate_oracle(*expected.split(heads, dim=1)[:2], cos_sin, positions)
    ops.rotate(*qkv.split(heads, dim=1)[:2], cos_sin, positions)
    assert_close(qkv, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 32, 40])
def test_rotate_with_a_narrower_table_leaves_the_rest_of_each_head_alone(ops, dtype, width):
    qkv = random(6, 8, 64, dtype=dtype)
    expected = qkv.clone()
    angles = random(50, width // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([49, 0, 3, 3, 17, 1])
    rotate_oracle(*expected.split((4, 2, 2), dim=1)[:2], cos_sin, positions)

    ops.rotate(*qkv.split((4, 2, 2), dim=1)[:2], cos_sin, positions)

    assert_close(qkv, expected)
    assert torch.equal(qkv[..., width:], expected[..., width:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_kv_write_matches_its_oracle_and_skips_padding(tmp_path_factory, dtype, head_dim):
    write = KvWrite(Launcher(KernelStore(tmp_path_factory.getbasetemp() / "kernels")))
    qkv = random(40, 9, head_dim, dtype=dtype)
    slots = torch.randperm(7 * 16, generator=torch.Generator().manual_seed(0))[:40]
    slots[5] = -1
    pool, expected = (torch.zeros(7, 3, 16, 2 * head_dim, dtype=dtype).transpose(1, 2).contiguous() for _ in range(2))
    write(qkv[:, 3:6], qkv[:, 6:], pool.transpose(1, 2), slots)
    kv_write_oracle(qkv[:, 3:6], qkv[:, 6:], expected.transpose(1, 2), slots)
    assert torch.equal(pool, expected)


def test_kernels_agree_with_the_torch_ops_of_the_model(ops):
    x, residual, weight = random(4, 64), random(4, 64, seed=1), random(64, seed=2)
    expected = TorchOps().add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    for ours, theirs in zip(ops.add_rms_norm(x, residual, weight, 1e-5), expected):
        assert_close(ours, theirs)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_do_not_depend_on_other_rows_or_threads(ops, num_threads):
    x = random(700, 2 * 128, dtype=torch.bfloat16)
    alone = [ops.silu_and_mul(x[row : row + 1]) for row in (0, 350, 699)]
    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = ops.silu_and_mul(x)
    finally:
        torch.set_num_threads(previous)
    assert torch.equal(torch.cat(alone), together[[0, 350, 699]])


@pytest.mark.skipif(not has_amx(), reason="needs AMX")
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 32), (576, 288), (96, 544)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tiled_linear_matches_its_oracle_and_rows_do_not_depend_on_others(num_inputs, num_outputs, has_bias):
    weight = random(num_outputs, num_inputs, dtype=torch.bfloat16, scale=num_inputs**-0.5)
    bias = random(num_outputs, dtype=torch.bfloat16, seed=1) if has_bias else None
    linear = CpuLinear(weight, bias)
    x = random(150, num_inputs, dtype=torch.bfloat16, seed=2)
    together = linear(x)
    assert_close(together, linear_oracle(x, weight, bias))
    for num_rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 97, 129):
        assert torch.equal(linear(x[:num_rows]), together[:num_rows]), num_rows


@pytest.mark.skipif(not has_amx(), reason="needs AMX")
def test_tiled_linear_reads_rows_of_any_stride():
    linear = CpuLinear(random(32, 64, dtype=torch.bfloat16), None)
    wide = random(5, 200, dtype=torch.bfloat16)
    for x in (wide[:, 7:71], wide[:, 0:128:2]):
        assert torch.equal(linear(x), linear(x.contiguous()))


def test_weights_that_do_not_fill_tiles_are_refused():
    assert not can_tile(torch.zeros(48, 64, dtype=torch.bfloat16))
    assert not can_tile(torch.zeros(64, 48, dtype=torch.bfloat16))
    assert not can_tile(torch.zeros(64, 64))


READ_BACK = """
import sys, pathlib, torch
from blockferry.kernels.cpu_amx import has_amx
from blockferry.kernels.cpu_kv_write import KvWrite
from blockferry.kernels.cpu_launch import KernelStore, Launcher
store = KernelStore(pathlib.Path(sys.argv[1]))
store.get("kv_write", lambda: sys.exit("compiled again"))
pool, k = torch.zeros(2, 1, 4, 32), torch.ones(1, 1, 16)
KvWrite(Launcher(store))(k, k, pool, torch.tensor([5]))
print(int(pool[1, 0, 1].sum()))
"""


def test_another_process_reads_compiled_kernels_back_without_compiling(tmp_path):
    KvWrite(Launcher(KernelStore(tmp_path))).prepare()
    command = [sys.executable, "-c", READ_BACK, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "32"), result.stderr


def test_compiled_kernels_are_read_back_from_the_folder(tmp_path):
    def fail():
        raise AssertionError("compiled twice")

    write = KvWrite(Launcher(KernelStore(tmp_path)))
    write.prepare()
    kernel = KernelStore(tmp_path).get("kv_write", fail)
    pool, k = torch.zeros(2, 1, 4, 32), torch.ones(1, 1, 16)
    reader = KvWrite(Launcher(KernelStore(tmp_path)))
    reader(k, k * 2, pool, torch.tensor([5]))
    assert kernel.address
    assert pool[1, 0, 1].sum() == 16 + 32
    assert pool.sum() == 16 + 32
