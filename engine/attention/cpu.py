"""The CPU attention backend: keys and values go into the pages, rows attend from them.

Owns no state. float32 computes scores and softmax in float32; half types accumulate in float32.

Legend: T tokens of the step, R rows, Q tokens of one row in this step, S tokens of one row in all (longest of a batch),
H query heads, K kv heads, D head dim, B blocks, N block size, M blocks of the longest row.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata


class CpuAttention(AttentionBackend):
    """Paged attention on CPU threads. Called by the worker's model thread only."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Returns [T, H, D]; see AttentionBackend. Tokens past num_tokens come back undefined."""
        write_pages(k_TKD, v_TKD, kv_cache, metadata.slot_mapping_T)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        num_decode_rows = metadata.num_decode_rows
        if num_decode_rows:
            out_THD[:num_decode_rows] = decode_padded(q_THD[:num_decode_rows], kv_cache, metadata, scale)
        start = num_decode_rows
        for row in range(num_decode_rows, metadata.num_rows):
            tokens = slice(start, start + metadata.query_lens[row])
            out_THD[tokens] = prefill_row(
                q_THD[tokens], kv_cache, metadata.block_table_RM[row], seq_len=metadata.seq_lens[row], scale=scale
            )
            start = tokens.stop
        return out_THD


def write_pages(k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Store keys and values at their slots; negative slots are padding."""
    block_size = kv_cache.shape[2]
    kv_TKC = torch.cat((k_TKD, v_TKD), dim=-1)[: len(slot_mapping_T)]
    if len(slot_mapping_T) and int(slot_mapping_T.min()) < 0:
        kept = slot_mapping_T >= 0
        kv_TKC, slot_mapping_T = kv_TKC[kept], slot_mapping_T[kept]
    block_T = torch.div(slot_mapping_T, block_size, rounding_mode="floor")
    kv_cache[block_T, :, slot_mapping_T - block_T * block_size] = kv_TKC


def decode_padded(
    q_RHD: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """[R, H, D]: one query per row, every row padded to the longest."""
    num_rows, head_dim, block_size = len(q_RHD), q_RHD.shape[2], kv_cache.shape[2]
    max_seq_len = max(metadata.seq_lens[:num_rows])
    num_columns = -(-max_seq_len // block_size)
    seq_lens_R = metadata.seq_lens_R[:num_rows, None]
    in_use_RM = torch.arange(num_columns) * block_size < seq_lens_R
    blocks_RM = metadata.block_table_RM[:num_rows, :num_columns].where(in_use_RM, 0)
    kv_RKSC = kv_cache[blocks_RM].transpose(1, 2).flatten(2, 3)
    visible_RS = torch.arange(kv_RKSC.shape[2]) < seq_lens_R
    # a masked weight of 0 times an undefined inf or NaN of an unwritten slot would still be NaN
    kv_RKSC = kv_RKSC.masked_fill(~visible_RS[:, None, :, None], 0)
    out_RH1D = functional.scaled_dot_product_attention(
        q_RHD[:, :, None],
        kv_RKSC[..., :head_dim],
        kv_RKSC[..., head_dim:],
        attn_mask=visible_RS[:, None, None],
        scale=scale,
        enable_gqa=True,
    )
    return out_RH1D[:, :, 0]


def prefill_row(
    q_QHD: torch.Tensor, kv_cache: torch.Tensor, block_table_M: torch.Tensor, *, seq_len: int, scale: float
) -> torch.Tensor:
    """[Q, H, D]: causal attention of the last Q of a row's seq_len tokens."""
    num_queries, head_dim, block_size = len(q_QHD), q_QHD.shape[2], kv_cache.shape[2]
    blocks = block_table_M[: -(-seq_len // block_size)]
    kv_KSC = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
    mask_QS = None
    if 1 < num_queries < seq_len:
        last_Q = torch.arange(seq_len - num_queries, seq_len)
        mask_QS = torch.arange(seq_len) <= last_Q[:, None]
    out_1HQD = functional.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        kv_KSC[None, ..., :head_dim],
        kv_KSC[None, ..., head_dim:],
        attn_mask=mask_QS,
        is_causal=num_queries == seq_len > 1,
        scale=scale,
        enable_gqa=True,
    )
    return out_1HQD[0].transpose(0, 1)
