"""The plain-torch attention backend: what every other backend is tested against. Exact and simple, not fast.

Owns nothing. Gathers each row's pages, computes the whole score matrix in float32 (float64 for float64 inputs)
and never reads an entry beyond the row's sequence length.

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
        scale = rule.scale
        _write(kv_cache, k_TKD, v_TKD, metadata.slot_mapping_T)
        out_THD = torch.zeros_like(q_THD)
        start = 0
        for row in range(metadata.num_rows):
            query_len, seq_len = metadata.query_lens[row], metadata.seq_lens[row]
            kv_KSC = _gather(kv_cache, metadata.block_table_RM[row], seq_len)
            rows = slice(start, start + query_len)
            out_THD[rows] = _attend(q_THD[rows], kv_KSC, scale)
            start += query_len
        return out_THD


def _write(kv_cache: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store the step's keys and values at their slots; negative slots are padding."""
    block_size = kv_cache.shape[2]
    kept = slots_T >= 0
    slots = slots_T[kept]
    kv_TKC = torch.cat([k_TKD[: len(slots_T)], v_TKD[: len(slots_T)]], dim=-1)[kept]
    kv_cache[slots // block_size, :, slots % block_size] = kv_TKC.to(kv_cache.dtype)


def _gather(kv_cache: torch.Tensor, blocks_M: torch.Tensor, seq_len: int) -> torch.Tensor:
    """[K, S, 2*D]: the first seq_len tokens of one row, copied out of its pages."""
    block_size = kv_cache.shape[2]
    blocks = blocks_M[: -(-seq_len // block_size)].long()
    return kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]


def _attend(q_QHD: torch.Tensor, kv_KSC: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal softmax attention of one row whose Q queries are its last Q tokens."""
    num_queries, num_heads, head_dim = q_QHD.shape
    num_kv_heads, seq_len, _ = kv_KSC.shape
    dtype = torch.promote_types(q_QHD.dtype, torch.float32)
    k_KSD, v_KSD = kv_KSC.to(dtype).chunk(2, dim=-1)
    q_QKGD = q_QHD.to(dtype).reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,ksd->kgqs", q_QKGD, k_KSD) * scale
    last_Q = torch.arange(seq_len - num_queries, seq_len, device=q_QHD.device)
    hidden_QS = torch.arange(seq_len, device=q_QHD.device) > last_Q[:, None]
    weights = scores.masked_fill(hidden_QS, -torch.inf).softmax(dim=-1)
    return torch.einsum("kgqs,ksd->qkgd", weights, v_KSD).flatten(1, 2).to(q_QHD.dtype)
