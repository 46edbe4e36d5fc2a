"""BART: an encoder that reads the whole input at once, and a decoder whose layers attend to what it made of it.

    encoder   tokens -- embedding + position -- norm -- [attend to all -- feed forward] * layers --.
                                                                                                   |  k, v of each
    decoder   tokens -- embedding + position -- norm -- [attend -- attend to the input -- feed forward] * layers -- head

Every [part] is x' = norm(x + part(x)): norms come after (Lewis et al., BART, 2019). The encoder keeps nothing; its
output becomes keys and values of each decoder layer's cross attention, once per sequence. Every pipeline stage holds
the whole encoder and computes it for its own layers' cross attention: its output is needed on all of them, once.
Tensor-parallel ranks share heads and feed-forward features as elsewhere.

Legend: T tokens, N tokens of an encoder's input, E hidden, F feed-forward shard, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.errors import ConfigError
from blockferry.engine.models.blocks import (
    AttentionOptions,
    AttentionShape,
    FeedForward,
    Mixer,
    SelfAttention,
    read_attention,
)
from blockferry.engine.models.decoder import Build, Decoder, Ends
from blockferry.engine.models.layers import Linear
from blockferry.engine.models.sharding import Span, split_evenly
from blockferry.engine.models.step import Caches, Step
from blockferry.engine.models.weights import Projection, features_of

_EPS = 1e-5  # in no config.json
_POSITION_OFFSET = 2  # rows of the position tables that no position uses
_OPTIONS = AttentionOptions(has_qkv_bias=True, has_out_bias=True, out_name="out_proj")
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
}


def build_bart(build: Build) -> Decoder:
    """One rank's part of the decoder, and the encoder. Raises ModelLoadError, ConfigError."""
    if not build.header.has_tied_embeddings:
        raise ConfigError(
            "config.json", "tie_word_embeddings=false is not supported; encoder, decoder and head share one"
        )
    layers = [_DecoderLayer(build, number) for number in build.layer_numbers]
    start = [_Positions(build, "model.decoder.")] if build.shard.is_first_stage else []
    is_scaled = build.config.flag("scale_embedding", default=False)
    return Decoder(
        build,
        [*start, *layers],
        ends=Ends(
            embedding_name="model.shared.weight",
            embedding_scale=math.sqrt(build.header.hidden_size) if is_scaled else None,
            norm_name=None,
            logit_bias_name="final_logits_bias",
        ),
        encoder=_Encoder(build, [layer.cross for layer in layers]),
    )


class _LayerNorm:
    """Mean and variance in float32; weight and bias [E]."""

    def __init__(self, build: Build, name: str) -> None:
        size = build.header.hidden_size
        self._weight_E = build.weights.vector(f"{name}.weight", size)
        self._bias_E = build.weights.vector(f"{name}.bias", size)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x_TE, self._weight_E.shape, self._weight_E, self._bias_E, _EPS)


class _Positions:
    """Where a stack begins: embeddings with their learned positions, normed. The decoder's is its first layer."""

    linears: Sequence[Linear] = ()

    def __init__(self, build: Build, prefix: str) -> None:
        shape = (build.header.max_positions + _POSITION_OFFSET, build.header.hidden_size)
        rows = [Span(start=_POSITION_OFFSET, stop=shape[0])]
        self._table_PE = build.weights.matrix(f"{prefix}embed_positions.weight", shape, rows=rows)
        self._norm = _LayerNorm(build, f"{prefix}layernorm_embedding")

    def forward(self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, None]:
        """See decoder.Layer."""
        assert residual_TE is None, "nothing comes before"
        return self.place(x_TE, step.positions_T), None

    def place(self, x_TE: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, E] with positions [T] (int64) added, normed."""
        return self._norm(x_TE + self._table_PE[positions_T])


class _FeedForward:
    """fc2(activation(fc1(x)))."""

    def __init__(self, build: Build, prefix: str, size: int) -> None:
        name = build.config.text("activation_function", "gelu")
        if name not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ConfigError("config.json", f"activation_function={name} is not supported; supported: {known}")
        self._activate = _ACTIVATIONS[name]
        part, hidden_size = split_evenly(size, build.place.tp_rank, build.place.tp_size), build.header.hidden_size
        first = Projection(name=f"{prefix}fc1", size=size, rows=[part])
        self._up = build.weights.column_parallel([first], hidden_size, has_bias=True)
        self._down = build.weights.row_parallel(f"{prefix}fc2", (hidden_size, size), part, has_bias=True)
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See blocks.FeedForward."""
        return [self._up, self._down]

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See blocks.FeedForward. Leaves x as it is."""
        return self._reduce(self._down(self._activate(self._up(x_TE))))


class _CrossAttention:
    """Attention from the decoder's tokens to the encoder's output: q of the one, k and v of the other."""

    def __init__(self, build: Build, layer: int, prefix: str, shape: AttentionShape) -> None:
        heads, hidden_size, size = shape.split(build), build.header.hidden_size, shape.num_heads * shape.head_dim
        part = features_of(heads.query, shape.head_dim)
        q, k, v = (Projection(name=f"{prefix}{name}_proj", size=size, rows=[part]) for name in "qkv")
        self._q = build.weights.column_parallel([q], hidden_size, has_bias=True)
        self._kv = build.weights.column_parallel([k, v], hidden_size, has_bias=True)
        self._out = build.weights.row_parallel(f"{prefix}out_proj", (hidden_size, size), part, has_bias=True)
        self._reduce = build.communicator.all_reduce
        self._layer = layer
        self._head_shape = (len(heads.query), shape.head_dim)
        self._rule = AttentionRule(scale=shape.head_dim**-0.5)

    @property
    def linears(self) -> Sequence[Linear]:
        """See blocks.Mixer: without k and v, which the decoder's tokens do not pass."""
        return [self._q, self._out]

    def keep(self, encoded_NE: torch.Tensor, caches: Caches) -> None:
        """Write keys and values of an encoded input."""
        k_NHD, v_NHD = self._kv(encoded_NE).view(len(encoded_NE), 2, *self._head_shape).unbind(1)
        caches.write_cross(self._layer, k_NHD, v_NHD)

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See blocks.Mixer. Leaves x as it is."""
        q_THD = self._q(x_TE).view(len(x_TE), *self._head_shape)
        attended_THD = step.caches.attend_cross(self._layer, q_THD, self._rule)
        return self._reduce(self._out(attended_THD.flatten(1)))


class _DecoderLayer:
    """See the module's drawing."""

    def __init__(self, build: Build, number: int) -> None:
        prefix = f"model.decoder.layers.{number}."
        shape = _shape(build, "decoder_attention_heads")
        parts = read_attention(build, f"{prefix}self_attn.", shape, _OPTIONS)
        rule = build.rule(number, scale=shape.head_dim**-0.5)
        self._attention: Mixer = SelfAttention(build, number, parts, rule, cos_sin=None)
        self._attention_norm = _LayerNorm(build, f"{prefix}self_attn_layer_norm")
        self.cross = _CrossAttention(build, number, f"{prefix}encoder_attn.", shape)
        self._cross_norm = _LayerNorm(build, f"{prefix}encoder_attn_layer_norm")
        self._feed_forward: FeedForward = _FeedForward(build, prefix, build.config.integer("decoder_ffn_dim"))
        self._feed_forward_norm = _LayerNorm(build, f"{prefix}final_layer_norm")

    @property
    def linears(self) -> Sequence[Linear]:
        """See decoder.Layer."""
        return [*self._attention.linears, *self.cross.linears, *self._feed_forward.linears]

    def forward(self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, None]:
        """See decoder.Layer."""
        assert residual_TE is None, "norms come after the sum"
        x_TE = self._attention_norm(x_TE + self._attention(x_TE, step))
        x_TE = self._cross_norm(x_TE + self.cross(x_TE, step))
        return self._feed_forward_norm(x_TE + self._feed_forward(x_TE)), None


class _EncoderLayer:
    """Attention of every token to every token, then the feed-forward part."""

    def __init__(self, build: Build, number: int) -> None:
        prefix = f"model.encoder.layers.{number}."
        self._parts = read_attention(build, f"{prefix}self_attn.", _shape(build, "encoder_attention_heads"), _OPTIONS)
        self._reduce = build.communicator.all_reduce
        self._attention_norm = _LayerNorm(build, f"{prefix}self_attn_layer_norm")
        self._feed_forward = _FeedForward(build, prefix, build.config.integer("encoder_ffn_dim"))
        self._feed_forward_norm = _LayerNorm(build, f"{prefix}final_layer_norm")

    def __call__(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, E] of one input."""
        x_NE = self._attention_norm(x_NE + self._attend(x_NE))
        return self._feed_forward_norm(x_NE + self._feed_forward(x_NE))

    def _attend(self, x_NE: torch.Tensor) -> torch.Tensor:
        num_heads, head_dim = len(self._parts.heads.query), self._parts.shape.head_dim
        q_HND, k_HND, v_HND = self._parts.qkv(x_NE).view(len(x_NE), 3, num_heads, head_dim).permute(1, 2, 0, 3)
        attended_HND = functional.scaled_dot_product_attention(q_HND, k_HND, v_HND)
        return self._reduce(self._parts.out(attended_HND.transpose(0, 1).flatten(1)))


class _Encoder:
    """See decoder.Encoder."""

    def __init__(self, build: Build, cross: Sequence[_CrossAttention]) -> None:
        """cross: the cross attention of each decoder layer of this stage."""
        num_layers = build.config.integer("encoder_layers")
        self._positions = _Positions(build, "model.encoder.")
        self._layers = [_EncoderLayer(build, number) for number in range(num_layers)]
        self._cross = cross

    def encode(self, x_NE: torch.Tensor, caches: Caches) -> None:
        """See decoder.Encoder."""
        x_NE = self._positions.place(x_NE, torch.arange(len(x_NE), device=x_NE.device))
        for layer in self._layers:
            x_NE = layer(x_NE)
        for cross in self._cross:
            cross.keep(x_NE, caches)


def _shape(build: Build, heads_name: str) -> AttentionShape:
    num_heads, hidden_size = build.config.integer(heads_name), build.header.hidden_size
    if hidden_size % num_heads:
        raise ConfigError("config.json", f"d_model={hidden_size} cannot be shared by {heads_name}={num_heads} evenly")
    return AttentionShape(num_heads=num_heads, num_kv_heads=num_heads, head_dim=hidden_size // num_heads)
