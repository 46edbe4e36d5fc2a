"""Llama 4 (text): chunked attention with rotary embedding, full attention without, routed experts and a shared one.

Queries and keys of rotated layers are scaled to unit length after the rotation; queries of the others grow with their
position ("temperature tuning").

Legend: T tokens, E hidden, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionParts,
    AttentionShape,
    FeedForward,
    GatedMlp,
    PreNormLayer,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.config import rope_config
from blockferry.engine.models.decoder import Build, Decoder
from blockferry.engine.models.layers import Linear, rope_table
from blockferry.engine.models.moe import SparseMlp, SparseParts, Weighting, read_routed_experts
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes, StackedLayout
from blockferry.engine.models.routing import top_k_sigmoid
from blockferry.engine.models.step import Step

_THETA = 500000.0


def build_llama4(build: Build) -> Decoder:
    """One rank's part of a Llama4ForCausalLM. Raises ModelLoadError or ConfigError."""
    config, header = build.config, build.header
    rotated, sparse = _rotated_layers(build), _sparse_layers(build)
    shape = AttentionShape(
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=config.integer("num_key_value_heads", default=config.integer("num_attention_heads")),
        head_dim=config.integer("head_dim", default=header.hidden_size // config.integer("num_attention_heads")),
    )
    rope, placement = rope_config(header.values, header.max_positions, theta=_THETA), build.weights.placement
    cos_sin = rope_table(rope, head_dim=shape.head_dim, max_len=placement.max_model_len).to(placement.device)
    layers = []
    for number in build.layer_numbers:
        attention = Llama4Attention(build, number, shape, cos_sin=cos_sin if number in rotated else None)
        feed_forward = _feed_forward(build, number, is_sparse=number in sparse)
        layers.append(PreNormLayer(build, attention, feed_forward, norms=layer_norms(build, number)))
    return Decoder(build, layers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale * log(1 + floor((p + 1) / floor_scale))."""

    scale: float
    floor_scale: float

    def at(self, positions_T: torch.Tensor) -> torch.Tensor:
        """float32 [T]."""
        return torch.log1p(torch.floor((positions_T.float() + 1.0) / self.floor_scale)) * self.scale + 1.0


class Llama4Attention:
    """The Mixer of one layer."""

    def __init__(self, build: Build, layer: int, shape: AttentionShape, *, cos_sin: torch.Tensor | None) -> None:
        """cos_sin is layers.rope_table's; None: the layer knows no positions."""
        placement = build.weights.placement
        has_bias = build.config.flag("attention_bias", default=False)
        options = AttentionOptions(has_qkv_bias=has_bias, has_out_bias=has_bias, rotates_neighbours=cos_sin is not None)
        self._parts: AttentionParts = read_attention(build, f"model.layers.{layer}.self_attn.", shape, options)
        self._layer = layer
        self._rule: AttentionRule = build.rule(layer, scale=shape.head_dim**-0.5)
        self._ops = build.ops
        self._eps = build.header.norm_eps
        self._reduce = build.communicator.all_reduce
        self._cos_sin = cos_sin
        self._unit_D: torch.Tensor | None = None
        self._temperature: Temperature | None = None
        if cos_sin is not None:
            if build.config.flag("use_qk_norm", default=True):
                self._unit_D = torch.ones(shape.head_dim, dtype=placement.dtype, device=placement.device)
        elif build.config.flag("attn_temperature_tuning", default=True):
            self._temperature = Temperature(
                scale=build.config.number("attn_scale", default=0.1),
                floor_scale=build.config.number("floor_scale", default=8192.0, above=0.0),
            )

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [self._parts.qkv, self._parts.out]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        parts = self._parts
        sizes = [len(parts.heads.query), len(parts.heads.kv), len(parts.heads.kv)]
        qkv_TXD = parts.qkv(x_TE).view(len(x_TE), sum(sizes), parts.shape.head_dim)
        q_THD, k_TKD, v_TKD = qkv_TXD.split_with_sizes(sizes, 1)
        if self._cos_sin is not None:
            self._ops.rotate(q_THD, k_TKD, self._cos_sin, step.positions_T)
        if self._unit_D is not None:
            q_THD = self._ops.rms_norm_heads(q_THD, self._unit_D, self._eps)
            k_TKD = self._ops.rms_norm_heads(k_TKD, self._unit_D, self._eps)
        if self._temperature is not None:
            q_THD = (q_THD * self._temperature.at(step.positions_T)[:, None, None]).to(q_THD.dtype)
        attended_THD = step.caches.attend(self._layer, q_THD, k_TKD, v_TKD, self._rule)
        return self._reduce(parts.out(attended_THD.flatten(1)))


def _feed_forward(build: Build, layer: int, *, is_sparse: bool) -> FeedForward:
    config, prefix = build.config, f"model.layers.{layer}.feed_forward."
    if not is_sparse:
        return GatedMlp(build, prefix, config.integer("intermediate_size_mlp", default=16384))
    size = config.integer("intermediate_size")
    shapes = ExpertShapes(
        num_experts=config.integer("num_local_experts", default=16),
        hidden_size=build.header.hidden_size,
        feed_forward_size=size,
    )
    names = ExpertNames(prefix=f"{prefix}experts", stacked=StackedLayout.COLUMNS)
    parts = SparseParts(
        router=build.weights.linear(f"{prefix}router", (shapes.num_experts, shapes.hidden_size)),
        route=functools.partial(top_k_sigmoid, num_chosen=config.integer("num_experts_per_tok", default=1)),
        experts=read_routed_experts(build, names, shapes, weighting=Weighting.INPUT),
        shared=GatedMlp(build, f"{prefix}shared_expert.", size),
    )
    return SparseMlp(build, parts)


def _rotated_layers(build: Build) -> set[int]:
    """no_rope_layers says 1 where a layer is rotated, whatever its name; else every n-th layer is not."""
    flags = build.config.integers("no_rope_layers")
    if flags is None:
        interval = build.config.integer("no_rope_layer_interval", default=4)
        flags = [int((number + 1) % interval != 0) for number in range(build.header.num_layers)]
    return {number for number, flag in enumerate(flags) if flag}


def _sparse_layers(build: Build) -> set[int]:
    named = build.config.integers("moe_layers")
    if named is not None:
        return set(named)
    interval = build.config.integer("interleave_moe_layer_step", default=1)
    return set(range(interval - 1, build.header.num_layers, interval))
