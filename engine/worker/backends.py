"""Picks the kernels of a device: the one place that knows which attention backends and layer ops exist."""

from __future__ import annotations

import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.config import Device, DType
from blockferry.engine.models.cpu_decode import TapedDecode, can_tape
from blockferry.engine.models.cpu_ops import CpuOps
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.registry import CausalModel
from blockferry.engine.worker.model_runner import LayerByLayer, LayerCompute

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


def layer_compute(
    device: Device, model: CausalModel, attention: AttentionBackend, pages: list[torch.Tensor]
) -> LayerCompute:
    """How a stage's layers are computed: whole decode steps in one call where the CPU can, else layer by layer."""
    by_layer = LayerByLayer(model, attention, pages)
    if device is Device.CPU and can_tape(model, pages):
        return TapedWhereAccepted(TapedDecode(model, pages), by_layer)
    return by_layer


class TapedWhereAccepted:
    """Decode steps on tape, all others layer by layer."""

    def __init__(self, taped: TapedDecode, otherwise: LayerCompute) -> None:
        self._taped = taped
        self._otherwise = otherwise

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """See LayerCompute."""
        compute = self._taped if self._taped.accepts(metadata) else self._otherwise
        return compute.forward(x_TE, positions_T, metadata)
