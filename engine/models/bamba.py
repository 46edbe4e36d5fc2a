"""Bamba: Mamba-2 in most layers, attention that rotates half of each head in the others."""

from __future__ import annotations

import torch

from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    GatedMlp,
    Mixer,
    PreNormLayer,
    SelfAttention,
    attention_shape,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.config import partial_rope_config
from blockferry.engine.models.decoder import Build, Decoder, Ends
from blockferry.engine.models.layers import rope_table
from blockferry.engine.models.mamba import Mamba2Mixer, Mamba2Options, mamba2_shape

_NORM_NAMES = ("input_layernorm", "pre_ff_layernorm")
_ROTATED_PART = 0.5  # where rope_parameters do not say, as in transformers


def build_bamba(build: Build) -> Decoder:
    """One rank's part of a BambaForCausalLM. Raises ModelLoadError or ConfigError."""
    config, header, placement = build.config, build.header, build.weights.placement
    rope = partial_rope_config({**header.values, "partial_rotary_factor": _ROTATED_PART}, header.max_positions)
    shape = attention_shape(build)
    cos_sin = rope_table(rope, head_dim=shape.head_dim, max_len=placement.max_model_len).to(placement.device)
    size, has_bias = config.integer("intermediate_size", default=14336), config.flag("mlp_bias", default=False)
    layers = [
        PreNormLayer(
            build,
            _mixer(build, number, shape, cos_sin),
            GatedMlp(build, f"model.layers.{number}.feed_forward.", size, has_bias=has_bias),
            norms=layer_norms(build, number, names=_NORM_NAMES),
        )
        for number in build.layer_numbers
    ]
    return Decoder(build, layers, ends=Ends(norm_name="model.final_layernorm.weight"))


def _mixer(build: Build, layer: int, shape: AttentionShape, cos_sin: torch.Tensor) -> Mixer:
    config = build.config
    if layer not in build.reaches:
        options = Mamba2Options(has_out_bias=config.flag("mamba_proj_bias", default=False))
        return Mamba2Mixer(build, layer, mamba2_shape(build), options)
    has_bias = config.flag("attention_bias", default=False)
    biases = AttentionOptions(has_qkv_bias=has_bias, has_out_bias=has_bias)
    parts = read_attention(build, f"model.layers.{layer}.self_attn.", shape, biases)
    return SelfAttention(build, layer, parts, build.rule(layer, scale=shape.head_dim**-0.5), cos_sin=cos_sin)
