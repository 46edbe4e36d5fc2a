"""The GPU attention backend: Triton kernels that write the step into the pages and attend over them.

Launches only: reads nothing back from the device, so a step never waits here.

Legend: T tokens of the step, R rows, H query heads, K kv heads, D head dim, M blocks of the longest row.
"""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionRule
from blockferry.engine.attention.step_parts import StepParts, split_step
from blockferry.kernels.kv_write import kv_write
from blockferry.kernels.paged_decode import paged_decode
from blockferry.kernels.paged_prefill import paged_prefill


class TritonAttention(AttentionBackend):
    """Paged attention on a GPU. Called by the worker's model thread, on its current stream.

    Keeps the last step's parts, which every layer of a step shares.
    """

    def __init__(self) -> None:
        self._parts: StepParts | None = None

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
        """Returns [T, H, D]; see AttentionBackend. Tokens past num_tokens come back undefined."""
        if self._parts is None or self._parts.metadata is not metadata:
            self._parts = split_step(metadata)
        parts = self._parts
        kv_write(k_TKD, v_TKD, kv_cache=kv_cache, slot_mapping_T=metadata.slot_mapping_T, scales=rule.scales)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        num_decode_rows = metadata.num_decode_rows
        if num_decode_rows:
            paged_decode(
                q_THD[:num_decode_rows],
                kv_cache=kv_cache,
                block_table_RM=parts.decode_table_RM,
                seq_lens_R=parts.decode_seq_lens_R,
                total_seq_len=parts.total_decode_len,
                max_seq_len=parts.max_decode_len,
                rule=rule,
                out_RHD=out_THD[:num_decode_rows],
            )
        if metadata.num_rows > num_decode_rows:
            paged_prefill(
                q_THD,
                kv_cache=kv_cache,
                block_table_RM=parts.prefill_table_RM,
                query_start_R1=parts.prefill_start_R1,
                seq_lens_R=parts.prefill_seq_lens_R,
                num_tokens=metadata.num_tokens - num_decode_rows,
                rule=rule,
                out_THD=out_THD,
            )
        return out_THD
