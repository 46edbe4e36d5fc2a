"""ReferenceAttention against torch's own attention on contiguous tensors."""

import math

import pytest
import torch
from support.paged import make_metadata
from torch.nn import functional

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.attention.reference import ReferenceAttention


@pytest.mark.parametrize("chunk", [1, 3, 11])
def test_chunks_over_pages_equal_torch_attention_over_the_whole_sequence(chunk):
    torch.manual_seed(0)
    seq_len, num_heads, num_kv_heads, head_dim, block_size = 11, 6, 2, 8, 4
    q, k, v = (torch.randn(seq_len, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    kv_cache = torch.full((9, num_kv_heads, block_size, 2 * head_dim), math.nan)
    table = torch.tensor([[7, 2, 5, 0]], dtype=torch.int32)
    scale = head_dim**-0.5
    outs = []
    for start in range(0, seq_len, chunk):
        end = min(start + chunk, seq_len)
        metadata = make_metadata([end - start], [end], table, block_size=block_size)
        part = slice(start, end)
        outs.append(
            ReferenceAttention().forward(
                q[part], k[part], v[part], kv_cache=kv_cache, metadata=metadata, rule=AttentionRule(scale=scale)
            )
        )
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-5, atol=1e-6)


def test_padding_slots_are_not_written():
    kv_cache = torch.zeros(3, 1, 4, 8)
    metadata = make_metadata([1], [1], torch.tensor([[2]], dtype=torch.int32), block_size=4)
    metadata.slot_mapping_T.fill_(-1)
    ones = torch.ones(1, 1, 4)
    ReferenceAttention().forward(ones, ones, ones, kv_cache=kv_cache, metadata=metadata, rule=AttentionRule(scale=1.0))
    assert not kv_cache.any()


def _attend(rule, *, seq_len=9, query_len=9, values=None, scores=None):
    """[Q] outputs of one head of one dim; keys are `scores`, so that the rule sees scale * scores."""
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    kv_cache = torch.full((4, 1, 4, 2), math.nan)
    scores = torch.zeros(seq_len) if scores is None else scores
    values = torch.arange(seq_len).float() if values is None else values
    for start, end in ((0, seq_len - query_len), (seq_len - query_len, seq_len)):
        if start < end:
            out = ReferenceAttention().forward(
                torch.ones(end - start, 1, 1),
                scores[start:end, None, None],
                values[start:end, None, None],
                kv_cache=kv_cache,
                metadata=make_metadata([end - start], [end], table, block_size=4),
                rule=rule,
            )
    return out.flatten()


def test_a_window_counts_the_query_itself():
    means = _attend(AttentionRule(scale=1.0, window=3))
    torch.testing.assert_close(means, torch.tensor([0.0, 0.5, 1, 2, 3, 4, 5, 6, 7]))


def test_a_chunk_begins_anew_at_its_multiples():
    means = _attend(AttentionRule(scale=1.0, chunk=4))
    torch.testing.assert_close(means, torch.tensor([0.0, 0.5, 1, 1.5, 4, 4.5, 5, 5.5, 8]))


def test_a_window_does_not_reach_over_a_chunk():
    means = _attend(AttentionRule(scale=1.0, window=2, chunk=4), query_len=2)
    torch.testing.assert_close(means, torch.tensor([6.5, 8.0]))


def test_a_soft_cap_bounds_the_scaled_scores():
    scores = torch.tensor([0.0, 100.0])
    out = _attend(AttentionRule(scale=0.5, soft_cap=2.0), seq_len=2, query_len=1, scores=scores)
    capped = 2 * math.tanh(50 / 2)
    torch.testing.assert_close(out, torch.tensor([math.exp(capped) / (1 + math.exp(capped))]))


def test_a_sink_takes_weight_and_gives_nothing():
    rule = AttentionRule(scale=1.0, sinks_H=torch.tensor([math.log(2.0)]))
    out = _attend(rule, seq_len=2, query_len=1, values=torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(out, torch.tensor([4.0 / (2 + 2)]))


def test_blocks_out_of_reach_are_not_read():
    rule = AttentionRule(scale=1.0, window=2)
    kv_cache = torch.full((4, 1, 4, 2), math.nan)
    table = torch.tensor([[0, 0, 2]], dtype=torch.int32)
    kv_cache[2, :, :2] = 1.0
    one = torch.ones(1, 1, 1)
    metadata = make_metadata([1], [10], table, block_size=4)
    assert ReferenceAttention().forward(one, one, one, kv_cache=kv_cache, metadata=metadata, rule=rule) == 1.0
