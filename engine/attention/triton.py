"""The GPU attention backend: Triton kernels that write the step into the pages and attend over them.

Owns no state. Launches only: reads nothing back from the device, so a step never waits here.

Legend: T tokens of the step, R rows, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata
from blockferry.kernels.kv_write import kv_write
from blockferry.kernels.paged_decode import paged_decode
from blockferry.kernels.paged_prefill import paged_prefill


class TritonAttention(AttentionBackend):
    """Paged attention on a GPU. Called by the worker's model thread, on its current stream."""

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
        kv_write(k_TKD, v_TKD, kv_cache=kv_cache, slot_mapping_T=metadata.slot_mapping_T)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        _decode(q_THD, kv_cache=kv_cache, metadata=metadata, scale=scale, out_THD=out_THD)
        _prefill(q_THD, kv_cache=kv_cache, metadata=metadata, scale=scale, out_THD=out_THD)
        return out_THD


def _decode(
    q_THD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out_THD: torch.Tensor,
) -> None:
    """The first num_decode_rows tokens, one of each row."""
    rows = slice(0, metadata.num_decode_rows)
    seq_lens = metadata.seq_lens[rows]
    if not seq_lens:
        return
    paged_decode(
        q_THD[rows],
        kv_cache=kv_cache,
        block_table_RM=metadata.block_table_RM[rows],
        seq_lens_R=metadata.seq_lens_R[rows],
        total_seq_len=sum(seq_lens),
        max_seq_len=max(seq_lens),
        scale=scale,
        out_RHD=out_THD[rows],
    )


def _prefill(
    q_THD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out_THD: torch.Tensor,
) -> None:
    """The rows after the decode rows; their query_start counts from the step's first token."""
    rows = slice(metadata.num_decode_rows, metadata.num_rows)
    paged_prefill(
        q_THD,
        kv_cache=kv_cache,
        block_table_RM=metadata.block_table_RM[rows],
        query_start_R1=metadata.query_start_R1[metadata.num_decode_rows : metadata.num_rows + 1],
        seq_lens_R=metadata.seq_lens_R[rows],
        num_tokens=metadata.num_tokens - metadata.num_decode_rows,
        scale=scale,
        out_THD=out_THD,
    )
