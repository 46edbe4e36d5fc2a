"""The paged prefill kernel against its oracle. bfloat16 is left out: the interpreter multiplies it wrongly."""

import itertools

import pytest
import torch
from support.paged import DEVICE, RULES, drop_unreached, make_pool, make_rule, make_table, poison_unused

from blockferry.engine.attention.base import AttentionRule
from blockferry.kernels.paged_prefill import paged_prefill, paged_prefill_torch

pytestmark = pytest.mark.triton

RULE = AttentionRule(scale=0.2)
GPU_ONLY = [("BHLNC", 32, 8, 128, torch.bfloat16)] if DEVICE == "cuda" else []
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _prefill(pages, table, query_lens, seq_lens, *, num_heads, head_dim, dtype, num_before=0, rule=RULE):
    """(kernel's output, oracle's output); num_before tokens of the step precede the rows."""
    starts = [num_before + start for start in (0, *itertools.accumulate(query_lens))]
    q = torch.randn(starts[-1], num_heads, head_dim).to(dtype).to(DEVICE)
    rows = {
        "kv_cache": pages,
        "block_table_RM": table,
        "query_start_R1": torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        "seq_lens_R": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        "rule": rule,
    }
    out = torch.zeros_like(q)
    paged_prefill(q, num_tokens=sum(query_lens), out_THD=out, **rows)
    return out, paged_prefill_torch(q, **rows)


@pytest.mark.parametrize(
    ("layout", "num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        ("BHLNC", 6, 2, 64, torch.float16),
        ("BLHNC", 2, 2, 80, torch.float16),
        ("LBHNC", 8, 1, 96, torch.float16),
        ("LBNHC", 4, 2, 256, torch.float16),
        ("BHLNC", 6, 2, 32, torch.float32),
        *GPU_ONLY,
    ],
)
def test_chunk_equals_the_oracle_and_reads_no_entry_past_the_sequence(layout, num_heads, num_kv_heads, head_dim, dtype):
    torch.manual_seed(0)
    query_lens, seq_lens = [5, 43], [5, 120]
    pool = make_pool(layout, num_blocks=12, num_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    table = make_table(seq_lens, num_blocks=12)
    poison_unused(pool[:, 1], table, seq_lens)

    out, expected = _prefill(
        pool[:, 1], table, query_lens, seq_lens, num_heads=num_heads, head_dim=head_dim, dtype=dtype
    )

    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("terms", RULES)
def test_rules_equal_the_oracle_and_read_nothing_out_of_reach(terms):
    torch.manual_seed(0)
    rule = make_rule(*terms, num_heads=6)
    query_lens, seq_lens = [1, 43, 16, 30], [90, 43, 64, 100]
    pool = make_pool("BHLNC", num_blocks=30, num_heads=2, head_dim=32, dtype=torch.float32)
    table = make_table(seq_lens, num_blocks=30)
    drop_unreached(pool[:, 1], table, query_lens, seq_lens, rule)

    out, expected = _prefill(
        pool[:, 1], table, query_lens, seq_lens, num_heads=6, head_dim=32, dtype=torch.float32, rule=rule
    )

    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


def test_a_query_in_a_window_is_computed_alike_in_every_chunk():
    torch.manual_seed(0)
    rule = AttentionRule(scale=0.2, window=21)
    pool = make_pool("BHLNC", num_blocks=9, num_heads=1, head_dim=32, dtype=torch.float32)
    table = make_table([100], num_blocks=9)
    q = torch.randn(100, 2, 32, device=DEVICE)
    outs = []
    for bounds in ([0, 100], [0, 13, 60, 100]):
        out = torch.zeros_like(q)
        for start, stop in itertools.pairwise(bounds):
            paged_prefill(
                q[start:stop],
                kv_cache=pool[:, 0],
                block_table_RM=table,
                query_start_R1=torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE),
                seq_lens_R=torch.tensor([stop], dtype=torch.int32, device=DEVICE),
                num_tokens=stop - start,
                rule=rule,
                out_THD=out[start:stop],
            )
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)


def test_many_rows_find_their_tiles_and_leave_earlier_tokens_alone():
    torch.manual_seed(0)
    query_lens = [1, 33, 2, 32, 31, 1, 64]
    seq_lens = [17, 33, 2, 40, 31, 1, 65]
    pool = make_pool("BHLNC", num_blocks=30, num_heads=1, head_dim=32, dtype=torch.float32)
    table = make_table(seq_lens, num_blocks=30)
    poison_unused(pool[:, 0], table, seq_lens)

    out, expected = _prefill(
        pool[:, 0], table, query_lens, seq_lens, num_heads=2, head_dim=32, dtype=torch.float32, num_before=3
    )

    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not out[:3].any()


def test_more_heads_than_a_tile_holds_share_one_kv_head():
    torch.manual_seed(0)
    pool = make_pool("BHLNC", num_blocks=4, num_heads=1, head_dim=32, dtype=torch.float32)
    table = make_table([20], num_blocks=4)
    out, expected = _prefill(pool[:, 0], table, [3], [20], num_heads=45, head_dim=32, dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_head_dim_beyond_the_tiles_is_refused():
    pool = make_pool("BHLNC", num_blocks=2, num_heads=1, head_dim=288, dtype=torch.float32)
    table = make_table([3], num_blocks=2)
    with pytest.raises(ValueError, match=r"head_dim=288 is outside 1..256; use the torch backend"):
        _prefill(pool[:, 0], table, [3], [3], num_heads=1, head_dim=288, dtype=torch.float32)


def test_heads_that_do_not_divide_are_refused():
    pool = make_pool("BHLNC", num_blocks=2, num_heads=2, head_dim=32, dtype=torch.float32)
    table = make_table([3], num_blocks=2)
    with pytest.raises(ValueError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
        _prefill(pool[:, 0], table, [3], [3], num_heads=3, head_dim=32, dtype=torch.float32)
