"""Gated delta net: the recurrent mixer of Qwen3-Next and Qwen3.5, with its state in the ledger's pages.

    x --+-- q, k, v -- causal convolution -- silu --+-- q, k: unit length, q / sqrt(K) --+
        |                                           +-- v -------------------------------+
        +-- b -- beta = sigmoid(b) ------------------------------------------------------+-- gated delta rule --+
        +-- a -- log decay = -exp(A_log) softplus(a + dt_bias) --------------------------+                      |
        +-- z -- silu ------------------------------------------- norm of each head * silu(z) ------------------+
                                                                              +-- out -- sum over ranks

Ranks share the key heads, and with each of them the value heads that it serves. Source: Yang, Kautz and Hatamizadeh,
"Gated Delta Networks" (arXiv 2412.06464), figure 1 and section 3.4; the order of operations is transformers'.

Legend: T tokens; E hidden; C channels of the convolution: q, k, v; W its taps, w = W - 1; B blocks; G key heads and H
value heads of this rank; K key dim; V value dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from blockferry.engine.errors import ConfigError
from blockferry.engine.models.blocks import share
from blockferry.engine.models.decoder import Build
from blockferry.engine.models.layers import Linear
from blockferry.engine.models.sharding import Span
from blockferry.engine.models.state_ops import DeltaInputs
from blockferry.engine.models.step import Step
from blockferry.engine.models.weights import Projection, features_of

_UNIT_EPS = 1e-6  # added to a vector's squared length


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of one layer; heads are those of all ranks."""

    num_key_heads: int
    num_value_heads: int  # a multiple: key head g serves the values from g * values_per_key on
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def values_per_key(self) -> int:
        """Value heads that one key head serves."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_key_features(self) -> int:
        """Of all ranks."""
        return self.num_key_heads * self.key_dim

    @property
    def num_value_features(self) -> int:
        """Of all ranks."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Of all ranks' convolution: q, k, v."""
        return 2 * self.num_key_features + self.num_value_features

    def conv_rows(self, heads: DeltaHeads) -> list[Span]:
        """A rank's channels of the convolution, as they lie among those of all ranks: q, k, v."""
        keys, values = features_of(heads.key, self.key_dim), features_of(heads.value, self.value_dim)
        return [keys, _moved(keys, self.num_key_features), _moved(values, 2 * self.num_key_features)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeads:
    """One rank's heads; the value heads are those that its key heads serve."""

    key: Span
    value: Span


ProjectionReader = Callable[[str, DeltaShape, DeltaHeads], Sequence[Projection]]
"""(prefix, shape, heads) -> a rank's rows of q, k, v, z, b and a, in this order, as its family stores them."""


def fused_projections(prefix: str, shape: DeltaShape, heads: DeltaHeads) -> Sequence[Projection]:
    """Qwen3-Next: two matrices whose rows go key head by key head.

    in_proj_qkvz: | q K | k K | v, all heads served | z, all heads served |  of head 0, then of head 1, ...
    in_proj_ba:   | b, all heads served | a, all heads served |
    """
    qkvz, ba = f"{prefix}in_proj_qkvz", f"{prefix}in_proj_ba"
    num_served, num_values = shape.values_per_key, shape.values_per_key * shape.value_dim
    q = Span(start=0, stop=shape.key_dim)
    k = Span(start=q.stop, stop=q.stop + shape.key_dim)
    v = Span(start=k.stop, stop=k.stop + num_values)
    z = Span(start=v.stop, stop=v.stop + num_values)
    b, a = Span(start=0, stop=num_served), Span(start=num_served, stop=2 * num_served)
    return [
        *(_strided(qkvz, part, shape.num_key_heads, z.stop, heads.key) for part in (q, k, v, z)),
        *(_strided(ba, part, shape.num_key_heads, a.stop, heads.key) for part in (b, a)),
    ]


def separate_projections(prefix: str, shape: DeltaShape, heads: DeltaHeads) -> Sequence[Projection]:
    """Qwen3.5: in_proj_qkv as the convolution's channels lie, in_proj_z, in_proj_b and in_proj_a."""
    values = features_of(heads.value, shape.value_dim)
    return [
        Projection(name=f"{prefix}in_proj_qkv", size=shape.num_channels, rows=shape.conv_rows(heads)),
        Projection(name=f"{prefix}in_proj_z", size=shape.num_value_features, rows=[values]),
        Projection(name=f"{prefix}in_proj_b", size=shape.num_value_heads, rows=[heads.value]),
        Projection(name=f"{prefix}in_proj_a", size=shape.num_value_heads, rows=[heads.value]),
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaParts:
    """Weights of one layer on one rank."""

    shape: DeltaShape
    heads: DeltaHeads
    projection: Linear  # features: q, k, v, z, b, a
    conv_CW: torch.Tensor
    decay_rate_H: torch.Tensor  # float32, negative
    dt_bias_H: torch.Tensor  # float32
    norm_V: torch.Tensor
    out: Linear


def read_delta_net(build: Build, prefix: str, shape: DeltaShape, projections: ProjectionReader) -> DeltaParts:
    """Read one layer's tensors, named PREFIX... Raises ModelLoadError, and ConfigError for heads that do not fit."""
    heads, weights, hidden_size = _split(build, shape), build.weights, build.header.hidden_size
    conv_C1W = weights.matrix(
        f"{prefix}conv1d.weight", (shape.num_channels, 1, shape.num_taps), rows=shape.conv_rows(heads)
    )
    log_rate_H = weights.float_vector(f"{prefix}A_log", shape.num_value_heads, part=heads.value)
    return DeltaParts(
        shape=shape,
        heads=heads,
        projection=weights.column_parallel(projections(prefix, shape, heads), hidden_size),
        conv_CW=conv_C1W.squeeze(1),
        decay_rate_H=-log_rate_H.exp(),
        dt_bias_H=weights.float_vector(f"{prefix}dt_bias", shape.num_value_heads, part=heads.value),
        norm_V=weights.norm(f"{prefix}norm.weight", shape.value_dim),
        out=weights.row_parallel(
            f"{prefix}out_proj", (hidden_size, shape.num_value_features), features_of(heads.value, shape.value_dim)
        ),
    )


class GatedDeltaNet:
    """See the module's drawing; a blocks.Mixer."""

    def __init__(self, build: Build, layer: int, parts: DeltaParts) -> None:
        self.parts = parts
        self._layer = layer
        self._ops = build.ops
        self._state_ops = build.state_ops
        self._eps = build.header.norm_eps
        self._reduce = build.communicator.all_reduce
        num_values = len(parts.heads.value)
        num_features = num_values * parts.shape.value_dim
        self._keys = len(parts.heads.key) * parts.shape.key_dim
        self._sizes = [2 * self._keys + num_features, num_features, num_values, num_values]

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [self.parts.projection, self.parts.out]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        states = step.caches.states(self._layer)
        conv_BCw, delta_BHKV = states.tensors
        qkv_TC, z_T, b_TH, a_TH = self.parts.projection(x_TE).split_with_sizes(self._sizes, 1)
        qkv_TC = self._state_ops.causal_conv(
            qkv_TC, self.parts.conv_CW, None, state_BCw=conv_BCw, metadata=states.metadata
        )
        inputs = self._inputs(functional.silu(qkv_TC, inplace=True), b_TH, a_TH)
        read_THV = self._state_ops.gated_delta(inputs, state_BHKV=delta_BHKV, metadata=states.metadata)
        return self._reduce(self.parts.out(self._gate(read_THV, z_T)))

    def _inputs(self, qkv_TC: torch.Tensor, b_TH: torch.Tensor, a_TH: torch.Tensor) -> DeltaInputs:
        parts, keys, shape = self.parts, self._keys, self.parts.shape
        q_TGK, k_TGK = qkv_TC[:, : 2 * keys].view(len(qkv_TC), 2, -1, shape.key_dim).unbind(1)
        return DeltaInputs(
            q_THK=_unit(q_TGK, shape.key_dim**-0.5).repeat_interleave(shape.values_per_key, 1),
            k_THK=_unit(k_TGK, 1.0).repeat_interleave(shape.values_per_key, 1),
            v_THV=qkv_TC[:, 2 * keys :].view(len(qkv_TC), -1, shape.value_dim),
            log_decay_TH=parts.decay_rate_H * functional.softplus(a_TH.float() + parts.dt_bias_H),
            beta_TH=b_TH.sigmoid().float(),
        )

    def _gate(self, read_THV: torch.Tensor, z_T: torch.Tensor) -> torch.Tensor:
        """Norm of each head, times silu(z): [T, H * V]."""
        normed_THV = self._ops.rms_norm_heads(read_THV, self.parts.norm_V, self._eps)
        return (normed_THV.flatten(1) * functional.silu(z_T.float())).to(z_T.dtype)


def _unit(x_TGK: torch.Tensor, length: float) -> torch.Tensor:
    """Each head's vector at this length, computed in float32."""
    x = x_TGK.float()
    return (x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS) * length)).to(x_TGK.dtype)


def _split(build: Build, shape: DeltaShape) -> DeltaHeads:
    if shape.num_value_heads % shape.num_key_heads:
        raise ConfigError(
            "config.json",
            f"linear_num_value_heads={shape.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={shape.num_key_heads}; each key head must serve equally many value heads",
        )
    key = share(shape.num_key_heads, build, "key heads of linear attention")
    return DeltaHeads(key=key, value=features_of(key, shape.values_per_key))


def _strided(name: str, part: Span, num_heads: int, stride: int, heads: Span) -> Projection:
    """The same part of every head's `stride` rows."""
    rows = [_moved(part, head * stride) for head in range(heads.start, heads.stop)]
    return Projection(name=name, size=num_heads * stride, rows=rows)


def _moved(span: Span, offset: int) -> Span:
    return Span(start=span.start + offset, stop=span.stop + offset)
