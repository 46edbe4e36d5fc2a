"""LayerOps on CPU: one jitted kernel per operation, in place where the protocol allows it.

Legend: T tokens, E hidden, F feed-forward, H heads (query or KV), K KV heads, D head dim.
"""

from __future__ import annotations

import torch

from blockferry.engine.config import cache_dir
from blockferry.engine.models.ops import LayerOps
from blockferry.kernels.cpu_launch import Launcher, kernel_store
from blockferry.kernels.cpu_rms_norm import RmsNorm
from blockferry.kernels.cpu_rotary import Rotary
from blockferry.kernels.cpu_silu_mul import SiluMul


class CpuOps(LayerOps):
    """Kernels for float32 and bfloat16; float16 and odd sizes take each kernel's torch oracle. One thread calls it.

    Kernels are compiled at their first use on a machine, about a second together, and kept in the cache folder.
    """

    def __init__(self) -> None:
        launcher = Launcher(kernel_store(cache_dir() / "kernels"))
        self._rms_norm = RmsNorm(launcher)
        self._silu_mul = SiluMul(launcher)
        self._rotary = Rotary(launcher)

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps; overwrites x and residual, or returns x as the residual."""
        if residual_TE is None:
            normed_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype)
            self._rms_norm.norm(x_TE[:, None], weight_E, eps, out_THD=normed_TE[:, None])
            return normed_TE, x_TE
        self._rms_norm.add_norm(x_TE, residual_TE, weight_E, eps)
        return x_TE, residual_TE

    def rms_norm_heads(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps; overwrites x."""
        return self._rms_norm.norm(x_THD, weight_D, eps, out_THD=x_THD)

    def silu_and_mul(self, x_T2F: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return self._silu_mul(x_T2F)

    def rotate(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """See LayerOps."""
        self._rotary(q_THD, k_TKD, cos_sin, positions_T)
