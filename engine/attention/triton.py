"""The GPU attention backend: Triton kernels that write the step into the pages and attend over them.

Launches only: reads nothing back from the device, so a step never waits here.

Legend: T tokens of the step, R rows, H query heads, K kv heads, D head dim, M blocks of the longest row.
"""

from __future__ import annotations

import dataclasses

import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionRule
from blockferry.kernels.kv_write import kv_write
from blockferry.kernels.paged_decode import paged_decode
from blockferry.kernels.paged_prefill import paged_prefill


class TritonAttention(AttentionBackend):
    """Paged attention on a GPU. Called by the worker's model thread, on its current stream.

    Keeps the last step's parts, which every layer of a step shares.
    """

    def __init__(self) -> None:
        self._parts: _StepParts | None = None

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
            self._parts = _split(metadata)
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StepParts:
    """A step's decode rows, one token each, and the prefill rows after them."""

    metadata: AttentionMetadata
    decode_table_RM: torch.Tensor
    decode_seq_lens_R: torch.Tensor
    total_decode_len: int
    max_decode_len: int
    prefill_table_RM: torch.Tensor
    prefill_seq_lens_R: torch.Tensor
    prefill_start_R1: torch.Tensor  # counts from the step's first token, so its first entry is num_decode_rows


def _split(metadata: AttentionMetadata) -> _StepParts:
    decode = slice(0, metadata.num_decode_rows)
    prefill = slice(metadata.num_decode_rows, metadata.num_rows)
    decode_lens = metadata.seq_lens[decode]
    return _StepParts(
        metadata=metadata,
        decode_table_RM=metadata.block_table_RM[decode],
        decode_seq_lens_R=metadata.seq_lens_R[decode],
        total_decode_len=sum(decode_lens),
        max_decode_len=max(decode_lens, default=0),
        prefill_table_RM=metadata.block_table_RM[prefill],
        prefill_seq_lens_R=metadata.seq_lens_R[prefill],
        prefill_start_R1=metadata.query_start_R1[metadata.num_decode_rows : metadata.num_rows + 1],
    )
