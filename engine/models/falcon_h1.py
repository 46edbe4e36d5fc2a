"""Falcon-H1: attention and Mamba-2 side by side in every layer, with fixed factors almost everywhere.

    x --+-- norm --+-- * attention_in -- attention -- * attention_out --(+)--(+)-- norm -- gated MLP --(+)-- x'
        |          +-- * ssm_in ------- Mamba-2 ----- * ssm_out ---------+    |                         |
        +------------------------- residual ----------------------------------+------- residual --------+

The key's factor is part of the attention's scale: scores are linear in keys, and rotating changes no lengths.

Legend: T tokens, E hidden, F feed-forward shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    GatedMlp,
    PreNormLayer,
    SelfAttention,
    attention_shape,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.config import rope_config
from blockferry.engine.models.decoder import Build, Decoder, Ends
from blockferry.engine.models.layers import Linear, rope_table
from blockferry.engine.models.mamba import GateOrder, Mamba2Mixer, Mamba2Options, mamba2_shape
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.step import Step

_NORM_NAMES = ("input_layernorm", "pre_ff_layernorm")


def build_falcon_h1(build: Build) -> Decoder:
    """One rank's part of a FalconH1ForCausalLM. Raises ModelLoadError or ConfigError."""
    header, placement = build.header, build.weights.placement
    shape = attention_shape(build)
    rope = rope_config(header.values, header.max_positions)
    cos_sin = rope_table(rope, head_dim=shape.head_dim, max_len=placement.max_model_len).to(placement.device)
    layers = [
        PreNormLayer(
            build,
            ParallelMixer(
                _attention(build, number, shape, cos_sin),
                Mamba2Mixer(build, number, mamba2_shape(build), _mamba_options(build)),
                factors=_mixer_factors(build),
                build=build,
            ),
            ScaledMlp(build, f"model.layers.{number}.feed_forward."),
            norms=layer_norms(build, number, names=_NORM_NAMES),
        )
        for number in build.layer_numbers
    ]
    ends = Ends(
        norm_name="model.final_layernorm.weight",
        embedding_scale=_factor(build, "embedding_multiplier"),
        logit_scale=_factor(build, "lm_head_multiplier"),
    )
    return Decoder(build, layers, ends=ends)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixerFactors:
    """Of the inputs and outputs of a layer's two mixers."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0


class ParallelMixer:
    """Attention and Mamba-2 over the same input, added up before the ranks are."""

    def __init__(self, attention: SelfAttention, mamba: Mamba2Mixer, *, factors: MixerFactors, build: Build) -> None:
        self._attention = attention
        self._mamba = mamba
        self._factors = factors
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [*self._attention.linears, *self._mamba.linears]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        factors = self._factors
        y_TE = self._mamba.partial(x_TE * factors.mamba_in, step) * factors.mamba_out
        y_TE += self._attention.partial(x_TE * factors.attention_in, step) * factors.attention_out
        return self._reduce(y_TE)


class ScaledMlp:
    """A gated MLP with a factor on the gate before silu and one on the output."""

    def __init__(self, build: Build, prefix: str) -> None:
        """Raises ModelLoadError or ConfigError."""
        gate_factor, self._out_factor = _factors(build, "mlp_multipliers", 2)
        self._mlp = GatedMlp(
            build,
            prefix,
            build.config.integer("intermediate_size", default=14336),
            has_bias=build.config.flag("mlp_bias", default=False),
            activate=ScaledSilu(ops=build.ops, factor=gate_factor),
        )
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See FeedForward."""
        return self._mlp.linears

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See FeedForward."""
        return self._reduce(self._mlp.partial(x_TE) * self._out_factor)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSilu:
    """silu(factor * gate) * up."""

    ops: LayerOps
    factor: float

    def __call__(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """Returns [T, F]; overwrites the gates."""
        gate_up_T2F[:, : gate_up_T2F.shape[1] // 2] *= self.factor
        return self.ops.silu_and_mul(gate_up_T2F)


def _attention(build: Build, layer: int, shape: AttentionShape, cos_sin: torch.Tensor) -> SelfAttention:
    has_bias = build.config.flag("attention_bias", default=False)
    options = AttentionOptions(has_qkv_bias=has_bias, has_out_bias=has_bias)
    parts = read_attention(build, f"model.layers.{layer}.self_attn.", shape, options)
    scale = _factor(build, "key_multiplier") * shape.head_dim**-0.5
    return SelfAttention(build, layer, parts, build.rule(layer, scale=scale), cos_sin=cos_sin)


def _mamba_options(build: Build) -> Mamba2Options:
    config = build.config
    order = None
    if config.flag("mamba_rms_norm", default=False):
        is_norm_first = config.flag("mamba_norm_before_gate", default=True)
        order = GateOrder.NORM_THEN_GATE if is_norm_first else GateOrder.GATE_THEN_NORM
    z, x, b, c, dt = _factors(build, "ssm_multipliers", 5)
    return Mamba2Options(
        gate_order=order,
        has_out_bias=config.flag("projectors_bias", default=False),
        feature_scales=(z, x, b, c, dt),
    )


def _mixer_factors(build: Build) -> MixerFactors:
    return MixerFactors(
        attention_in=_factor(build, "attention_in_multiplier"),
        attention_out=_factor(build, "attention_out_multiplier"),
        mamba_in=_factor(build, "ssm_in_multiplier"),
        mamba_out=_factor(build, "ssm_out_multiplier"),
    )


def _factor(build: Build, name: str) -> float:
    return build.config.number(name, default=1.0)


def _factors(build: Build, name: str, count: int) -> list[float]:
    """`count` of them, all 1 where the config has none. Raises ConfigError."""
    return build.config.numbers(name, count=count) or [1.0] * count
