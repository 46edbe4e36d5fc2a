"""Picks the kernels of a device: the one place that knows which attention backends and layer ops exist."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockferry.engine.attention.base import AttentionBackend, LatentBackend
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.attention.fp8 import ScaledAttention, ScaledLatentAttention
from blockferry.engine.attention.latent import TorchLatentAttention
from blockferry.engine.config import Device, DType
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.models.cpu_decode import TapedDecode, can_tape
from blockferry.engine.models.cpu_draft import TapedModule, can_tape_module
from blockferry.engine.models.cpu_ops import CpuOps
from blockferry.engine.models.decoder import Decoder
from blockferry.engine.models.mtp import Drafter
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.state_ops import StateOps
from blockferry.engine.models.state_passes import StateOpsInPasses
from blockferry.engine.models.step import LayerDone
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.worker.draft_compute import DraftCompute, LayeredDrafts, TapedDrafts
from blockferry.engine.worker.inputs import EncoderInput
from blockferry.engine.worker.model_runner import LayerByLayer, LayerCompute
from blockferry.engine.worker.page_views import TORCH_BLOCKS, BlockOps
from blockferry.engine.worker.paged_caches import GroupMetadata, PagedCaches

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def attention_backend(device: Device, cache_dtype: CacheDType = CacheDType.AUTO) -> AttentionBackend:
    """The attention backend of a device for keys and values of a type."""
    if device is Device.CPU:
        return ScaledAttention(CpuAttention()) if cache_dtype is CacheDType.FP8 else CpuAttention()
    from blockferry.engine.attention.triton import TritonAttention  # loads Triton, which CPU workers never need

    return TritonAttention()


def latent_backend(device: Device, cache_dtype: CacheDType = CacheDType.AUTO) -> LatentBackend:
    """The latent-attention backend of a device for latents of a type."""
    if device is Device.CPU:
        backend = TorchLatentAttention()
        return ScaledLatentAttention(backend) if cache_dtype is CacheDType.FP8 else backend
    from blockferry.engine.attention.triton_latent import TritonLatentAttention  # loads Triton, as above

    return TritonLatentAttention()


def layer_ops(device: Device) -> LayerOps:
    """The layer operations of a device."""
    if device is Device.CPU:
        return CpuOps()
    from blockferry.engine.models.triton_ops import TritonOps  # loads Triton, which CPU workers never need

    return TritonOps()


def state_ops(device: Device) -> StateOps:
    """The recurrences of a device, drafts included."""
    del device
    return StateOpsInPasses(TorchStateOps())


def block_ops(device: Device) -> BlockOps:
    """How a device copies and clears whole blocks."""
    if device is Device.CPU:
        return TORCH_BLOCKS
    from blockferry.kernels.block_pack import block_copy, block_zero  # loads Triton, which CPU workers never need

    return BlockOps(copy=block_copy, zero=block_zero)


def layer_compute(device: Device, model: Decoder, caches: PagedCaches, layer_done: LayerDone) -> LayerCompute:
    """How a stage's layers are computed: whole decode steps in one call where the CPU can, else layer by layer."""
    if device is not Device.CPU:  # a layer that was launched is not done
        return LayerByLayer(model, caches)
    by_layer = LayerByLayer(model, caches, layer_done)
    pages = [caches.pages.attention[number].tensors[0] for number in sorted(caches.pages.attention)]
    if can_tape(model, pages):
        group = caches.pages.attention[model.shard.layers.start].group  # all layers that can be taped are of one
        return TapedWhereAccepted(TapedDecode(model, pages), group, by_layer)
    return by_layer


def draft_compute(device: Device, drafter: Drafter, caches: PagedCaches) -> DraftCompute:
    """How a stage's modules that draft are computed, likewise."""
    by_layer = LayeredDrafts(drafter, caches)
    pages = [caches.pages.attention[module.number] for module in drafter.modules]
    if device is not Device.CPU:
        return by_layer
    if all(can_tape_module(module, one.tensors[0]) for module, one in zip(drafter.modules, pages, strict=True)):
        taped = [TapedModule(drafter, depth, one.tensors[0]) for depth, one in enumerate(pages)]
        return TapedDrafts(taped, [one.group for one in pages], by_layer)
    return by_layer


class TapedWhereAccepted:
    """Decode steps on tape, all others layer by layer."""

    def __init__(self, taped: TapedDecode, group: int, otherwise: LayerCompute) -> None:
        self._taped = taped
        self._group = group
        self._otherwise = otherwise

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, metadata: Sequence[GroupMetadata]) -> torch.Tensor:
        """See LayerCompute."""
        attention = metadata[self._group].attention
        if attention is not None and self._taped.accepts(attention):
            return self._taped.forward(x_TE, positions_T, attention)
        return self._otherwise.forward(x_TE, positions_T, metadata)

    def encode(self, encoder_input: EncoderInput) -> None:
        """See LayerCompute."""
        self._otherwise.encode(encoder_input)
