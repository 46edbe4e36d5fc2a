"""CpuAttention against the plain-torch reference backend."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import RULES, drop_unreached, make_rule

from blockferry.engine.attention.base import AttentionMetadata, AttentionRule
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.attention.reference import ReferenceAttention
from blockferry.kernels.cpu_amx import has_amx

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make_metadata(query_lens: list[int], seq_lens: list[int], *, block_size: int, num_decode_rows: int, seed: int = 0):
    """Rows with shuffled, disjoint blocks; block 0 is left to be null."""
    generator = torch.Generator().manual_seed(seed)
    num_columns = [-(-length // block_size) for length in seq_lens]
    block_ids = torch.randperm(sum(num_columns), generator=generator, dtype=torch.int32) + 1
    table = torch.full((len(seq_lens), max(num_columns) + 2), 10_000, dtype=torch.int32)
    for row, (first, count) in enumerate(zip(itertools.accumulate([0, *num_columns]), num_columns)):
        table[row, :count] = block_ids[first : first + count]
    slots = []
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        positions = torch.arange(seq_len - query_len, seq_len)
        slots.append(table[row, positions // block_size].long() * block_size + positions % block_size)
    starts = [0, *itertools.accumulate(query_lens)]
    return AttentionMetadata(
        num_rows=len(query_lens),
        num_decode_rows=num_decode_rows,
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_R1=torch.tensor(starts, dtype=torch.int32),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=torch.cat(slots),
        query_lens=query_lens,
        seq_lens=seq_lens,
    )


def make_pool(layout: str, *, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype):
    """One layer's [B, K, N, 2*D] view of a two-layer pool full of NaN where nobody wrote."""
    sizes = {"B": num_blocks, "L": 2, "H": num_kv_heads, "N": block_size, "C": 2 * head_dim}
    pool = torch.full([sizes[axis] for axis in layout], torch.nan, dtype=dtype)
    return pool.permute(*[layout.index(axis) for axis in "LBHNC"])[1]


def run_both(query_lens, seq_lens, *, num_decode_rows, num_heads=6, num_kv_heads=2, head_dim=64, block_size=16,
             dtype=torch.float32, layout="BHLNC", rule=None):  # fmt: skip
    rule = rule or AttentionRule(scale=head_dim**-0.5)
    generator = torch.Generator().manual_seed(1)
    metadata = make_metadata(query_lens, seq_lens, block_size=block_size, num_decode_rows=num_decode_rows)
    num_blocks = int(sum(-(-length // block_size) for length in seq_lens)) + 1
    pool = make_pool(
        layout, num_blocks=num_blocks, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype
    )
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        positions = torch.arange(seq_len - query_len)
        blocks = metadata.block_table_RM[row, positions // block_size].long()
        context = torch.randn(len(positions), num_kv_heads, 2 * head_dim, generator=generator)
        pool[blocks, :, positions % block_size] = context.to(dtype)
    drop_unreached(pool, metadata.block_table_RM, query_lens, seq_lens, rule)
    qkv = torch.randn(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    expected_pool = pool.clone()
    expected = ReferenceAttention().forward(q, k, v, kv_cache=expected_pool, metadata=metadata, rule=rule)
    actual = CpuAttention().forward(q, k, v, kv_cache=pool, metadata=metadata, rule=rule)
    assert actual.shape == expected.shape
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(pool.nan_to_num(), expected_pool.nan_to_num())


@pytest.mark.parametrize("query_lens", [[1, 16], [1, 1]], ids=["of a chunk", "of one token"])
def test_decode_row_reads_what_another_row_of_its_step_writes(query_lens):
    metadata = make_metadata(query_lens, [17, 16], block_size=16, num_decode_rows=query_lens.count(1))
    metadata.block_table_RM[0, 0] = metadata.block_table_RM[1, 0]  # a prefix hit on what the step computes
    metadata = dataclasses.replace(metadata, shares_writes=True)
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(4, 2, 16, 128, generator=generator)
    qkv = torch.randn(sum(query_lens), 10, 64, generator=generator)
    q, k, v = qkv.split((6, 2, 2), dim=1)
    rule = AttentionRule(scale=0.125)
    expected = ReferenceAttention().forward(q, k, v, kv_cache=pool.clone(), metadata=metadata, rule=rule)
    actual = CpuAttention().forward(q, k, v, kv_cache=pool, metadata=metadata, rule=rule)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_decode_rows_match_the_reference_at_block_borders(dtype, block_size):
    run_both([1] * 7, [1, 15, 16, 17, 31, 33, 100], num_decode_rows=7, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_step_matches_the_reference(dtype):
    run_both([1, 1, 16, 7, 1, 33], [20, 64, 16, 50, 9, 34], num_decode_rows=2, dtype=dtype)


@pytest.mark.parametrize("layout", ["BHLNC", "BLHNC", "LBHNC", "LBNHC"])
def test_every_page_layout_gives_the_same_output(layout):
    run_both([1, 1, 9], [20, 33, 21], num_decode_rows=2, layout=layout)


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads", "dtype"),
    [(32, 4, 4, torch.bfloat16), (64, 9, 3, torch.bfloat16), (80, 5, 1, torch.bfloat16), (128, 16, 2, torch.float32)],
)
def test_every_head_shape_matches_the_reference(head_dim, num_heads, num_kv_heads, dtype):
    run_both(
        [1, 1, 5], [17, 140, 12], num_decode_rows=2, head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads,
        dtype=dtype,
    )  # fmt: skip


def test_prefill_only_step_matches_the_reference():
    run_both([40, 3], [40, 19], num_decode_rows=0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_decode_rows_do_not_depend_on_other_rows_or_threads(num_threads):
    attention = CpuAttention()
    metadata = make_metadata([1] * 9, [200] * 9, block_size=16, num_decode_rows=9)
    pool = torch.randn(9 * 13 + 1, 2, 16, 128).bfloat16()
    q, k, v = torch.randn(9, 10, 64).bfloat16().split((6, 2, 2), dim=1)
    last = dataclasses.replace(
        metadata,
        num_rows=1,
        num_decode_rows=1,
        num_tokens=1,
        seq_lens_R=metadata.seq_lens_R[8:],
        block_table_RM=metadata.block_table_RM[8:],
        slot_mapping_T=metadata.slot_mapping_T[8:],
    )
    alone = attention.forward(q[8:], k[8:], v[8:], kv_cache=pool, metadata=last, rule=AttentionRule(scale=0.1))
    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = attention.forward(q, k, v, kv_cache=pool, metadata=metadata, rule=AttentionRule(scale=0.1))
    finally:
        torch.set_num_threads(previous)
    assert torch.equal(alone[0], together[8])


@pytest.mark.parametrize("terms", [(None,) * 4, (37, None, 3.0, True), (None, 48, None, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_of_one_sequence_in_one_step_equal_a_step_for_each(dtype, terms):
    attention, rule = CpuAttention(), make_rule(*terms, num_heads=6, scale=0.125)
    seq_lens = [95, 96, 97, 98, 15, 16, 17]  # two sequences, four and three tokens
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(10, 2, 16, 128, generator=generator).to(dtype)
    q, k, v = torch.randn(7, 10, 64, generator=generator).to(dtype).split((6, 2, 2), dim=1)
    metadata = make_metadata([1] * 7, seq_lens, block_size=16, num_decode_rows=7)
    table = torch.tensor([[1, 2, 3, 4, 5, 6, 7]] * 4 + [[8, 9, 0, 0, 0, 0, 0]] * 3, dtype=torch.int32)
    positions = torch.tensor(seq_lens) - 1
    slots = table.gather(1, positions[:, None] // 16)[:, 0].long() * 16 + positions % 16
    together = dataclasses.replace(metadata, block_table_RM=table, slot_mapping_T=slots, shares_writes=True)
    pages = pool.clone()
    actual = attention.forward(q, k, v, kv_cache=pages, metadata=together, rule=rule)
    for row, seq_len in enumerate(seq_lens):
        alone = make_metadata([1], [seq_len], block_size=16, num_decode_rows=1)
        one = slice(row, row + 1)
        alone = dataclasses.replace(alone, block_table_RM=table[one], slot_mapping_T=slots[one])
        expected = attention.forward(q[one], k[one], v[one], kv_cache=pool, metadata=alone, rule=rule)
        assert torch.equal(actual[one], expected)
    assert torch.equal(pool, pages)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "block_size"),
    [([1, 31, 33], [1, 31, 33], 16), ([200, 5], [200, 170], 1), ([65], [300], 32)],
)
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads"), [(64, 9, 3), (128, 4, 2)])
def test_bfloat16_chunks_match_the_reference(query_lens, seq_lens, block_size, head_dim, num_heads, num_kv_heads):
    run_both(
        query_lens, seq_lens, num_decode_rows=0, block_size=block_size, head_dim=head_dim, num_heads=num_heads,
        num_kv_heads=num_kv_heads, dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("terms", [(None,) * 4, (37, None, None, True), (None, 100, 3.0, False)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_query_does_not_depend_on_its_chunk_or_on_threads(num_threads, terms):
    if not has_amx():
        pytest.skip("needs AMX")
    attention, rule = CpuAttention(), make_rule(*terms, num_heads=6, scale=0.125)
    pool = torch.zeros(21, 2, 16, 128).bfloat16()
    q, k, v = torch.randn(300, 10, 64).bfloat16().split((6, 2, 2), dim=1)
    previous = torch.get_num_threads()
    outputs = []
    for bounds in ([0, 300], [0, 37, 164, 165, 300]):
        torch.set_num_threads(num_threads if len(bounds) > 2 else 1)
        parts = []
        for start, stop in itertools.pairwise(bounds):
            metadata = make_metadata([stop - start], [stop], block_size=16, num_decode_rows=0)
            table = torch.arange(1, 20, dtype=torch.int32)[None]
            positions = torch.arange(start, stop)
            slots = table[0, positions // 16].long() * 16 + positions % 16
            metadata = dataclasses.replace(metadata, block_table_RM=table, slot_mapping_T=slots)
            part = slice(start, stop)
            parts.append(attention.forward(q[part], k[part], v[part], kv_cache=pool, metadata=metadata, rule=rule))
        outputs.append(torch.cat(parts))
    torch.set_num_threads(previous)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("terms", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rules_match_the_reference_in_a_mixed_step_without_reading_null_blocks(terms, dtype):
    query_lens = [1, 1, 1, 1, 40, 7, 1, 150]
    seq_lens = [1, 37, 48, 130, 40, 90, 50, 200]
    run_both(query_lens, seq_lens, num_decode_rows=4, dtype=dtype, rule=make_rule(*terms, num_heads=6))


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads"),
    [(24, 4, 2), (64, 8, 1), (80, 5, 1), (256, 4, 2)],  # 24: torch's path, kernels take whole vectors
)
def test_every_head_shape_matches_the_reference_under_a_rule(head_dim, num_heads, num_kv_heads):
    run_both(
        [1, 1, 5], [17, 140, 60], num_decode_rows=2, head_dim=head_dim, num_heads=num_heads,
        num_kv_heads=num_kv_heads, rule=make_rule(37, None, 3.0, True, num_heads=num_heads),
    )  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 120)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 170),
    chunk=st.none() | st.integers(1, 170),
    block_size=st.sampled_from([1, 16, 24]),
)
def test_any_reach_matches_the_reference(lens, window, chunk, block_size):
    lens = sorted(lens, key=lambda row: row[0] > 1)  # decode rows first
    query_lens, seq_lens = [query for query, _ in lens], [query + context for query, context in lens]
    run_both(
        query_lens, seq_lens, num_decode_rows=query_lens.count(1), block_size=block_size, num_heads=2,
        num_kv_heads=1, head_dim=16, rule=AttentionRule(scale=0.25, window=window, chunk=chunk),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_windowed_decode_row_does_not_depend_on_other_rows(dtype):
    rule = make_rule(37, 100, 3.0, True, num_heads=6)
    seq_lens = [200, 3, 120]
    metadata = make_metadata([1] * 3, seq_lens, block_size=16, num_decode_rows=3)
    pool = torch.randn(24, 2, 16, 128).to(dtype)
    q, k, v = torch.randn(3, 10, 64).to(dtype).split((6, 2, 2), dim=1)
    together = CpuAttention().forward(q, k, v, kv_cache=pool, metadata=metadata, rule=rule)
    for row in range(3):
        part = slice(row, row + 1)
        alone = dataclasses.replace(
            metadata,
            num_rows=1,
            num_decode_rows=1,
            num_tokens=1,
            seq_lens_R=metadata.seq_lens_R[part],
            block_table_RM=metadata.block_table_RM[part],
            slot_mapping_T=metadata.slot_mapping_T[part],
        )
        out = CpuAttention().forward(q[part], k[part], v[part], kv_cache=pool, metadata=alone, rule=rule)
        assert torch.equal(out[0], together[row])
