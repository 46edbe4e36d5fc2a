"""LayerOps on a GPU: the small operations of a decoder layer as Triton kernels.

Owns no state; launches only.

Legend: T tokens, E hidden, F feed-forward, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import torch

from blockferry.engine.models.ops import LayerOps
from blockferry.kernels import rms_norm, rotary, silu_mul


class TritonOps(LayerOps):
    """Triton kernels in transformers' order of operations. Called by the worker's model thread."""

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps; the residual is overwritten."""
        if residual_TE is None:
            return rms_norm.rms_norm(x_TE, weight_E, eps), x_TE
        return rms_norm.add_rms_norm(x_TE, residual_TE, weight_E, eps), residual_TE

    def rms_norm_heads(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps."""
        return rms_norm.rms_norm_heads(x_THD, weight_D, eps)

    def silu_and_mul(self, x_T2F: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return silu_mul.silu_mul(x_T2F)

    def rotate(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """See LayerOps."""
        rotary.rotate(q_THD, k_TKD, cos_sin=cos_sin, positions_T=positions_T)
