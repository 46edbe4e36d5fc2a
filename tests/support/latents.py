"""Paged pools of latents, an oracle of latent attention, and steps over them.

Legend: B blocks, L layers, N block size, R latent dim, T tokens, H query heads, V value dim.
"""

import itertools

import torch
from support.paged import DEVICE, poison_unused


def make_latent_pool(*, num_blocks, num_layers=2, block_size=16, latent_dim, dtype):
    """A [B, L, N, R] pool of random latents."""
    return torch.randn(num_blocks, num_layers, block_size, latent_dim).to(dtype).to(DEVICE)


def poison_latents(kv_cache, table, seq_lens):
    """Set every entry that no row holds to NaN."""
    poison_unused(kv_cache[:, None], table, seq_lens)


def attend_by_token(q_THR, *, kv_cache, table, query_lens, seq_lens, scale, value_dim, window=None):
    """[T, H, V]: one query after the other, over latents that are in the pages already."""
    block_size = kv_cache.shape[1]
    out = torch.zeros(*q_THR.shape[:2], value_dim, dtype=q_THR.dtype, device=q_THR.device)
    token = itertools.count()
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            places = torch.arange(first, position + 1, device=DEVICE)
            keys = kv_cache[table[row].long()[places // block_size], places % block_size].double()
            index = next(token)
            weights = (q_THR[index].double() @ keys.T * scale).softmax(-1)
            out[index] = (weights @ keys[:, :value_dim]).to(out.dtype)
    return out
