"""What decoder layers of most families are put together from: attention, gated MLP, the pre-norm layer.

Every block holds one rank's shard and returns the sum over the ranks. Attention itself and pages are behind Step.

    x ----------------+-- norm -- mixer -- (+) -- norm -- feed forward -- x'
                      |                     |
                      +------ residual -----+------------- residual --->

Legend: T tokens, E hidden, F feed-forward shard, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.decoder import Build
from blockferry.engine.models.layers import Linear
from blockferry.engine.models.sharding import HeadSplit, Span, split_evenly, split_heads
from blockferry.engine.models.step import Step
from blockferry.engine.models.weights import Projection, features_of

PRE_NORM_NAMES = ("input_layernorm", "post_attention_layernorm")


class Mixer(Protocol):
    """The part of a layer that looks at other tokens: attention or a recurrence."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Its linear layers."""

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns [T, E], summed over ranks. May overwrite x."""


class FeedForward(Protocol):
    """The part of a layer that looks at one token alone."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Its linear layers."""

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Returns [T, E], summed over ranks. May overwrite x."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of all ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def split(self, build: Build) -> HeadSplit:
        """This rank's heads. Raises ModelLoadError."""
        try:
            return split_heads(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                tp_rank=build.place.tp_rank,
                tp_size=build.place.tp_size,
            )
        except ValueError as error:
            raise ModelLoadError(f"{build.weights.checkpoint.path}: {error}") from error


def attention_shape(build: Build) -> AttentionShape:
    """As most families' config.json names it. Raises ConfigError."""
    config = build.config
    num_heads = config.integer("num_attention_heads", default=32)
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default=num_heads),
        head_dim=config.integer("head_dim", default=build.header.hidden_size // num_heads),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParts:
    """Weights of one attention layer on one rank."""

    shape: AttentionShape
    heads: HeadSplit
    qkv: Linear
    out: Linear
    q_norm_D: torch.Tensor | None = None
    k_norm_D: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What of an attention layer differs between families."""

    has_qkv_bias: bool = False
    has_out_bias: bool = False
    norm_names: tuple[str, str] | None = None  # of the norms of each head of q and k
    norm_offset: float = 0.0
    out_name: str = "o_proj"
    rotates_neighbours: bool = False  # pairs of each head that are rotated are neighbours, not halves apart


def read_attention(
    build: Build, prefix: str, shape: AttentionShape, options: AttentionOptions | None = None
) -> AttentionParts:
    """Read PREFIXq_proj, k_proj, v_proj, o_proj. Raises ModelLoadError."""
    options = options or AttentionOptions()
    heads, weights, head_dim = shape.split(build), build.weights, shape.head_dim
    num_q, num_kv = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    query, kv = features_of(heads.query, head_dim), features_of(heads.kv, head_dim)
    paired = head_dim if options.rotates_neighbours else None
    norms = [
        weights.norm(f"{prefix}{name}.weight", head_dim, offset=options.norm_offset)
        for name in options.norm_names or ()
    ]
    return AttentionParts(
        shape=shape,
        heads=heads,
        qkv=weights.column_parallel(
            [
                Projection(name=f"{prefix}q_proj", size=num_q, rows=[query], paired_head_dim=paired),
                Projection(name=f"{prefix}k_proj", size=num_kv, rows=[kv], paired_head_dim=paired),
                Projection(name=f"{prefix}v_proj", size=num_kv, rows=[kv]),
            ],
            build.header.hidden_size,
            has_bias=options.has_qkv_bias,
        ),
        out=weights.row_parallel(
            f"{prefix}{options.out_name}",
            (build.header.hidden_size, num_q),
            query,
            has_bias=options.has_out_bias,
        ),
        q_norm_D=norms[0] if norms else None,
        k_norm_D=norms[1] if norms else None,
    )


class SelfAttention:
    """Grouped-query attention: qkv -- (norm of each head) -- (rotate) -- attend -- out."""

    def __init__(
        self, build: Build, layer: int, parts: AttentionParts, rule: AttentionRule, *, cos_sin: torch.Tensor | None
    ) -> None:
        """cos_sin is layers.rope_table's; None: positions are not rotated in."""
        self.parts = parts
        self._layer = layer
        self._rule = rule
        self._cos_sin = cos_sin
        self._ops = build.ops
        self._eps = build.header.norm_eps
        self._reduce = build.communicator.all_reduce
        self._sizes = [len(parts.heads.query), len(parts.heads.kv), len(parts.heads.kv)]

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [self.parts.qkv, self.parts.out]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        return self._reduce(self.partial(x_TE, step))

    def partial(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum, for those who add more to it before it is reduced. Leaves x as it is."""
        parts = self.parts
        shape = (len(x_TE), sum(self._sizes), parts.shape.head_dim)
        q_THD, k_TKD, v_TKD = parts.qkv(x_TE).view(shape).split_with_sizes(self._sizes, 1)
        if parts.q_norm_D is not None and parts.k_norm_D is not None:
            q_THD = self._ops.rms_norm_heads(q_THD, parts.q_norm_D, self._eps)
            k_TKD = self._ops.rms_norm_heads(k_TKD, parts.k_norm_D, self._eps)
        if self._cos_sin is not None:
            self._ops.rotate(q_THD, k_TKD, self._cos_sin, step.positions_T)
        attended_THD = step.caches.attend(self._layer, q_THD, k_TKD, v_TKD, self._rule)
        return parts.out(attended_THD.flatten(1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpNames:
    """Names of an MLP's projections below its prefix."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        build: Build,
        prefix: str,
        size: int,
        *,
        names: MlpNames = MlpNames(),
        has_bias: bool = False,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """size: features of all ranks; activate: [T, 2F], gate then up, to [T, F], by default silu(gate) * up."""
        part = self.features = split_evenly(size, build.place.tp_rank, build.place.tp_size)
        weights, hidden_size = build.weights, build.header.hidden_size
        gate = Projection(name=f"{prefix}{names.gate}", size=size, rows=[part])
        up = Projection(name=f"{prefix}{names.up}", size=size, rows=[part])
        self.gate_up = weights.column_parallel([gate, up], hidden_size, has_bias=has_bias)
        self.down = weights.row_parallel(f"{prefix}{names.down}", (hidden_size, size), part, has_bias=has_bias)
        self._activate = activate or build.ops.silu_and_mul
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See FeedForward."""
        return [self.gate_up, self.down]

    def partial(self, x_TE: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum, for those who add more to it before it is reduced."""
        return self.down(self._activate(self.gate_up(x_TE)))

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See FeedForward."""
        return self._reduce(self.partial(x_TE))


class PreNormLayer:
    """Norm before the mixer, norm before the feed-forward part; see the module's drawing."""

    def __init__(
        self, build: Build, mixer: Mixer, feed_forward: FeedForward, *, norms: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """norms: weights [E] of the norm before the mixer and of the one before the feed-forward part."""
        self.mixer = mixer
        self.feed_forward = feed_forward
        self.mixer_norm_E, self.feed_forward_norm_E = norms
        self._ops = build.ops
        self._eps = build.header.norm_eps

    @property
    def linears(self) -> Sequence[Linear]:
        """See Layer."""
        return [*self.mixer.linears, *self.feed_forward.linears]

    def forward(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Layer."""
        x_TE, residual_TE = self._ops.add_rms_norm(x_TE, residual_TE, self.mixer_norm_E, self._eps)
        x_TE = self.mixer(x_TE, step)
        x_TE, residual_TE = self._ops.add_rms_norm(x_TE, residual_TE, self.feed_forward_norm_E, self._eps)
        return self.feed_forward(x_TE), residual_TE


def layer_norms(
    build: Build,
    layer: int,
    *,
    names: tuple[str, str] = PRE_NORM_NAMES,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two norms of a pre-norm layer."""
    first, second = (
        build.weights.norm(f"model.layers.{layer}.{name}.weight", build.header.hidden_size, offset=offset)
        for name in names
    )
    return first, second


def share(size: int, build: Build, what: str) -> Span:
    """This rank's equal part of `size` things. Raises ModelLoadError where they cannot be shared equally."""
    tp_size = build.place.tp_size
    if size % tp_size:
        raise ModelLoadError(
            f"{build.weights.checkpoint.path}: {size} {what} cannot be shared by {tp_size} ranks; "
            f"use a tensor_parallel that divides {size}"
        )
    return split_evenly(size, build.place.tp_rank, tp_size)
