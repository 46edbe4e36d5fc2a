"""Qwen3-Next and Qwen3.5 (text): gated delta nets, gated full attention in every few layers, experts or a dense MLP.

    x --+-- norm -- delta net or gated attention --(+)--+-- norm -- experts beside a gated shared one, or MLP --(+)-- x'
        +------------------ residual --------------+   +---------------------- residual -----------------------+

Attention has norms of each head of q and k, rotates only the leading part of each, and multiplies what it reads with
sigmoid(gate), whose projection lies in q_proj: per head first the query's rows, then the gate's. Norm weights are
stored relative to one, but for the delta net's own. Vision towers are not read.

Legend: T tokens, E hidden, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.models.blocks import (
    PRE_NORM_NAMES,
    AttentionParts,
    AttentionShape,
    FeedForward,
    GatedMlp,
    Mixer,
    PreNormLayer,
)
from blockferry.engine.models.config import check_activation, partial_rope_config, rope_kind, rope_scaling
from blockferry.engine.models.decoder import Build, Decoder, Ends
from blockferry.engine.models.delta_net import (
    DeltaShape,
    GatedDeltaNet,
    ProjectionReader,
    fused_projections,
    read_delta_net,
    separate_projections,
)
from blockferry.engine.models.layers import Linear, rope_table
from blockferry.engine.models.moe import (
    GatedSharedExpert,
    SparseMlp,
    SparseParts,
    experts_per_token,
    read_routed_experts,
)
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes
from blockferry.engine.models.qwen3_moe import is_sparse
from blockferry.engine.models.routing import softmax_top_k, softmax_top_k_normalised
from blockferry.engine.models.sharding import Span
from blockferry.engine.models.step import Step
from blockferry.engine.models.weights import Projection, features_of
from blockferry.engine.models.yarn import yarn_config, yarn_table

_ROTATED_PART = 0.25  # where config.json is silent
_THETA = 10000.0
_SPLIT_OFF = "model.language_model."


def build_qwen3_next(build: Build) -> Decoder:
    """One rank's part of a Qwen3-Next. Raises ModelLoadError or ConfigError."""
    return _build(build, fused_projections)


def build_qwen3_5(build: Build) -> Decoder:
    """The same of a Qwen3.5, dense or with experts."""
    return _build(build, separate_projections)


def _build(build: Build, projections: ProjectionReader) -> Decoder:
    check_activation(build.config)
    root, cos_sin = _root(build), _cos_sin(build)
    layers = [_layer(build, number, f"{root}layers.{number}.", projections, cos_sin) for number in build.layer_numbers]
    ends = Ends(embedding_name=f"{root}embed_tokens.weight", norm_name=f"{root}norm.weight", norm_offset=1.0)
    return Decoder(build, layers, ends=ends)


def qwen3_next_draft_layers(build: Build, numbers: Sequence[int]) -> list[PreNormLayer]:
    """Layers mtp.layers.0.. under these numbers: gated attention always, feed-forward part by their place among them.

    Raises as build_qwen3_next.
    """
    check_activation(build.config)
    cos_sin = _cos_sin(build)
    return [
        _pre_norm_layer(
            build,
            _attention(build, number, f"mtp.layers.{place}.self_attn.", cos_sin),
            _feed_forward(build, place, f"mtp.layers.{place}.mlp."),
            prefix=f"mtp.layers.{place}.",
        )
        for place, number in enumerate(numbers)
    ]


def _root(build: Build) -> str:
    """What names begin with: where transformers split a text model off one that sees, it kept the whole model's."""
    return _SPLIT_OFF if f"{_SPLIT_OFF}embed_tokens.weight" in build.weights.checkpoint else "model."


def _layer(
    build: Build, number: int, prefix: str, projections: ProjectionReader, cos_sin: torch.Tensor
) -> PreNormLayer:
    mixer: Mixer
    if number in build.reaches:
        mixer = _attention(build, number, f"{prefix}self_attn.", cos_sin)
    else:
        parts = read_delta_net(build, f"{prefix}linear_attn.", _delta_shape(build), projections)
        mixer = GatedDeltaNet(build, number, parts)
    return _pre_norm_layer(build, mixer, _feed_forward(build, number, f"{prefix}mlp."), prefix=prefix)


def _pre_norm_layer(build: Build, mixer: Mixer, feed_forward: FeedForward, *, prefix: str) -> PreNormLayer:
    before_mixer_E, before_other_E = (
        build.weights.norm(f"{prefix}{name}.weight", build.header.hidden_size, offset=1.0) for name in PRE_NORM_NAMES
    )
    return PreNormLayer(build, mixer, feed_forward, norms=(before_mixer_E, before_other_E))


def _delta_shape(build: Build) -> DeltaShape:
    config = build.config
    return DeltaShape(
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        num_taps=config.integer("linear_conv_kernel_dim", default=4),
    )


def _feed_forward(build: Build, layer: int, prefix: str) -> FeedForward:
    config, hidden_size = build.config, build.header.hidden_size
    if not config.has("num_experts") or not is_sparse(config, layer):
        return GatedMlp(build, prefix, config.integer("intermediate_size"))
    shapes = ExpertShapes(
        num_experts=config.integer("num_experts"),
        hidden_size=hidden_size,
        feed_forward_size=config.integer("moe_intermediate_size"),
    )
    route = softmax_top_k_normalised if config.flag("norm_topk_prob", default=True) else softmax_top_k
    shared = GatedMlp(build, f"{prefix}shared_expert.", config.integer("shared_expert_intermediate_size"))
    parts = SparseParts(
        router=build.weights.linear(f"{prefix}gate", (shapes.num_experts, hidden_size)),
        route=functools.partial(route, num_chosen=experts_per_token(config, shapes.num_experts)),
        experts=read_routed_experts(build, ExpertNames(prefix=f"{prefix}experts"), shapes),
        shared=GatedSharedExpert(shared, build.weights.linear(f"{prefix}shared_expert_gate", (1, hidden_size))),
    )
    return SparseMlp(build, parts)


def _cos_sin(build: Build) -> torch.Tensor:
    """[max_len, rotated dims of a head]. Sections of mrope do not matter to text, whose three positions are one."""
    header, placement, head_dim = build.header, build.weights.placement, build.config.integer("head_dim")
    config, scaling = build.config, rope_scaling(header.values)
    if rope_kind(scaling) == "yarn":
        theta = config.number("rope_theta", default=_THETA, above=1.0)
        yarn = yarn_config(scaling, theta=theta, max_positions=header.max_positions)
        part = config.number("partial_rotary_factor", default=_ROTATED_PART, above=0.0)
        part = scaling.number("partial_rotary_factor", default=part, above=0.0)
        table = yarn_table(yarn, head_dim=int(head_dim * part), max_len=placement.max_model_len)
    else:
        rope = partial_rope_config(header.values, header.max_positions, rotated_part=_ROTATED_PART)
        table = rope_table(rope, head_dim=head_dim, max_len=placement.max_model_len)
    return table.to(placement.device)


def _attention(build: Build, layer: int, prefix: str, cos_sin: torch.Tensor) -> GatedAttention:
    config = build.config
    shape = AttentionShape(
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
    )
    parts = read_gated_attention(build, prefix, shape, has_bias=config.flag("attention_bias", default=False))
    return GatedAttention(build, layer, parts, build.rule(layer, scale=shape.head_dim**-0.5), cos_sin=cos_sin)


def read_gated_attention(build: Build, prefix: str, shape: AttentionShape, *, has_bias: bool) -> AttentionParts:
    """Read PREFIXq_proj, which has the gates too, k_proj, v_proj, o_proj and norms; qkv's features: q, k, v, gates.

    Raises ModelLoadError.
    """
    weights, heads, head_dim, hidden_size = build.weights, shape.split(build), shape.head_dim, build.header.hidden_size
    num_q, num_kv = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    queries = [Span(start=2 * head * head_dim, stop=(2 * head + 1) * head_dim) for head in _numbers(heads.query)]
    gates = [Span(start=span.stop, stop=span.stop + head_dim) for span in queries]
    kv = [features_of(heads.kv, head_dim)]
    projections = [
        Projection(name=f"{prefix}q_proj", size=2 * num_q, rows=queries),
        Projection(name=f"{prefix}k_proj", size=num_kv, rows=kv),
        Projection(name=f"{prefix}v_proj", size=num_kv, rows=kv),
        Projection(name=f"{prefix}q_proj", size=2 * num_q, rows=gates),
    ]
    columns = features_of(heads.query, head_dim)
    return AttentionParts(
        shape=shape,
        heads=heads,
        qkv=weights.column_parallel(projections, hidden_size, has_bias=has_bias),
        out=weights.row_parallel(f"{prefix}o_proj", (hidden_size, num_q), columns, has_bias=has_bias),
        q_norm_D=weights.norm(f"{prefix}q_norm.weight", head_dim, offset=1.0),
        k_norm_D=weights.norm(f"{prefix}k_norm.weight", head_dim, offset=1.0),
    )


def _numbers(heads: Span) -> range:
    return range(heads.start, heads.stop)


class GatedAttention:
    """Grouped-query attention whose output a sigmoid gate multiplies, feature by feature; a blocks.Mixer."""

    def __init__(
        self, build: Build, layer: int, parts: AttentionParts, rule: AttentionRule, *, cos_sin: torch.Tensor
    ) -> None:
        """cos_sin is layers.rope_table's, as wide as what is rotated of each head."""
        assert parts.q_norm_D is not None, "gated attention has norms"
        assert parts.k_norm_D is not None, "gated attention has norms"
        self.parts = parts
        self._q_norm_D, self._k_norm_D = parts.q_norm_D, parts.k_norm_D
        self._layer = layer
        self._rule = rule
        self._cos_sin = cos_sin
        self._ops = build.ops
        self._eps = build.header.norm_eps
        self._reduce = build.communicator.all_reduce
        num_q, num_kv = len(parts.heads.query), len(parts.heads.kv)
        self._sizes = [num_q, num_kv, num_kv, num_q]

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [self.parts.qkv, self.parts.out]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        shape = (len(x_TE), sum(self._sizes), self.parts.shape.head_dim)
        q_THD, k_TKD, v_TKD, gate_THD = self.parts.qkv(x_TE).view(shape).split_with_sizes(self._sizes, 1)
        q_THD = self._ops.rms_norm_heads(q_THD, self._q_norm_D, self._eps)
        k_TKD = self._ops.rms_norm_heads(k_TKD, self._k_norm_D, self._eps)
        self._ops.rotate(q_THD, k_TKD, self._cos_sin, step.positions_T)
        attended_THD = step.caches.attend(self._layer, q_THD, k_TKD, v_TKD, self._rule)
        return self._reduce(self.parts.out((attended_THD * torch.sigmoid(gate_THD)).flatten(1)))
