"""Gemma 2 and Gemma 3 (text): windows in most layers, norms before and after attention and MLP.

    x --+-- norm -- attention -- norm --(+)--+-- norm -- gelu(gate) * up -- down -- norm --(+)-- x'
        |                                |   |                                          |
        +------------ residual ----------+   +---------------- residual ----------------+

Gemma 3 norms each head of q and k and rotates by other frequencies in layers with a window; Gemma 2 caps its scores.
Norm weights are stored relative to one, embeddings scaled by the root of the hidden size.

Legend: T tokens, E hidden, F feed-forward shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    FeedForward,
    GatedMlp,
    Mixer,
    SelfAttention,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.config import RopeConfig, rope_config
from blockferry.engine.models.decoder import Build, Decoder, Ends
from blockferry.engine.models.layers import Linear, rope_table
from blockferry.engine.models.moe import gated_gelu_tanh
from blockferry.engine.models.step import Step

_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_LOCAL_THETA = 10000.0
_HEAD_DIM = 256


def build_gemma(build: Build) -> Decoder:
    """One rank's part. Raises ModelLoadError, and ConfigError for what is not supported."""
    config = build.config
    activation = config.text("hidden_activation", config.text("hidden_act", "gelu_pytorch_tanh"))
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(
            "config.json", f"hidden_activation={activation} is not supported; supported: gelu_pytorch_tanh"
        )
    if config.has("use_bidirectional_attention"):
        raise ConfigError(
            "config.json", "use_bidirectional_attention is not supported; use a checkpoint that attends causally"
        )
    soft_cap = config.find_number("final_logit_softcapping", above=0.0)
    is_local = {number: _is_local(build, number) for number in build.layer_numbers}
    tables = {kind: _cos_sin(build, is_local=kind) for kind in set(is_local.values())}
    layers = [_layer(build, number, tables[is_local[number]]) for number in build.layer_numbers]
    # transformers rounds the factor to the weights' dtype
    scale = torch.tensor(build.header.hidden_size**0.5, dtype=build.weights.placement.dtype).item()
    return Decoder(build, layers, ends=Ends(embedding_scale=scale, norm_offset=1.0, logit_soft_cap=soft_cap))


def _is_local(build: Build, number: int) -> bool:
    """Whether a layer rotates by the frequencies of layers with a window, which Gemma 2 has not apart."""
    return build.header.architecture.startswith("Gemma3") and build.rule(number, scale=1.0).window is not None


def _cos_sin(build: Build, *, is_local: bool) -> torch.Tensor:
    placement = build.weights.placement
    rope = _rope_of(build.header.values, build.header.max_positions, is_local=is_local)
    head_dim = build.config.integer("head_dim", default=_HEAD_DIM)
    return rope_table(rope, head_dim=head_dim, max_len=placement.max_model_len).to(placement.device)


def _layer(build: Build, number: int, cos_sin: torch.Tensor) -> SandwichLayer:
    config, prefix = build.config, f"model.layers.{number}."
    is_gemma3 = build.header.architecture.startswith("Gemma3")
    shape = AttentionShape(
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", default=_HEAD_DIM),
    )
    has_bias = config.flag("attention_bias", default=False)
    options = AttentionOptions(
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        norm_names=("q_norm", "k_norm") if is_gemma3 else None,
        norm_offset=1.0,
    )
    rule = dataclasses.replace(
        build.rule(number, scale=config.number("query_pre_attn_scalar", default=256.0, above=0.0) ** -0.5),
        soft_cap=config.find_number("attn_logit_softcapping", above=0.0),
    )
    return SandwichLayer(
        build,
        SelfAttention(
            build, number, read_attention(build, f"{prefix}self_attn.", shape, options), rule, cos_sin=cos_sin
        ),
        GatedMlp(build, f"{prefix}mlp.", config.integer("intermediate_size"), activate=gated_gelu_tanh),
        norms=(
            *layer_norms(build, number, names=_NORMS, offset=1.0),
            *layer_norms(build, number, names=_POST_NORMS, offset=1.0),
        ),
    )


def _rope_of(values: Mapping[str, Any], max_positions: int, *, is_local: bool) -> RopeConfig:
    """New checkpoints name frequencies per kind of layer; old ones have rope_local_base_freq beside rope_theta."""
    config, kind = ModelConfig(values), "sliding_attention" if is_local else "full_attention"
    if config.mapping("rope_parameters").mapping(kind).names():
        return rope_config({"rope_parameters": values["rope_parameters"][kind]}, max_positions)
    if is_local:
        return RopeConfig(theta=config.number("rope_local_base_freq", default=_LOCAL_THETA, above=0.0))
    return rope_config(values, max_positions)


class SandwichLayer:
    """Norms on both sides of the mixer and of the feed-forward part; see the module's drawing."""

    def __init__(
        self,
        build: Build,
        mixer: Mixer,
        feed_forward: FeedForward,
        *,
        norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """norms: weights [E] before the mixer, before the feed-forward part, after the mixer, after the other."""
        self._mixer = mixer
        self._feed_forward = feed_forward
        self._before_mixer_E, self._before_other_E, self._after_mixer_E, self._after_other_E = norms
        self._norm = build.ops.add_rms_norm
        self._eps = build.header.norm_eps

    @property
    def linears(self) -> Sequence[Linear]:
        """See Layer."""
        return [*self._mixer.linears, *self._feed_forward.linears]

    def forward(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Layer."""
        x_TE, residual_TE = self._norm(x_TE, residual_TE, self._before_mixer_E, self._eps)
        x_TE, _ = self._norm(self._mixer(x_TE, step), None, self._after_mixer_E, self._eps)
        x_TE, residual_TE = self._norm(x_TE, residual_TE, self._before_other_E, self._eps)
        x_TE, _ = self._norm(self._feed_forward(x_TE), None, self._after_other_E, self._eps)
        return x_TE, residual_TE
