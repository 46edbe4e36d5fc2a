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
