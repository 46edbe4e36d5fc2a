"""TorchLatentAttention against one query after the other."""

import pytest
import torch
from support.latents import attend_by_token, make_latent_pool, poison_latents
from support.paged import DEVICE, make_metadata, make_table

from blockferry.engine.attention import latent as module
from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.attention.latent import TorchLatentAttention

LATENT_DIM, VALUE_DIM, NUM_HEADS, SCALE = 24, 16, 4, 0.3


def _step(query_lens, seq_lens, *, dtype=torch.float32, num_padded=0):
    """(arguments of forward, the pool's layer, block table), with NaN in every entry that is not to be read."""
    torch.manual_seed(0)
    pool = make_latent_pool(num_blocks=20, latent_dim=LATENT_DIM, dtype=dtype)
    table = make_table(seq_lens, num_blocks=20)
    poison_latents(pool[:, 1], table, seq_lens)
    num_tokens = sum(query_lens) + num_padded
    q = torch.randn(num_tokens, NUM_HEADS, LATENT_DIM, device=DEVICE).to(dtype)
    latents = torch.randn(num_tokens, LATENT_DIM, device=DEVICE).to(dtype)
    return q, latents, pool[:, 1], table


def _forward(q, latents, kv_cache, metadata, *, window=None, value_dim=VALUE_DIM):
    rule = AttentionRule(scale=SCALE, window=window)
    return TorchLatentAttention().forward(
        q, latents, kv_cache=kv_cache, metadata=metadata, rule=rule, value_dim=value_dim
    )


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1, 7, 40], [20, 1, 30, 40]), ([1, 1], [33, 5]), ([12], [12]), ([1, 5], [33, 21])]
)
def test_a_step_equals_one_query_after_the_other(query_lens, seq_lens, window):
    q, latents, kv_cache, table = _step(query_lens, seq_lens)

    out = _forward(q, latents, kv_cache, make_metadata(query_lens, seq_lens, table), window=window)

    expected = attend_by_token(
        q, kv_cache=kv_cache, table=table, query_lens=query_lens, seq_lens=seq_lens, scale=SCALE,
        value_dim=VALUE_DIM, window=window,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_query_tiles_are_cut_without_a_trace(monkeypatch):
    q, latents, kv_cache, table = _step([40], [70])
    metadata = make_metadata([40], [70], table)
    whole = _forward(q, latents, kv_cache, metadata, window=11)
    monkeypatch.setattr(module, "MAX_SCORES", 7 * NUM_HEADS * 70)
    torch.testing.assert_close(_forward(q, latents, kv_cache, metadata, window=11), whole, rtol=1e-5, atol=1e-5)


def test_half_types_round_only_inputs_and_outputs():
    q, latents, kv_cache, table = _step([1, 20], [50, 30], dtype=torch.bfloat16)
    out = _forward(q, latents, kv_cache, make_metadata([1, 20], [50, 30], table))
    expected = attend_by_token(
        q, kv_cache=kv_cache, table=table, query_lens=[1, 20], seq_lens=[50, 30], scale=SCALE, value_dim=VALUE_DIM
    )
    torch.testing.assert_close(out, expected, rtol=8e-3, atol=1e-5)


def test_a_row_is_the_same_bits_in_any_batch():
    q, latents, kv_cache, table = _step([1, 1, 9], [20, 70, 30])
    together = _forward(q, latents, kv_cache, make_metadata([1, 1, 9], [20, 70, 30], table))

    alone = _forward(q[:1], latents[:1], kv_cache, make_metadata([1], [20], table[:1]))

    assert torch.equal(together[:1], alone)


def test_the_step_is_written_to_its_slots_and_padding_nowhere():
    q, latents, kv_cache, table = _step([1, 3], [18, 3], num_padded=2)
    before = kv_cache.clone()

    out = _forward(q, latents, kv_cache, make_metadata([1, 3], [18, 3], table))

    assert torch.equal(kv_cache[table[0, 1], 1], latents[0])
    assert torch.equal(kv_cache[table[1, 0], :3], latents[1:4])
    is_changed = (kv_cache.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1)
    assert int(is_changed.sum()) == 4
    assert not out[4:].any()


def test_blocks_behind_the_window_are_not_read():
    q, latents, kv_cache, table = _step([1, 4], [70, 60])
    metadata = make_metadata([1, 4], [70, 60], table)
    expected = _forward(q, latents, kv_cache, metadata, window=20)
    table[:, :2] = 0  # 70 - 20 = 50 and 56 - 19 = 37 lie past the second block's end at 32
    assert torch.equal(_forward(q, latents, kv_cache, metadata, window=20), expected)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("soft_cap", {"soft_cap": 30.0}), ("chunk", {"chunk": 8}), ("sinks", {"sinks_H": torch.ones(NUM_HEADS)})],
)
def test_a_rule_that_latent_attention_does_not_know_is_refused(name, parts):
    q, latents, kv_cache, table = _step([1], [5])
    with pytest.raises(ValueError, match=f"latent attention has no {name}"):
        TorchLatentAttention().forward(
            q,
            latents,
            kv_cache=kv_cache,
            metadata=make_metadata([1], [5], table),
            rule=AttentionRule(scale=SCALE, **parts),
            value_dim=VALUE_DIM,
        )


def test_a_value_larger_than_the_latent_is_refused():
    q, latents, kv_cache, table = _step([1], [5])
    with pytest.raises(ValueError, match=r"value_dim=25 is outside 1..24"):
        _forward(q, latents, kv_cache, make_metadata([1], [5], table), value_dim=25)
