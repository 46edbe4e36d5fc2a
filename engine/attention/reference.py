"""The plain-torch attention backend: what every other backend is tested against. Exact and simple, not fast.

Owns nothing. Gathers each row's pages, computes the whole score matrix in float32 (float64 for float64 inputs)
and never reads an entry beyond the row's sequence length, nor one that no query of the row reaches.

Legend: T tokens of the step, Q tokens of one row in this step, S tokens of one row in all, H query heads, K kv heads,
G query heads per kv head, D head dim, B blocks, N block size.
"""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionRule


class ReferenceAttention(AttentionBackend):
    """Paged attention, one row at a time, with dense scores."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Returns [T, H, D] in q's dtype; see AttentionBackend. Tokens past num_tokens come back as zeros."""
        _write(kv_cache, k_TKD, v_TKD, metadata.slot_mapping_T)
        out_THD = torch.zeros_like(q_THD)
        start = 0
        for row in range(metadata.num_rows):
            query_len, seq_len = metadata.query_lens[row], metadata.seq_lens[row]
            last_Q = torch.arange(seq_len - query_len, seq_len, device=q_THD.device)
            first_Q = _first_keys(rule, last_Q)
            keys_S = torch.arange(int(first_Q[0]), seq_len, device=q_THD.device)
            kv_KSC = _gather(kv_cache, metadata.block_table_RM[row], keys_S)
            seen_QS = (keys_S >= first_Q[:, None]) & (keys_S <= last_Q[:, None])
            rows = slice(start, start + query_len)
            out_THD[rows] = _attend(q_THD[rows], kv_KSC, seen_QS, rule)
            start += query_len
        return out_THD


def _write(kv_cache: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store the step's keys and values at their slots; negative slots are padding."""
    block_size = kv_cache.shape[2]
    kept = slots_T >= 0
    slots = slots_T[kept]
    kv_TKC = torch.cat([k_TKD[: len(slots_T)], v_TKD[: len(slots_T)]], dim=-1)[kept]
    kv_cache[slots // block_size, :, slots % block_size] = kv_TKC.to(kv_cache.dtype)


def _first_keys(rule: AttentionRule, last_Q: torch.Tensor) -> torch.Tensor:
    """[Q]: the first position that each query reads; last_Q is the query's own. Never falls from query to query."""
    first_Q = torch.zeros_like(last_Q)
    if rule.window is not None:
        first_Q = torch.maximum(first_Q, last_Q - rule.window + 1)
    if rule.chunk is not None:
        first_Q = torch.maximum(first_Q, last_Q - last_Q % rule.chunk)
    return first_Q


def _gather(kv_cache: torch.Tensor, blocks_M: torch.Tensor, keys_S: torch.Tensor) -> torch.Tensor:
    """[K, S, 2*D]: one row's tokens at the given positions, copied out of its pages."""
    block_size = kv_cache.shape[2]
    return kv_cache[blocks_M[keys_S // block_size].long(), :, keys_S % block_size].transpose(0, 1)


def _attend(q_QHD: torch.Tensor, kv_KSC: torch.Tensor, seen_QS: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Softmax attention of one row's queries over the keys that each of them sees."""
    num_queries, num_heads, head_dim = q_QHD.shape
    num_kv_heads, num_keys, _ = kv_KSC.shape
    dtype = torch.promote_types(q_QHD.dtype, torch.float32)
    k_KSD, v_KSD = kv_KSC.to(dtype).chunk(2, dim=-1)
    q_QKGD = q_QHD.to(dtype).reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_KGQS = torch.einsum("qkgd,ksd->kgqs", q_QKGD, k_KSD) * rule.scale
    if rule.soft_cap is not None:
        scores_KGQS = rule.soft_cap * torch.tanh(scores_KGQS / rule.soft_cap)
    scores_KGQS = scores_KGQS.masked_fill(~seen_QS, -torch.inf)
    if rule.sinks_H is not None:  # one key more, whose value is zero
        sinks_KG11 = rule.sinks_H.to(dtype).view(num_kv_heads, -1, 1, 1)
        scores_KGQS = torch.cat([scores_KGQS, sinks_KG11.expand(-1, -1, num_queries, 1)], dim=-1)
    weights_KGQS = scores_KGQS.softmax(dim=-1)[..., :num_keys]
    return torch.einsum("kgqs,ksd->qkgd", weights_KGQS, v_KSD).flatten(1, 2).to(q_QHD.dtype)
