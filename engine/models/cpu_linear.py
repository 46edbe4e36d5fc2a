"""The layers.Linear of CPUs with matrix units: kernels.cpu_linear behind the model's protocol.

Legend: T tokens, E in features, F out features.
"""

from __future__ import annotations

import torch

from blockferry.engine.config import cache_dir
from blockferry.kernels.cpu_launch import Launcher, kernel_store
from blockferry.kernels.cpu_linear import TiledLinear, can_tile

__all__ = ["CpuLinear", "can_tile"]


class CpuLinear:
    """A bfloat16 layer that can_tile() takes. Keeps its own copy of the weight. Called by one thread."""

    def __init__(self, weight_FE: torch.Tensor, bias_F: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight_FE.shape
        self.dtype, self.device = weight_FE.dtype, weight_FE.device
        self.tiled = TiledLinear(Launcher(kernel_store(cache_dir() / "kernels")), weight_FE, bias_F)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self.tiled(x_TE)
