"""Which tensors the CPU kernels read directly. Everything else takes the torch oracle beside each kernel."""

from __future__ import annotations

import torch

from blockferry.kernels.cpu_emit import Element

_ELEMENTS = {torch.float32: Element.FLOAT32, torch.bfloat16: Element.BFLOAT16}


def element_of(tensor: torch.Tensor) -> Element | None:
    """How the tensor's numbers lie in memory, or None for a dtype that the kernels do not have."""
    return _ELEMENTS.get(tensor.dtype)


def has_dense_heads(x_THD: torch.Tensor) -> bool:
    """Whether each token's [H, D] is one contiguous range, whatever lies between tokens."""
    head_dim = x_THD.shape[2]
    return x_THD.stride(2) == 1 and x_THD.stride(1) == head_dim
