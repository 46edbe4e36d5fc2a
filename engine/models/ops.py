"""The small operations between linear layers: the seam behind which a device puts its own kernels.

Owns no state. Linear layers and attention are elsewhere (layers.py, engine/attention).

Legend: T tokens, E hidden, F feed-forward, H heads (query or KV), K KV heads, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class LayerOps(Protocol):
    """What a decoder layer needs beside its linear layers and attention. One thread calls it."""

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (normed, residual'): residual' = x (+ residual), normed = rmsnorm(residual') * weight.

        Computed in float32, returned in x's dtype. x and residual may be overwritten or returned; without a
        residual, x keeps its values.
        """

    def rms_norm_heads(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over each head; the last dim is contiguous. May overwrite x and return it."""

    def silu_and_mul(self, x_T2F: torch.Tensor) -> torch.Tensor:
        """Returns silu(x[:, :F]) * x[:, F:], shape [T, F]."""

    def rotate(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """Rotate q and k in place, halves against each other (NeoX style).

        cos_sin is float32 [max_len, W]: cosines of the W/2 frequencies, then sines; where W < D, only the first W dims
        of a head are rotated. positions_T is int64.
        """


class TorchOps:
    """Plain torch on any device: the oracle of faster implementations, in transformers' order of operations."""

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        residual_TE = x_TE if residual_TE is None else residual_TE + x_TE
        return _rms_norm(residual_TE, weight_E, eps), residual_TE

    def rms_norm_heads(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps."""
        return _rms_norm(x_THD, weight_D, eps)

    def silu_and_mul(self, x_T2F: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
        return functional.silu(gate_TF) * up_TF

    def rotate(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """See LayerOps."""
        cos_T1h, sin_T1h = cos_sin[positions_T].unsqueeze(1).chunk(2, dim=-1)
        for x_THW in (q_THD[..., : cos_sin.shape[1]], k_TKD[..., : cos_sin.shape[1]]):
            first, second = x_THW.float().chunk(2, dim=-1)
            rotated = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h)
            x_THW.copy_(torch.cat(rotated, dim=-1))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x_float = x.float()
    scale = torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x_float * scale).to(x.dtype)
