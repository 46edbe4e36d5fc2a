"""The Llama family as one layer with options: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 dense.

x ----------------+-- norm -- qkv -- (q/k norm) -- rotate -- attend -- out --(+)-- norm -- gate,up -- silu*
|                                                          |       ... -- down --(+)-- x'
+---------------- residual ---------------------------------+
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    GatedMlp,
    PreNormLayer,
    SelfAttention,
    layer_norms,
    read_attention,
)
from blockferry.engine.models.config import DecoderConfig, dense_config
from blockferry.engine.models.decoder import Build, Decoder
from blockferry.engine.models.layers import rope_table
from blockferry.engine.models.mtp import DraftLayer
from blockferry.engine.models.tape_source import DenseLayer, TapeSource


def build_llama(build: Build) -> Decoder:
    """One rank's part of a dense decoder. Raises ModelLoadError."""
    config, cos_sin = dense_config(build.header), _cos_sin(build)
    stage = [_Layer(build, number, config, cos_sin) for number in build.layer_numbers]
    return Decoder(build, [layer.whole for layer in stage], tape_source=_tape_source(build, config, stage, cos_sin))


def llama_draft_layers(build: Build, numbers: Sequence[int]) -> list[DraftLayer]:
    """Layers model.layers.NUMBER, each by itself. Raises as build_llama."""
    config, cos_sin = dense_config(build.header), _cos_sin(build)
    layers = [_Layer(build, number, config, cos_sin) for number in numbers]
    return [DraftLayer(layer=one.whole, source=_tape_source(build, config, [one], cos_sin)) for one in layers]


def _cos_sin(build: Build) -> torch.Tensor:
    config, placement = dense_config(build.header), build.weights.placement
    return rope_table(config.rope, head_dim=config.head_dim, max_len=placement.max_model_len).to(placement.device)


class _Layer:
    """One layer and its parts, which a tape needs one by one."""

    def __init__(self, build: Build, number: int, config: DecoderConfig, cos_sin: torch.Tensor) -> None:
        prefix = f"model.layers.{number}."
        shape = AttentionShape(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        options = AttentionOptions(
            has_qkv_bias=config.has_qkv_bias,
            has_out_bias=config.has_out_bias,
            norm_names=("q_norm", "k_norm") if config.has_qk_norm else None,
        )
        self.rule = build.rule(number, scale=config.head_dim**-0.5)
        self.attention = SelfAttention(
            build, number, read_attention(build, f"{prefix}self_attn.", shape, options), self.rule, cos_sin=cos_sin
        )
        self.mlp = GatedMlp(build, f"{prefix}mlp.", config.intermediate_size, has_bias=config.has_mlp_bias)
        self.whole = PreNormLayer(build, self.attention, self.mlp, norms=layer_norms(build, number))

    @property
    def weights(self) -> DenseLayer:
        """What a tape is recorded from."""
        parts = self.attention.parts
        return DenseLayer(
            attention_norm_E=self.whole.mixer_norm_E,
            qkv=parts.qkv,
            q_norm_D=parts.q_norm_D,
            k_norm_D=parts.k_norm_D,
            out=parts.out,
            mlp_norm_E=self.whole.feed_forward_norm_E,
            gate_up=self.mlp.gate_up,
            down=self.mlp.down,
        )


def _tape_source(build: Build, config: DecoderConfig, stage: list[_Layer], cos_sin: torch.Tensor) -> TapeSource | None:
    """None where ranks sum up between layers, or a layer does not see everything."""
    if build.place.tp_size > 1 or not stage or any(layer.rule.window is not None for layer in stage):
        return None
    return TapeSource(
        layers=[layer.weights for layer in stage],
        cos_sin=cos_sin,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_features=config.intermediate_size,
        norm_eps=build.header.norm_eps,
    )
