"""gpt-oss: attention with sinks, every other layer through a window, YaRN, and experts with biases."""

from __future__ import annotations

import dataclasses
import functools

import torch

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    PreNormLayer,
    SelfAttention,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.config import rope_config, rope_kind, rope_scaling
from blockferry.engine.models.decoder import Build, Decoder
from blockferry.engine.models.layers import rope_table
from blockferry.engine.models.moe import ClampedSwiglu, SparseMlp, SparseParts, experts_per_token, read_routed_experts
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes, StackedLayout
from blockferry.engine.models.routing import top_k_softmax
from blockferry.engine.models.yarn import yarn_config, yarn_table

_THETA = 150000.0
_DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def build_gpt_oss(build: Build) -> Decoder:
    """One rank's part of a GptOssForCausalLM. Raises ModelLoadError or ConfigError."""
    config = build.config
    shape = AttentionShape(
        num_heads=config.integer("num_attention_heads", default=64),
        num_kv_heads=config.integer("num_key_value_heads", default=8),
        head_dim=config.integer("head_dim", default=64),
    )
    has_bias = config.flag("attention_bias", default=True)
    options = AttentionOptions(has_qkv_bias=has_bias, has_out_bias=has_bias)
    cos_sin = _cos_sin(build, shape.head_dim)
    layers = []
    for number in build.layer_numbers:
        prefix = f"model.layers.{number}."
        parts = read_attention(build, f"{prefix}self_attn.", shape, options)
        sinks_H = build.weights.float_vector(f"{prefix}self_attn.sinks", shape.num_heads, part=parts.heads.query)
        rule = dataclasses.replace(build.rule(number, scale=shape.head_dim**-0.5), sinks_H=sinks_H)
        attention = SelfAttention(build, number, parts, rule, cos_sin=cos_sin)
        layers.append(
            PreNormLayer(build, attention, _experts(build, f"{prefix}mlp."), norms=layer_norms(build, number))
        )
    return Decoder(build, layers)


def _experts(build: Build, prefix: str) -> SparseMlp:
    config, checkpoint = build.config, build.weights.checkpoint
    if f"{prefix}experts.gate_up_proj_blocks" in checkpoint:
        raise ModelLoadError(f"{checkpoint.path}: experts in MXFP4 are not supported; use a checkpoint in bfloat16")
    shapes = ExpertShapes(
        num_experts=config.integer("num_local_experts", "num_experts", default=128),
        hidden_size=build.header.hidden_size,
        feed_forward_size=config.integer("intermediate_size", default=2880),
        has_bias=True,
    )
    activation = ClampedSwiglu(
        alpha=config.number("swiglu_alpha", default=1.702), limit=config.number("swiglu_limit", default=7.0, above=0.0)
    )
    names = ExpertNames(prefix=f"{prefix}experts", stacked=StackedLayout.ALTERNATING_COLUMNS)
    parts = SparseParts(
        router=build.weights.linear(f"{prefix}router", (shapes.num_experts, shapes.hidden_size), has_bias=True),
        route=functools.partial(top_k_softmax, num_chosen=experts_per_token(config, shapes.num_experts, default=4)),
        experts=read_routed_experts(build, names, shapes, activation=activation),
    )
    return SparseMlp(build, parts)


def _cos_sin(build: Build, head_dim: int) -> torch.Tensor:
    values, header, placement = build.header.values, build.header, build.weights.placement
    scaling = rope_scaling(values)
    scaling = scaling if scaling.names() else ModelConfig(_DEFAULT_ROPE)
    theta = build.config.number("rope_theta", default=_THETA, above=1.0)
    if rope_kind(scaling) == "yarn":
        yarn = yarn_config(scaling, theta=theta, max_positions=header.max_positions)
        table = yarn_table(yarn, head_dim=head_dim, max_len=placement.max_model_len)
    else:
        rope = rope_config(values, header.max_positions, theta=theta)
        table = rope_table(rope, head_dim=head_dim, max_len=placement.max_model_len)
    return table.to(placement.device)
