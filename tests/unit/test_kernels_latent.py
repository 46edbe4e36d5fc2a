"""The latent kernels against their oracles. bfloat16 is left out: the interpreter multiplies it wrongly."""

import itertools

import pytest
import torch
from support.latents import make_latent_pool, poison_latents
from support.paged import DEVICE, make_metadata, make_table

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.attention.latent import TorchLatentAttention
from blockferry.engine.attention.triton_latent import TritonLatentAttention
from blockferry.kernels import latent_decode as decode_module
from blockferry.kernels.latent_decode import latent_decode, latent_decode_torch
from blockferry.kernels.latent_prefill import latent_prefill, latent_prefill_torch
from blockferry.kernels.latent_tile import latent_config
from blockferry.kernels.launch import Target

pytestmark = pytest.mark.triton

SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [  # query heads, latent dim, value dim, dtype
    (4, 48, 32, torch.float32),
    (16, 80, 64, torch.float16),
    (35, 40, 24, torch.float16),  # more heads than a tile, dims that fill none
    *([(128, 576, 512, torch.bfloat16), (16, 576, 512, torch.bfloat16)] if DEVICE == "cuda" else []),
]


def _pages(seq_lens, latent_dim, dtype):
    """(one layer's pages with NaN in every entry that no row holds, block table)."""
    torch.manual_seed(0)
    pool = make_latent_pool(num_blocks=40, latent_dim=latent_dim, dtype=dtype)
    table = make_table(seq_lens, num_blocks=40)
    poison_latents(pool[:, 1], table, seq_lens)
    return pool[:, 1], table


def _decode(seq_lens, *, num_heads, latent_dim, value_dim, dtype, window=None):
    """(kernel's output, oracle's output)."""
    kv_cache, table = _pages(seq_lens, latent_dim, dtype)
    q = torch.randn(len(seq_lens), 2 * num_heads, latent_dim).to(dtype).to(DEVICE)[:, num_heads:]
    rows = {
        "kv_cache": kv_cache,
        "block_table_RM": table,
        "seq_lens_R": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        "scale": SCALE,
        "window": window,
    }
    out = q.new_full((len(seq_lens), num_heads, value_dim), torch.nan)
    latent_decode(q, total_seq_len=sum(seq_lens), max_seq_len=max(seq_lens), out_RHV=out, **rows)
    return out, latent_decode_torch(q, value_dim=value_dim, **rows)


def _prefill(query_lens, seq_lens, *, num_heads, latent_dim, value_dim, dtype, window=None):
    """(kernel's output, oracle's output); three tokens of the step precede the rows."""
    kv_cache, table = _pages(seq_lens, latent_dim, dtype)
    starts = [3 + start for start in (0, *itertools.accumulate(query_lens))]
    q = torch.randn(starts[-1], num_heads, latent_dim).to(dtype).to(DEVICE)
    rows = {
        "kv_cache": kv_cache,
        "block_table_RM": table,
        "query_start_R1": torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        "seq_lens_R": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        "scale": SCALE,
        "window": window,
    }
    out = q.new_zeros(starts[-1], num_heads, value_dim)
    latent_prefill(q, num_tokens=sum(query_lens), out_THV=out, **rows)
    return out, latent_prefill_torch(q, value_dim=value_dim, **rows)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("num_heads", "latent_dim", "value_dim", "dtype"), SHAPES)
def test_decode_equals_the_oracle_and_reads_no_entry_past_the_sequence(num_heads, latent_dim, value_dim, dtype, window):
    out, expected = _decode(
        [1, 16, 90], num_heads=num_heads, latent_dim=latent_dim, value_dim=value_dim, dtype=dtype, window=window
    )
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 100])
def test_splits_merge_to_the_output_of_the_whole(window, monkeypatch):
    monkeypatch.setattr(decode_module, "choose_split_size", lambda **_: 64)
    out, expected = _decode(
        [300, 0, 64, 65], num_heads=6, latent_dim=160, value_dim=144, dtype=torch.float32, window=window
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("num_heads", "latent_dim", "value_dim", "dtype"), SHAPES)
def test_chunks_equal_the_oracle_and_earlier_tokens_are_left_alone(num_heads, latent_dim, value_dim, dtype, window):
    query_lens, seq_lens = [5, 1, 23, 2], [5, 40, 60, 2]
    out, expected = _prefill(
        query_lens,
        seq_lens,
        num_heads=num_heads,
        latent_dim=latent_dim,
        value_dim=value_dim,
        dtype=dtype,
        window=window,
    )
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not out[:3].any()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1, 7, 40], [20, 1, 30, 40]), ([1, 1], [33, 5]), ([9], [9])])
def test_a_step_equals_the_torch_backend_in_output_and_pages(query_lens, seq_lens, window):
    kv_cache, table = _pages(seq_lens, 48, torch.float32)
    expected_cache = kv_cache.clone()
    metadata = make_metadata(query_lens, seq_lens, table)
    num_padded = 2
    q, latents = (torch.randn(sum(query_lens) + num_padded, *dims, device=DEVICE) for dims in ((3, 48), (48,)))
    step = {"metadata": metadata, "rule": AttentionRule(scale=SCALE, window=window), "value_dim": 32}

    out = TritonLatentAttention().forward(q, latents, kv_cache=kv_cache, **step)

    expected = TorchLatentAttention().forward(q, latents, kv_cache=expected_cache, **step)
    torch.testing.assert_close(out[:-num_padded], expected[:-num_padded], rtol=1e-5, atol=1e-5)
    assert torch.equal(kv_cache.nan_to_num(7.0), expected_cache.nan_to_num(7.0))


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_fit_the_shared_memory_of_every_target(target, dtype):
    for latent_dim, value_dim in ((576, 512), (288, 256), (320, 256)):
        config = latent_config(128, latent_dim, value_dim, dtype=dtype, target=target)
        num_tiles = (config.num_stages + 1) // 2
        assert num_tiles * config.tile_s * latent_dim * dtype.itemsize <= target.shared_bytes


def test_a_value_beyond_the_tiles_is_refused():
    with pytest.raises(ValueError, match=r"value_dim=520 is outside 1..512; use the torch backend"):
        _decode([3], num_heads=1, latent_dim=536, value_dim=520, dtype=torch.float32)


def test_a_latent_that_is_all_value_is_refused():
    with pytest.raises(ValueError, match="has 0 dims after value_dim=32"):
        _prefill([3], [3], num_heads=1, latent_dim=32, value_dim=32, dtype=torch.float32)


def test_a_cache_of_another_dtype_is_refused():
    kv_cache, table = _pages([3], 48, torch.float16)
    metadata = make_metadata([1], [3], table)
    q, latents = torch.randn(1, 2, 48, device=DEVICE), torch.randn(1, 48, device=DEVICE)
    with pytest.raises(ValueError, match=r"kv_cache is torch.float16, the kernel takes torch.float32"):
        TritonLatentAttention().forward(
            q, latents, kv_cache=kv_cache, metadata=metadata, rule=AttentionRule(scale=SCALE), value_dim=32
        )
