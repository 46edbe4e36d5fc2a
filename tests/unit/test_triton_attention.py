"""TritonAttention against ReferenceAttention on whole steps."""

import pytest
import torch
from support.paged import (
    DEVICE,
    drop_unreached,
    make_metadata,
    make_pool,
    make_sinks,
    make_table,
    poison_unused,
)

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.attention.reference import ReferenceAttention
from blockferry.engine.attention.triton import TritonAttention

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("layout", "query_lens", "seq_lens"),
    [
        ("BHLNC", [1, 1, 7, 40], [20, 1, 30, 40]),  # decode and prefill rows in one step
        ("BLHNC", [1, 1], [33, 5]),
        ("LBHNC", [12], [12]),
        ("LBNHC", [1, 5], [33, 21]),
    ],
)
def test_a_step_equals_the_reference_in_output_and_pages(layout, query_lens, seq_lens):
    torch.manual_seed(0)
    shape = {"num_blocks": 14, "num_heads": 3, "head_dim": 32, "dtype": torch.float32}
    pool = make_pool(layout, **shape)
    table = make_table(seq_lens, num_blocks=14)
    poison_unused(pool[:, 1], table, seq_lens)
    expected_pool = pool.clone()
    num_padded = 2
    metadata = make_metadata(query_lens, seq_lens, table)
    q, k, v = (torch.randn(sum(query_lens) + num_padded, heads, 32, device=DEVICE) for heads in (9, 3, 3))

    out = TritonAttention().forward(q, k, v, kv_cache=pool[:, 1], metadata=metadata, rule=AttentionRule(scale=0.2))

    expected = ReferenceAttention().forward(
        q, k, v, kv_cache=expected_pool[:, 1], metadata=metadata, rule=AttentionRule(scale=0.2)
    )
    torch.testing.assert_close(out[:-num_padded], expected[:-num_padded], rtol=1e-5, atol=1e-5)
    assert torch.equal(pool.nan_to_num(7.0), expected_pool.nan_to_num(7.0))


@pytest.mark.parametrize(("window", "chunk"), [(20, None), (None, 24)])
def test_a_step_under_a_rule_equals_the_reference_without_reading_null_blocks(window, chunk):
    torch.manual_seed(0)
    rule = AttentionRule(scale=0.3, window=window, chunk=chunk, soft_cap=4.0, sinks_H=make_sinks(9))
    query_lens, seq_lens = [1, 1, 7, 20], [20, 70, 30, 40]
    pool = make_pool("BHLNC", num_blocks=16, num_heads=3, head_dim=32, dtype=torch.float32)
    table = make_table(seq_lens, num_blocks=16)
    metadata = make_metadata(query_lens, seq_lens, table)
    drop_unreached(pool[:, 1], table, query_lens, seq_lens, rule)
    expected_pool = pool.clone()
    q, k, v = (torch.randn(sum(query_lens), heads, 32, device=DEVICE) for heads in (9, 3, 3))

    out = TritonAttention().forward(q, k, v, kv_cache=pool[:, 1], metadata=metadata, rule=rule)

    expected = ReferenceAttention().forward(q, k, v, kv_cache=expected_pool[:, 1], metadata=metadata, rule=rule)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(pool.nan_to_num(7.0), expected_pool.nan_to_num(7.0))
