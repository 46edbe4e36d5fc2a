"""ReferenceAttention against torch's own attention on contiguous tensors."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.attention.reference import ReferenceAttention


def _metadata(query_lens, seq_lens, table, block_size):
    starts = [0, *itertools.accumulate(query_lens)]
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens))
        for position in range(seq_len - query_len, seq_len)
    ]
    return AttentionMetadata(
        num_rows=len(query_lens),
        num_decode_rows=sum(query_len == 1 for query_len in query_lens),
        num_tokens=starts[-1],
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_R1=torch.tensor(starts, dtype=torch.int32),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.tensor(slots),
        query_lens=list(query_lens),
        seq_lens=list(seq_lens),
    )


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
        metadata = _metadata([end - start], [end], table, block_size)
        part = slice(start, end)
        outs.append(
            ReferenceAttention().forward(q[part], k[part], v[part], kv_cache=kv_cache, metadata=metadata, scale=scale)
        )
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-5, atol=1e-6)


def test_padding_slots_are_not_written():
    kv_cache = torch.zeros(3, 1, 4, 8)
    metadata = _metadata([1], [1], torch.tensor([[2]], dtype=torch.int32), 4)
    metadata.slot_mapping_T.fill_(-1)
    ones = torch.ones(1, 1, 4)
    ReferenceAttention().forward(ones, ones, ones, kv_cache=kv_cache, metadata=metadata, scale=1.0)
    assert not kv_cache.any()
