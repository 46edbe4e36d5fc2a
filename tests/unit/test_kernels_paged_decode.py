"""The paged decode kernels against their oracle. bfloat16 is left out: the interpreter multiplies it wrongly."""

import pytest
import torch
from support.paged import DEVICE, RULES, drop_unreached, make_pool, make_rule, make_sinks, make_table, poison_unused

from blockferry.engine.attention.base import AttentionRule
from blockferry.kernels import paged_decode as module
from blockferry.kernels.launch import Target
from blockferry.kernels.paged_decode import choose_split_size, decode_config, paged_decode, paged_decode_torch

pytestmark = pytest.mark.triton

RULE = AttentionRule(scale=0.2)
GPU_ONLY = [("BHLNC", 32, 8, 128, torch.bfloat16)] if DEVICE == "cuda" else []
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _decode(pages, table, seq_lens, *, num_heads, head_dim, dtype, rule=RULE):
    """(kernel's output, oracle's output)."""
    q = torch.randn(len(seq_lens), 3 * num_heads, head_dim).to(dtype).to(DEVICE)[:, num_heads : 2 * num_heads]
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    out = torch.full((len(seq_lens), num_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    paged_decode(
        q,
        kv_cache=pages,
        block_table_RM=table,
        seq_lens_R=lens,
        total_seq_len=sum(seq_lens),
        max_seq_len=max(seq_lens),
        rule=rule,
        out_RHD=out,
    )
    return out, paged_decode_torch(q, kv_cache=pages, block_table_RM=table, seq_lens_R=lens, rule=rule)


@pytest.mark.parametrize(
    ("layout", "num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        ("BHLNC", 9, 3, 64, torch.float16),
        ("BLHNC", 2, 2, 80, torch.float32),
        ("LBHNC", 8, 1, 96, torch.float32),
        ("LBNHC", 4, 2, 256, torch.float16),
        ("BHLNC", 6, 2, 32, torch.float32),
        *GPU_ONLY,
    ],
)
def test_decode_equals_the_oracle_and_reads_no_entry_past_the_sequence(
    layout, num_heads, num_kv_heads, head_dim, dtype
):
    torch.manual_seed(0)
    seq_lens = [1, 16, 150]
    pool = make_pool(layout, num_blocks=14, num_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    table = make_table(seq_lens, num_blocks=14)
    poison_unused(pool[:, 1], table, seq_lens)

    out, expected = _decode(pool[:, 1], table, seq_lens, num_heads=num_heads, head_dim=head_dim, dtype=dtype)

    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_splits_merge_to_the_output_of_the_whole(dtype, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(module, "MIN_SPLIT_SIZE", 64)
    monkeypatch.setattr(module, "num_processors", lambda device: 64)
    seq_lens = [300, 0, 64, 65]
    pool = make_pool("BHLNC", num_blocks=40, num_heads=2, head_dim=48, dtype=dtype)
    table = make_table(seq_lens, num_blocks=40)
    poison_unused(pool[:, 0], table, seq_lens)

    out, expected = _decode(pool[:, 0], table, seq_lens, num_heads=6, head_dim=48, dtype=dtype)

    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("terms", RULES)
@pytest.mark.parametrize("num_processors", [1, 1000])  # one split, many
def test_rules_equal_the_oracle_and_read_nothing_out_of_reach(terms, num_processors, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(module, "MIN_SPLIT_SIZE", 16)
    monkeypatch.setattr(module, "num_processors", lambda device: num_processors)
    rule = make_rule(*terms, num_heads=6)
    seq_lens = [1, 37, 48, 49, 120]
    pool = make_pool("BHLNC", num_blocks=24, num_heads=2, head_dim=32, dtype=torch.float32)
    table = make_table(seq_lens, num_blocks=24)
    drop_unreached(pool[:, 1], table, [1] * 5, seq_lens, rule)

    out, expected = _decode(pool[:, 1], table, seq_lens, num_heads=6, head_dim=32, dtype=torch.float32, rule=rule)

    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


def test_a_window_is_split_by_its_own_length():
    whole = {"bytes_per_split": 32 * 128 * 4, "num_programs": 528}
    assert choose_split_size(total_work=131_072 * 8, max_keys=131_072, **whole) == 2048
    assert choose_split_size(total_work=4096 * 8, max_keys=4096, **whole) == module.MIN_SPLIT_SIZE


def test_a_row_of_length_zero_yields_zeros_beside_a_sink():
    rule = AttentionRule(scale=0.2, window=5, sinks_H=make_sinks(2))
    pool = make_pool("BHLNC", num_blocks=4, num_heads=1, head_dim=32, dtype=torch.float32)
    table = make_table([3], num_blocks=4)
    out, _ = _decode(pool[:, 0], table, [0], num_heads=2, head_dim=32, dtype=torch.float32, rule=rule)
    assert not out.any()


def test_sinks_of_another_dtype_are_refused():
    rule = AttentionRule(scale=0.2, sinks_H=make_sinks(1).half())
    pool = make_pool("BHLNC", num_blocks=4, num_heads=1, head_dim=32, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"sinks is torch.float16, the kernel takes torch.float32"):
        _decode(
            pool[:, 0], make_table([3], num_blocks=4), [3], num_heads=1, head_dim=32, dtype=torch.float32, rule=rule
        )


def test_large_scores_do_not_overflow():
    seq_lens = [40]
    pool = make_pool("BHLNC", num_blocks=4, num_heads=1, head_dim=32, dtype=torch.float32)
    pool *= 1000
    table = make_table(seq_lens, num_blocks=4)
    out, expected = _decode(pool[:, 0], table, seq_lens, num_heads=2, head_dim=32, dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-2)


def test_more_heads_than_a_tile_holds_share_one_kv_head():
    torch.manual_seed(0)
    seq_lens = [20]
    pool = make_pool("BHLNC", num_blocks=4, num_heads=1, head_dim=32, dtype=torch.float32)
    table = make_table(seq_lens, num_blocks=4)
    out, expected = _decode(pool[:, 0], table, seq_lens, num_heads=71, head_dim=32, dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_block_size_need_not_be_a_power_of_two():
    torch.manual_seed(0)
    seq_lens = [50]
    pool = make_pool("BHLNC", num_blocks=6, num_heads=1, block_size=12, head_dim=32, dtype=torch.float32)
    table = make_table(seq_lens, num_blocks=6, block_size=12)
    out, expected = _decode(pool[:, 0], table, seq_lens, num_heads=2, head_dim=32, dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_few_long_rows_are_split_to_fill_the_gpu_and_many_are_not():
    def choose(rows, seq_len):
        heads = 8
        return choose_split_size(
            total_work=rows * seq_len * heads,
            max_keys=seq_len,
            bytes_per_split=rows * 32 * 128 * 4,
            num_programs=528,
        )

    assert choose(1, 131_072) == 2048
    assert choose(256, 4096) == 16_384  # one split: no merge
    assert choose(1, 100) == module.MIN_SPLIT_SIZE


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_key_tiles_fit_the_shared_memory_of_every_target(target, dtype):
    for head_dim in (32, 64, 80, 128, 192, 256):
        config = decode_config(head_dim, dtype, target)
        key_bytes = 2 * (1 << (head_dim - 1).bit_length()) * dtype.itemsize
        assert config.tile_s * key_bytes * (config.num_stages + 1) // 2 <= target.shared_bytes


def test_a_cache_of_another_dtype_is_refused():
    pool = make_pool("BHLNC", num_blocks=4, num_heads=1, head_dim=32, dtype=torch.float16)
    table = make_table([3], num_blocks=4)
    with pytest.raises(ValueError, match=r"kv_cache is torch.float16, the kernel takes torch.float32"):
        _decode(pool[:, 0], table, [3], num_heads=1, head_dim=32, dtype=torch.float32)
