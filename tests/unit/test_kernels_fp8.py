"""The Triton kernels over fp8 caches against their oracles; Triton's interpreter converts fp8 to float32 only."""

import pytest
import torch
from support.paged import DEVICE, LAYOUTS, RULES, make_rule, make_table

from blockferry.kernels.fp8 import FP8, CacheScales, check_cache
from blockferry.kernels.kv_write import kv_write, kv_write_torch
from blockferry.kernels.latent_decode import latent_decode, latent_decode_torch
from blockferry.kernels.latent_prefill import latent_prefill, latent_prefill_torch
from blockferry.kernels.paged_decode import paged_decode, paged_decode_torch
from blockferry.kernels.paged_prefill import paged_prefill, paged_prefill_torch

pytestmark = pytest.mark.triton

SCALES = CacheScales(k_K=torch.tensor([0.03, 0.5], device=DEVICE), v_K=torch.tensor([0.011, 0.25], device=DEVICE))
ONE = CacheScales(k_K=torch.tensor([0.07], device=DEVICE), v_K=torch.tensor([0.07], device=DEVICE))
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def make_pages(*shape):
    return torch.randn(shape).mul(20).to(FP8).to(DEVICE)


def as_bytes(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_stores_the_bytes_that_torch_rounds_to(dtype):
    torch.manual_seed(0)
    k = (torch.randn(40, KV_HEADS, HEAD_DIM) * torch.logspace(-4, 3, 40)[:, None, None]).to(dtype).to(DEVICE)
    pages = make_pages(4, KV_HEADS, 16, 2 * HEAD_DIM)
    expected, slots = pages.clone(), torch.randperm(64, device=DEVICE)[:40]
    slots[3] = -1
    kv_write(k, -k, kv_cache=pages, slot_mapping_T=slots, scales=SCALES)
    kv_write_torch(k, -k, kv_cache=expected, slot_mapping_T=slots, scales=SCALES)
    assert torch.equal(as_bytes(pages), as_bytes(expected))


def test_write_rounds_every_exponent_and_halfway_case_alike():
    patterns = torch.arange(114 << 7, 137 << 7, dtype=torch.int32)  # bfloat16 from 2^-13 on; e4m3 has 2^-9 to 448
    patterns[:2] = torch.tensor([0, 0x7F80])  # zero and infinity
    k = (patterns << 16).view(torch.float32).view(-1, 1, 32).to(DEVICE)
    one = CacheScales(k_K=torch.ones(1, device=DEVICE), v_K=torch.ones(1, device=DEVICE))
    pages = torch.zeros(-(-len(k) // 16), 1, 16, 64, dtype=torch.uint8, device=DEVICE).view(FP8)
    expected, slots = pages.clone(), torch.arange(len(k), device=DEVICE)
    kv_write(k, -k, kv_cache=pages, slot_mapping_T=slots, scales=one)
    kv_write_torch(k, -k, kv_cache=expected, slot_mapping_T=slots, scales=one)
    assert torch.equal(as_bytes(pages), as_bytes(expected))


@pytest.mark.parametrize("terms", [(None, None, None, False), RULES[1], RULES[6], RULES[10]])
def test_decode_equals_the_oracle(terms):
    torch.manual_seed(0)
    seq_lens = [300, 1, 40]
    rule = make_rule(*terms, num_heads=HEADS)
    paged = {
        "kv_cache": make_pages(30, KV_HEADS, 16, 2 * HEAD_DIM),
        "block_table_RM": make_table(seq_lens, num_blocks=30),
        "seq_lens_R": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        "rule": type(rule)(scale=0.1, window=rule.window, soft_cap=rule.soft_cap, sinks_H=rule.sinks_H, scales=SCALES),
    }
    q = torch.randn(3, HEADS, HEAD_DIM, device=DEVICE)
    out = paged_decode(q, total_seq_len=341, max_seq_len=300, out_RHD=torch.empty_like(q), **paged)
    torch.testing.assert_close(out, paged_decode_torch(q, **paged), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_prefill_equals_the_oracle(layout):
    torch.manual_seed(0)
    pages = make_pages(20, KV_HEADS, 16, 2 * HEAD_DIM)
    if layout == "BLHNC":
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    rule = make_rule(37, None, 3.0, True, num_heads=HEADS)
    paged = {
        "kv_cache": pages,
        "block_table_RM": make_table([60, 33], num_blocks=20),
        "query_start_R1": torch.tensor([0, 20, 53], dtype=torch.int32, device=DEVICE),
        "seq_lens_R": torch.tensor([60, 33], dtype=torch.int32, device=DEVICE),
        "rule": type(rule)(scale=0.1, window=37, soft_cap=3.0, sinks_H=rule.sinks_H, scales=SCALES),
    }
    q = torch.randn(53, HEADS, HEAD_DIM, device=DEVICE)
    out = paged_prefill(q, num_tokens=53, out_THD=torch.zeros_like(q), **paged)
    torch.testing.assert_close(out, paged_prefill_torch(q, **paged), rtol=2e-5, atol=2e-5)


def test_latent_decode_and_prefill_equal_their_oracles():
    torch.manual_seed(0)
    pages = make_pages(20, 16, 40)
    rows = {
        "block_table_RM": make_table([60, 33], num_blocks=20),
        "seq_lens_R": torch.tensor([60, 33], dtype=torch.int32, device=DEVICE),
        "scale": 0.1,
        "window": None,
    }
    whole = pages.float() * ONE.k_K
    q = torch.randn(53, HEADS, 40, device=DEVICE)
    out = q.new_zeros(53, HEADS, 32)
    latent_decode(q[:2], kv_cache=pages, total_seq_len=93, max_seq_len=60, out_RHV=out[:2], scales=ONE, **rows)
    expected = latent_decode_torch(q[:2], kv_cache=whole, value_dim=32, **rows)
    torch.testing.assert_close(out[:2], expected, rtol=2e-5, atol=2e-5)
    starts = {"query_start_R1": torch.tensor([0, 20, 53], dtype=torch.int32, device=DEVICE)}
    latent_prefill(q, kv_cache=pages, num_tokens=53, out_THV=out, scales=ONE, **rows, **starts)
    expected = latent_prefill_torch(q, kv_cache=whole, value_dim=32, **rows, **starts)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


def test_fp8_pages_without_scales_are_refused():
    with pytest.raises(ValueError, match=r"kv_cache is torch\.float8_e4m3fn"):
        check_cache(make_pages(1, 1, 16, 8), None, shape=(None, 1, None, 8), dtypes=(torch.float32,))


def test_scales_of_another_number_of_heads_are_refused():
    with pytest.raises(ValueError, match=r"k scales has shape \[2\]"):
        check_cache(make_pages(1, 1, 16, 8), SCALES, shape=(None, 1, None, 8), dtypes=(torch.float32,))
