"""The GPU backend of latent attention: Triton kernels that write the step's latents and attend over them.

Launches only: reads nothing back from the device, so a step never waits here.

Legend: T tokens of the step, H query heads, B blocks, N block size, M blocks of the longest row, V value dim; R rows in
the metadata's names, the latent's dim in all others.
"""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionMetadata, AttentionRule, LatentBackend
from blockferry.engine.attention.latent import check_rule
from blockferry.engine.attention.step_parts import StepParts, split_step
from blockferry.kernels.fp8 import CacheScales
from blockferry.kernels.kv_write import kv_write
from blockferry.kernels.latent_decode import latent_decode
from blockferry.kernels.latent_prefill import latent_prefill


class TritonLatentAttention(LatentBackend):
    """Latent attention on a GPU. Called by the worker's model thread, on its current stream.

    Keeps the last step's parts, which every layer of a step shares.
    """

    def __init__(self) -> None:
        self._parts: StepParts | None = None

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
        """Returns [T, H, value_dim]; see LatentBackend. Tokens past num_tokens come back undefined.

        Raises ValueError for a rule that latent attention does not know, and for dims that the kernels do not cover.
        """
        check_rule(rule)
        if self._parts is None or self._parts.metadata is not metadata:
            self._parts = split_step(metadata)
        parts = self._parts
        _write(latent_TR, kv_cache, metadata.slot_mapping_T, rule.scales)
        num_tokens, num_heads, _ = q_THR.shape
        out_THV = q_THR.new_empty(num_tokens, num_heads, value_dim)
        num_decode_rows = metadata.num_decode_rows
        if num_decode_rows:
            latent_decode(
                q_THR[:num_decode_rows],
                kv_cache=kv_cache,
                block_table_RM=parts.decode_table_RM,
                seq_lens_R=parts.decode_seq_lens_R,
                total_seq_len=parts.total_decode_len,
                max_seq_len=parts.max_decode_len,
                scale=rule.scale,
                window=rule.window,
                out_RHV=out_THV[:num_decode_rows],
                scales=rule.scales,
            )
        if metadata.num_rows > num_decode_rows:
            latent_prefill(
                q_THR,
                kv_cache=kv_cache,
                block_table_RM=parts.prefill_table_RM,
                query_start_R1=parts.prefill_start_R1,
                seq_lens_R=parts.prefill_seq_lens_R,
                num_tokens=metadata.num_tokens - num_decode_rows,
                scale=rule.scale,
                window=rule.window,
                out_THV=out_THV,
                scales=rule.scales,
            )
        return out_THV


def _write(
    latent_TR: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor, scales: CacheScales | None
) -> None:
    """Store the latents: to the kernel that writes keys and values, halves of a latent are those of one head."""
    latent_dim = latent_TR.shape[1]
    if latent_dim % 2:
        raise ValueError(f"a latent of {latent_dim} dims is odd, the kernel writes halves; use the torch backend")
    first_TKD, second_TKD = latent_TR[:, None].chunk(2, dim=-1)
    kv_write(first_TKD, second_TKD, kv_cache=kv_cache[:, None], slot_mapping_T=slot_mapping_T, scales=scales)
