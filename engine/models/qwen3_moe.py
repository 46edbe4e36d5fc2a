"""Qwen3-MoE: the Llama family's attention with norms of each head, and routed experts in place of most MLPs."""

from __future__ import annotations

import functools

from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    FeedForward,
    GatedMlp,
    PreNormLayer,
    SelfAttention,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.config import check_activation, rope_config
from blockferry.engine.models.decoder import Build, Decoder
from blockferry.engine.models.layers import rope_table
from blockferry.engine.models.moe import SparseMlp, SparseParts, experts_per_token, read_routed_experts
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes
from blockferry.engine.models.routing import softmax_top_k, softmax_top_k_normalised


def build_qwen3_moe(build: Build) -> Decoder:
    """One rank's part of a Qwen3MoeForCausalLM. Raises ModelLoadError or ConfigError."""
    config, header, placement = build.config, build.header, build.weights.placement
    check_activation(config)
    num_heads = config.integer("num_attention_heads", default=32)
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default=4),
        head_dim=config.integer("head_dim", default=header.hidden_size // num_heads),
    )
    has_bias = config.flag("attention_bias", default=False)
    options = AttentionOptions(has_qkv_bias=has_bias, has_out_bias=has_bias, norm_names=("q_norm", "k_norm"))
    rope = rope_config(header.values, header.max_positions)
    cos_sin = rope_table(rope, head_dim=shape.head_dim, max_len=placement.max_model_len).to(placement.device)
    layers = []
    for number in build.layer_numbers:
        parts = read_attention(build, f"model.layers.{number}.self_attn.", shape, options)
        rule = build.rule(number, scale=shape.head_dim**-0.5)
        attention = SelfAttention(build, number, parts, rule, cos_sin=cos_sin)
        layers.append(PreNormLayer(build, attention, _feed_forward(build, number), norms=layer_norms(build, number)))
    return Decoder(build, layers)


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts."""
    if not _num_experts(config):
        return False
    step = config.integer("decoder_sparse_step", default=1)
    return layer not in (config.integers("mlp_only_layers") or []) and (layer + 1) % step == 0


def _num_experts(config: ModelConfig) -> int:
    return config.count("num_experts", "num_local_experts", default=128)


def _feed_forward(build: Build, layer: int) -> FeedForward:
    config, prefix = build.config, f"model.layers.{layer}.mlp."
    if not is_sparse(config, layer):
        return GatedMlp(build, prefix, config.integer("intermediate_size", default=6144))
    shapes = ExpertShapes(
        num_experts=_num_experts(config),
        hidden_size=build.header.hidden_size,
        feed_forward_size=config.integer("moe_intermediate_size", default=768),
    )
    route = softmax_top_k_normalised if config.flag("norm_topk_prob", default=False) else softmax_top_k
    parts = SparseParts(
        router=build.weights.linear(f"{prefix}gate", (shapes.num_experts, shapes.hidden_size)),
        route=functools.partial(route, num_chosen=experts_per_token(config, shapes.num_experts, default=8)),
        experts=read_routed_experts(build, ExpertNames(prefix=f"{prefix}experts"), shapes),
    )
    return SparseMlp(build, parts)
