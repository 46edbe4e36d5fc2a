"""Attention over fp8 caches on the CPU, against whole pages of what torch makes of float8_e4m3fn."""

import dataclasses

import pytest
import torch
from support.paged import RULES, drop_unreached, make_metadata, make_rule, make_table

from blockferry.engine.attention import fp8 as module
from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.attention.fp8 import ScaledAttention, ScaledLatentAttention
from blockferry.engine.attention.latent import TorchLatentAttention
from blockferry.engine.attention.reference import ReferenceAttention
from blockferry.kernels.fp8 import FP8, CacheScales, dequantise_kv, quantise

HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS = 4, 2, 32, 24
SCALES = CacheScales(k_K=torch.tensor([0.03, 0.5]), v_K=torch.tensor([0.011, 0.25]))
STEPS = [([1, 1, 7, 40], [20, 1, 30, 70]), ([1, 1], [33, 5]), ([12], [12])]


def make_step(query_lens, seq_lens, rule, *, dtype=torch.float32):
    """(q, k, v, fp8 pages, metadata); pages are NaN wherever nothing in reach is stored."""
    torch.manual_seed(0)
    table = make_table(seq_lens, num_blocks=NUM_BLOCKS)
    whole = torch.randn(NUM_BLOCKS, KV_HEADS, 16, 2 * HEAD_DIM)
    drop_unreached(whole, table, query_lens, seq_lens, rule)
    pages = whole.mul(20).to(FP8)
    num_tokens = sum(query_lens)
    q, k, v = (torch.randn(num_tokens, heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v, pages, make_metadata(query_lens, seq_lens, table)


def scaled(rule: AttentionRule) -> AttentionRule:
    return dataclasses.replace(rule, scales=SCALES)


def by_reference(q, k, v, pages, metadata, rule):
    """Pages of the model's dtype, and keys and values rounded through torch's fp8."""
    whole = pages.float() * torch.cat(
        [scale[:, None, None].expand(-1, 1, HEAD_DIM) for scale in (SCALES.k_K, SCALES.v_K)], dim=-1
    )
    k, v = (
        ((x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale[:, None]).to(q.dtype)
        for x, scale in ((k, SCALES.k_K), (v, SCALES.v_K))
    )
    return ReferenceAttention().forward(q, k, v, kv_cache=whole.to(q.dtype), metadata=metadata, rule=rule)


@pytest.mark.parametrize("terms", [(None, None, None, False), *RULES])
@pytest.mark.parametrize(("query_lens", "seq_lens"), STEPS)
def test_a_step_equals_the_reference_over_rounded_values(query_lens, seq_lens, terms):
    rule = make_rule(*terms, num_heads=HEADS)
    q, k, v, pages, metadata = make_step(query_lens, seq_lens, rule)
    expected = by_reference(q, k, v, pages.clone(), metadata, rule)
    out = ScaledAttention(CpuAttention()).forward(q, k, v, kv_cache=pages, metadata=metadata, rule=scaled(rule))
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


def test_bfloat16_models_round_to_fp8_from_what_they_computed():
    rule = AttentionRule(scale=0.2)
    q, k, v, pages, metadata = make_step(*STEPS[0], rule, dtype=torch.bfloat16)
    expected = by_reference(q, k, v, pages.clone(), metadata, rule)
    out = ScaledAttention(CpuAttention()).forward(q, k, v, kv_cache=pages, metadata=metadata, rule=scaled(rule))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_rows_do_not_depend_on_what_is_converted_together(monkeypatch):
    rule = scaled(AttentionRule(scale=0.2, window=37))
    q, k, v, pages, metadata = make_step(*STEPS[0], rule)
    whole = ScaledAttention(CpuAttention()).forward(q, k, v, kv_cache=pages, metadata=metadata, rule=rule)
    monkeypatch.setattr(module, "MAX_PART_BYTES", 1)
    parts = ScaledAttention(CpuAttention()).forward(q, k, v, kv_cache=pages, metadata=metadata, rule=rule)
    assert torch.equal(parts, whole)


def test_chunks_of_a_prompt_see_their_own_keys_as_they_are_stored():
    rule = scaled(AttentionRule(scale=0.2))
    q, k, v, pages, metadata = make_step([40], [40], rule)
    backend = ScaledAttention(CpuAttention())
    whole = backend.forward(q, k, v, kv_cache=pages.clone(), metadata=metadata, rule=rule)
    parts = []
    for start, stop in ((0, 13), (13, 32), (32, 40)):
        chunk = make_metadata([stop - start], [stop], metadata.block_table_RM)
        part = slice(start, stop)
        parts.append(backend.forward(q[part], k[part], v[part], kv_cache=pages, metadata=chunk, rule=rule))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_values_beyond_the_range_are_clamped():
    x = torch.tensor([1e30, -torch.inf, 449.0, -0.001]).view(1, 1, 4)
    assert quantise(x, torch.ones(1)).float().flatten().tolist() == [448.0, -448.0, 448.0, -(2.0**-9)]


def test_every_stored_value_is_read_exactly():
    every = torch.arange(256, dtype=torch.uint8).view(FP8).view(1, 1, 4, 64)
    ones = CacheScales(k_K=torch.ones(1), v_K=torch.ones(1))
    assert torch.equal(dequantise_kv(every, ones, torch.float32).nan_to_num(7.0), every.float().nan_to_num(7.0))


def test_padding_is_not_written():
    rule = scaled(AttentionRule(scale=0.2))
    q, k, v, pages, metadata = make_step([12], [12], rule)
    padded = dataclasses.replace(metadata, slot_mapping_T=torch.full_like(metadata.slot_mapping_T, -1))
    before = pages.view(torch.uint8).clone()
    ScaledAttention(CpuAttention()).forward(q, k, v, kv_cache=pages, metadata=padded, rule=rule)
    assert torch.equal(pages.view(torch.uint8), before)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("query_lens", "seq_lens"), STEPS)
def test_latents_equal_the_whole_ones_that_fp8_stands_for(query_lens, seq_lens, window):
    torch.manual_seed(0)
    scale, dims = torch.tensor([0.07]), 25
    table = make_table(seq_lens, num_blocks=NUM_BLOCKS)
    pages = torch.randn(NUM_BLOCKS, 16, dims).mul(20).to(FP8)
    q, latents = torch.randn(sum(query_lens), HEADS, dims), torch.randn(sum(query_lens), dims)
    metadata, rule = make_metadata(query_lens, seq_lens, table), AttentionRule(scale=0.3, window=window)
    rounded = (latents / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    expected = TorchLatentAttention().forward(
        q, rounded, kv_cache=pages.float() * scale, metadata=metadata, rule=rule, value_dim=16
    )
    rule = dataclasses.replace(rule, scales=CacheScales(k_K=scale, v_K=scale))
    out = ScaledLatentAttention(TorchLatentAttention()).forward(
        q, latents, kv_cache=pages, metadata=metadata, rule=rule, value_dim=16
    )
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
