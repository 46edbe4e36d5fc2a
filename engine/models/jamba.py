"""Jamba: Mamba-1 in most layers, attention that is told no positions in the others, experts in every other layer."""

from __future__ import annotations

import functools

from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.blocks import (
    FeedForward,
    GatedMlp,
    Mixer,
    PreNormLayer,
    SelfAttention,
    attention_shape,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.decoder import Build, Decoder, Ends
from blockferry.engine.models.mamba import Mamba1Mixer
from blockferry.engine.models.moe import SparseMlp, SparseParts, read_routed_experts
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes
from blockferry.engine.models.routing import softmax_top_k

_NORM_NAMES = ("input_layernorm", "pre_ff_layernorm")


def build_jamba(build: Build) -> Decoder:
    """One rank's part of a JambaForCausalLM. Raises ModelLoadError or ConfigError."""
    layers = [
        PreNormLayer(
            build,
            _mixer(build, number),
            _feed_forward(build, number),
            norms=layer_norms(build, number, names=_NORM_NAMES),
        )
        for number in build.layer_numbers
    ]
    return Decoder(build, layers, ends=Ends(norm_name="model.final_layernorm.weight"))


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts."""
    period = config.integer("expert_layer_period", default=2)
    return layer % period == config.count("expert_layer_offset", default=1) and _num_experts(config) > 1


def _mixer(build: Build, layer: int) -> Mixer:
    if layer not in build.reaches:
        return Mamba1Mixer(build, layer)
    shape = attention_shape(build)
    parts = read_attention(build, f"model.layers.{layer}.self_attn.", shape)
    return SelfAttention(build, layer, parts, build.rule(layer, scale=shape.head_dim**-0.5), cos_sin=None)


def _feed_forward(build: Build, layer: int) -> FeedForward:
    config, prefix = build.config, f"model.layers.{layer}.feed_forward."
    size = config.integer("intermediate_size", default=14336)
    if not is_sparse(config, layer):
        return GatedMlp(build, prefix, size)
    shapes = ExpertShapes(
        num_experts=_num_experts(config), hidden_size=build.header.hidden_size, feed_forward_size=size
    )
    parts = SparseParts(
        router=build.weights.linear(f"{prefix}router", (shapes.num_experts, shapes.hidden_size)),
        route=functools.partial(softmax_top_k, num_chosen=config.integer("num_experts_per_tok", default=2)),
        experts=read_routed_experts(build, ExpertNames(prefix=f"{prefix}experts"), shapes),
    )
    return SparseMlp(build, parts)


def _num_experts(config: ModelConfig) -> int:
    return config.integer("num_experts", "num_local_experts", default=16)
