"""The torch backend of latent attention, on any device: the CPU's, and what the GPU kernels are tested against.

Owns nothing. Every row is computed on its own, so that its result does not depend on the rest of the batch, and no
entry out of a row's reach is read. Half types compute scores and softmax in float32. Multi-head latent attention in its
absorbed form: DeepSeek-V2 (arXiv:2405.04434, section 2.1.2 and appendix C).

Legend: T tokens of the step, Q tokens of one row in this step, S latents in one row's reach, H query heads, B blocks,
N block size, M blocks of the longest row, V value dim; R rows in the metadata's names, the latent's dim in all others.
"""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionMetadata, AttentionRule, LatentBackend

MAX_SCORES = 1 << 19  # of one query tile: 2 MB in float32, which stay in a core's cache; early tiles read fewer keys


class TorchLatentAttention(LatentBackend):
    """Latent attention from torch's matrix products, two per query tile."""

    def forward(
        self,
        q_THR: torch.Tensor,
        latent_TR: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
        value_dim: int,
    ) -> torch.Tensor:
        """Returns [T, H, value_dim]; see LatentBackend. Tokens past num_tokens come back as zeros.

        Raises ValueError for a rule that latent attention does not know, and for a value_dim larger than the latent.
        """
        check_rule(rule)
        num_tokens, num_heads, latent_dim = q_THR.shape
        if not 1 <= value_dim <= latent_dim:
            raise ValueError(f"value_dim={value_dim} is outside 1..{latent_dim}, the dims of the latent")
        write_latents(kv_cache, latent_TR, metadata.slot_mapping_T)
        out_THV = q_THR.new_zeros(num_tokens, num_heads, value_dim)
        start = 0
        for row, (query_len, seq_len) in enumerate(zip(metadata.query_lens, metadata.seq_lens)):
            tokens = slice(start, start + query_len)
            first = _first_in_reach(seq_len - query_len, rule.window)
            latent_SR = gather_latents(kv_cache, metadata.block_table_RM[row], slice(first, seq_len))
            _attend(q_THR[tokens], latent_SR, rule, out_QHV=out_THV[tokens])
            start = tokens.stop
        return out_THV


def check_rule(rule: AttentionRule) -> None:
    """Raises ValueError for parts of a rule that no latent backend computes."""
    for name, value in (("soft_cap", rule.soft_cap), ("chunk", rule.chunk), ("sinks", rule.sinks_H)):
        if value is not None:
            raise ValueError(f"latent attention has no {name}; such a model needs AttentionBackend")


def write_latents(kv_cache: torch.Tensor, latent_TR: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store the step's latents at their slots; negative slots and tokens past the slots are padding."""
    block_size = kv_cache.shape[1]
    kept = slots_T >= 0
    slots = slots_T[kept]
    kv_cache[slots // block_size, slots % block_size] = latent_TR[: len(slots_T)][kept].to(kv_cache.dtype)


def gather_latents(kv_cache: torch.Tensor, block_table_M: torch.Tensor, reach: slice) -> torch.Tensor:
    """[S, R]: the latents at positions reach.start to reach.stop of one row, copied out of their pages."""
    block_size = kv_cache.shape[1]
    first_block = reach.start // block_size
    blocks = block_table_M[first_block : -(-reach.stop // block_size)]
    skipped = first_block * block_size
    pages = kv_cache.index_select(0, blocks)  # three times as fast as indexing, on CPUs
    return pages.flatten(0, 1)[reach.start - skipped : reach.stop - skipped]


def _attend(q_QHR: torch.Tensor, latent_SR: torch.Tensor, rule: AttentionRule, *, out_QHV: torch.Tensor) -> None:
    """Fill out_QHV: causal attention of a row whose Q queries are its last Q tokens, in tiles of queries."""
    num_queries, num_heads, _ = q_QHR.shape
    seq_len = len(latent_SR)
    dtype = torch.promote_types(q_QHR.dtype, torch.float32)
    latent_SR = latent_SR.to(dtype)
    tile_size = max(1, MAX_SCORES // (num_heads * max(seq_len, 1)))
    for start in range(0, num_queries, tile_size):
        stop = min(start + tile_size, num_queries)
        begin = _first_in_reach(seq_len - num_queries + start, rule.window)
        keys_SR = latent_SR[begin : seq_len - num_queries + stop]
        out_QHV[start:stop] = _attend_tile(q_QHR[start:stop].to(dtype), keys_SR, rule, out_QHV.shape[2])


def _attend_tile(q_QHR: torch.Tensor, latent_SR: torch.Tensor, rule: AttentionRule, value_dim: int) -> torch.Tensor:
    """[Q, H, V]: queries of the last Q of S tokens, each as far back as the window reaches."""
    num_queries, num_heads, _ = q_QHR.shape
    scores_QHS = (q_QHR.flatten(0, 1) @ latent_SR.T).view(num_queries, num_heads, -1).mul_(rule.scale)
    if num_queries > 1:
        positions_S = torch.arange(len(latent_SR), device=latent_SR.device)
        behind_QS = positions_S[-num_queries:, None] - positions_S
        is_hidden_QS = (behind_QS < 0) if rule.window is None else (behind_QS < 0) | (behind_QS >= rule.window)
        scores_QHS.masked_fill_(is_hidden_QS[:, None], -torch.inf)
    weights_QHS = scores_QHS.softmax(dim=-1)
    return (weights_QHS.flatten(0, 1) @ latent_SR[:, :value_dim]).view(num_queries, num_heads, value_dim)


def _first_in_reach(position: int, window: int | None) -> int:
    """The first position that the query at this one reads."""
    return 0 if window is None else max(0, position - window + 1)
