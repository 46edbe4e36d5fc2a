"""LFM2: short convolutions in most layers, attention with norms of each head in the others.

    x -- in -- b, c, x -- b * x -- causal convolution -- c * -- out

Legend: T tokens, E hidden, C this rank's channels, W taps, w = W - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    GatedMlp,
    Mixer,
    MlpNames,
    PreNormLayer,
    SelfAttention,
    layer_norms,
    read_attention,
    share,
)
from blockferry.engine.models.config import rope_config
from blockferry.engine.models.decoder import Build, Decoder, Ends
from blockferry.engine.models.layers import Linear, rope_table
from blockferry.engine.models.sharding import Span
from blockferry.engine.models.step import Step
from blockferry.engine.models.weights import Projection

_THETA = 1000000.0


def build_lfm2(build: Build) -> Decoder:
    """One rank's part of an Lfm2ForCausalLM. Raises ModelLoadError or ConfigError."""
    values, header, placement = build.header.values, build.header, build.weights.placement
    config = build.config
    num_heads = config.integer("num_attention_heads")
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default=num_heads),
        head_dim=config.integer("head_dim", default=header.hidden_size // num_heads),
    )
    rope = rope_config(values, header.max_positions, theta=_THETA)
    cos_sin = rope_table(rope, head_dim=shape.head_dim, max_len=placement.max_model_len).to(placement.device)
    layers = []
    for number in build.layer_numbers:
        prefix = f"model.layers.{number}."
        mixer: Mixer
        if number in build.reaches:
            options = AttentionOptions(norm_names=("q_layernorm", "k_layernorm"), out_name="out_proj")
            parts = read_attention(build, f"{prefix}self_attn.", shape, options)
            mixer = SelfAttention(build, number, parts, build.rule(number, scale=shape.head_dim**-0.5), cos_sin=cos_sin)
        else:
            mixer = ShortConvolution(build, number)
        names = MlpNames(gate="w1", up="w3", down="w2")
        mlp = GatedMlp(build, f"{prefix}feed_forward.", feed_forward_size(values), names=names)
        norms = layer_norms(build, number, names=("operator_norm", "ffn_norm"))
        layers.append(PreNormLayer(build, mixer, mlp, norms=norms))
    return Decoder(build, layers, ends=Ends(norm_name="model.embedding_norm.weight"))


def feed_forward_size(values: Mapping[str, Any]) -> int:
    """Features of the MLP: two thirds of what the config says, scaled and rounded up, where it says so."""
    config = ModelConfig(values)
    size = config.integer("intermediate_size", "block_ff_dim")
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    factor = config.number("block_ffn_dim_multiplier", default=1.0, above=0.0)
    if values.get("block_ffn_dim_multiplier", factor) is None:  # null: not rounded either
        return size
    multiple = config.integer("block_multiple_of", default=256)
    return multiple * -(-int(factor * size) // multiple)


class ShortConvolution:
    """A gated causal convolution over a few tokens, channel by channel."""

    def __init__(self, build: Build, layer: int) -> None:
        weights, hidden_size = build.weights, build.header.hidden_size
        prefix, has_bias = f"model.layers.{layer}.conv.", build.config.flag("conv_bias", default=False)
        channels = share(hidden_size, build, "convolution channels")
        num_taps = build.config.integer("conv_L_cache", default=3)
        parts = [
            Span(start=part * hidden_size + channels.start, stop=part * hidden_size + channels.stop)
            for part in range(3)
        ]
        self._in = weights.column_parallel(
            [Projection(name=f"{prefix}in_proj", size=3 * hidden_size, rows=parts)], hidden_size, has_bias=has_bias
        )
        self._out = weights.row_parallel(f"{prefix}out_proj", (hidden_size, hidden_size), channels, has_bias=has_bias)
        self._weight_CW = weights.matrix(f"{prefix}conv.weight", (hidden_size, 1, num_taps), rows=[channels])[:, 0]
        self._bias_C = weights.vector(f"{prefix}conv.bias", hidden_size, part=channels) if has_bias else None
        self._layer = layer
        self._ops = build.state_ops
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [self._in, self._out]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        states = step.caches.states(self._layer)
        b_TC, c_TC, x_TC = self._in(x_TE).chunk(3, dim=-1)
        mixed_TC = self._ops.causal_conv(
            b_TC * x_TC, self._weight_CW, self._bias_C, state_BCw=states.tensors[0], metadata=states.metadata
        )
        return self._reduce(self._out(c_TC * mixed_TC))
