"""Scales of a cache in fp8 that a checkpoint brings, and how peers are told of scales.

    NAME.layers.3.self_attn.k_scale      per tensor, [] or [1], or per KV head of all ranks, [heads]
    NAME.layers.3.self_attn.v_scale      a latent's is its k_scale

Reads a checkpoint once and owns nothing. The names are those that vLLM reads (vllm/model_executor/model_loader/
weight_utils.py, maybe_remap_kv_scale_name), also with `attn.` or the projection's name before them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from blockferry.connectors.base import ContentKind, PoolLayout
from blockferry.engine.errors import ModelLoadError
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, LayerSpec
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.sharding import Span
from blockferry.kernels.fp8 import CacheScales

WIRE_DTYPE = "float8_e4m3fn"
_DRAFTS = "mtp."  # layers that draft, numbered for themselves
_NAME = re.compile(rf"(?!{re.escape(_DRAFTS)})(?:.*\.)?layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")


def stored_scales(
    path: Path, layers: Mapping[int, LayerSpec], numbers: Sequence[int], *, kv_heads: Span, device: torch.device
) -> dict[int, CacheScales] | None:
    """Scales per layer id of `layers`, of this rank's heads; None unless the checkpoint has k and v of every layer.

    Args:
        path: the model's folder.
        layers: those that attend, by layer id; of all pipeline stages, so that all ranks decide alike.
        numbers: the checkpoint's layer number of every layer id.
        kv_heads: this rank's.
        device: where the scales shall lie.

    Raises:
        ModelLoadError: scales of another shape, or not positive and finite.
    """
    checkpoint = Checkpoint(path)
    found = {(int(match[1]), match[2]): name for name in checkpoint.names if (match := _NAME.match(name)) is not None}
    wanted = {layer_id: (numbers[layer_id], "k" if is_latent(spec) else "v") for layer_id, spec in layers.items()}
    if not all((number, "k") in found and (number, kind) in found for number, kind in wanted.values()):
        return None
    scales = {}
    for layer_id, (number, kind) in wanted.items():
        heads = None if is_latent(layers[layer_id]) else kv_heads
        k_K, v_K = (_read(checkpoint, found[number, one], heads).to(device) for one in ("k", kind))
        scales[layer_id] = CacheScales(k_K=k_K, v_K=v_K)
    checkpoint.close()
    return scales


def is_latent(spec: LayerSpec) -> bool:
    """Whether a layer that attends stores latents."""
    return not (isinstance(spec, AttentionSpec) and isinstance(spec.content, KVContent))


def scaled_layouts(layouts: Sequence[PoolLayout], scales: Mapping[int, CacheScales]) -> tuple[PoolLayout, ...]:
    """Layouts of a pool whose keys, values and latents are fp8; states stay as they are."""
    return tuple(
        layout if layout.content is ContentKind.STATE else _scaled_layout(layout, scales) for layout in layouts
    )


def scales_in(layouts: Sequence[PoolLayout]) -> dict[int, CacheScales]:
    """Per layer id, what scaled_layouts put into them, in host memory."""
    found = {}
    for layout in layouts:
        if layout.scales:
            values = np.frombuffer(layout.scales, "<f4").astype(np.float32)
            scales_LK2 = torch.from_numpy(values).view(len(layout.layer_ids), layout.num_heads, 2)
            for layer_id, scales_K2 in zip(layout.layer_ids, scales_LK2, strict=True):
                found[layer_id] = CacheScales(k_K=scales_K2[:, 0], v_K=scales_K2[:, 1])
    return found


def _scaled_layout(layout: PoolLayout, scales: Mapping[int, CacheScales]) -> PoolLayout:
    parts = [torch.stack((scales[i].k_K, scales[i].v_K), dim=-1).cpu() for i in layout.layer_ids]
    packed = b"".join(part.numpy().astype("<f4").tobytes() for part in parts)
    return dataclasses.replace(layout, dtype=WIRE_DTYPE, scales=packed)


def _read(checkpoint: Checkpoint, name: str, heads: Span | None) -> torch.Tensor:
    """float32 [K] of one tensor."""
    value = checkpoint.tensor(name).float().flatten()
    if not bool((value.isfinite() & (value > 0)).all()):
        raise ModelLoadError(f"{checkpoint.path}: tensor {name} holds scales that are not positive: {value.tolist()}")
    if heads is None:
        heads = Span(start=0, stop=1)
    if len(value) == 1:
        return value.repeat(len(heads))
    if len(value) < heads.stop:
        raise ModelLoadError(
            f"{checkpoint.path}: tensor {name} has {len(value)} scales, fewer than the layer's KV heads "
            f"(at least {heads.stop}); use one, or one per KV head"
        )
    return value[heads.start : heads.stop].contiguous()
