"""Picks the kernels of a device: the one place that knows which attention backends and layer ops exist."""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionBackend
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.config import Device, DType
from blockferry.engine.models.cpu_ops import CpuOps
from blockferry.engine.models.ops import LayerOps

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def attention_backend(device: Device) -> AttentionBackend:
    """The attention backend of a device."""
    if device is Device.CPU:
        return CpuAttention()
    from blockferry.engine.attention.triton import TritonAttention  # loads Triton, which CPU workers never need

    return TritonAttention()


def layer_ops(device: Device) -> LayerOps:
    """The layer operations of a device."""
    if device is Device.CPU:
        return CpuOps()
    from blockferry.engine.models.triton_ops import TritonOps  # loads Triton, which CPU workers never need

    return TritonOps()
