"""Mamba mixers: selective state spaces between linear layers, with their states in the ledger's pages.

    Mamba-1   x -- in --+-- causal convolution -- silu --+---------------------- x --+
    (Jamba)             |                                +-- select -- norms -- dt, b, c -- scan --+-- * silu(z) -- out
                        +-- z ---------------------------------------------------------------------+

    Mamba-2   x -- in --+-- x, b, c -- causal convolution -- silu --+
                        +-- dt -- softplus -------------------------+-- scan, one decay per head --+-- gate -- out
                        +-- z ---------------------------------------------------------------------+

Ranks share Mamba-1's channels and Mamba-2's heads. Where several ranks share the b and c of one group, each has a copy.
How large a state is, engine/kv/model_states.py says, and nobody else.

Sources: Gu and Dao, "Mamba" (arXiv 2312.00752), 3.2 to 3.4; Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), 7;
the order of operations is transformers' (modeling_jamba.py, modeling_bamba.py, modeling_falcon_h1.py).

Legend: T tokens; E hidden; C channels of a rank; W taps of the convolution; R rank of the step sizes; N state size; H
heads of a rank, P channels of a head; G groups of a rank that share b and c; F output features of the first projection.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.model_states import Shape, StateOptions, StateReader, mamba1_state, mamba2_state
from blockferry.engine.models.config import check_activation
from blockferry.engine.models.decoder import Build
from blockferry.engine.models.layers import Linear
from blockferry.engine.models.sharding import Span, split_evenly
from blockferry.engine.models.state_ops import SelectiveInputs, SsdInputs, StateOps
from blockferry.engine.models.step import LayerStates, Step
from blockferry.engine.models.weights import Projection, features_of


class CausalConvolution:
    """The depthwise convolution both mixers start with, and silu."""

    def __init__(self, build: Build, name: str, num_channels: int, *, rows: Sequence[Span], num_taps: int) -> None:
        """num_channels: of all ranks; rows: this rank's. Raises ModelLoadError."""
        weights = build.weights
        self._weight_CW = weights.matrix(f"{name}.weight", (num_channels, 1, num_taps), rows=rows)[:, 0]
        has_bias = build.config.flag("mamba_conv_bias", default=True)
        self._bias_C = weights.matrix(f"{name}.bias", (num_channels,), rows=rows) if has_bias else None
        self._ops: StateOps = build.state_ops

    def __call__(self, x_TC: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """Returns [T, C]; x may have strided rows. Updates the state."""
        y_TC = self._ops.causal_conv(
            x_TC, self._weight_CW, self._bias_C, state_BCw=states.tensors[0], metadata=states.metadata
        )
        return functional.silu(y_TC, inplace=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Shape:
    """Sizes of one Mamba-1 layer."""

    num_channels: int  # of all ranks
    channels: Span  # this rank's
    state_size: int
    num_taps: int
    dt_rank: int


def mamba1_shape(build: Build) -> Mamba1Shape:
    """Raises ConfigError where the ranks cannot share the channels."""
    config, place = build.config, build.place
    conv, (num_channels, state_size) = _state_shapes(build, mamba1_state)
    return Mamba1Shape(
        num_channels=num_channels * place.tp_size,
        channels=split_evenly(num_channels * place.tp_size, place.tp_rank, place.tp_size),
        state_size=state_size,
        num_taps=conv[1] + 1,
        dt_rank=_dt_rank(config, build.header.hidden_size),
    )


class Mamba1Mixer:
    """Jamba's selective scan: the norms of step sizes, b and c are its own."""

    def __init__(self, build: Build, layer: int) -> None:
        """Raises ModelLoadError or ConfigError."""
        check_activation(build.config)
        weights, shape, hidden_size = build.weights, mamba1_shape(build), build.header.hidden_size
        prefix, part, num_channels = f"model.layers.{layer}.mamba.", shape.channels, shape.num_channels
        has_bias = build.config.flag("mamba_proj_bias", default=False)
        inputs = Projection(name=f"{prefix}in_proj", size=2 * num_channels, rows=[part, _moved(part, num_channels)])
        self._sizes = [shape.dt_rank, shape.state_size, shape.state_size]
        self._in = weights.column_parallel([inputs], hidden_size, has_bias=has_bias)
        self._convolve = CausalConvolution(build, f"{prefix}conv1d", num_channels, rows=[part], num_taps=shape.num_taps)
        self._select = weights.row_parallel(f"{prefix}x_proj", (sum(self._sizes), num_channels), part)
        self._norms = [
            weights.norm(f"{prefix}{name}_layernorm.weight", size)
            for name, size in zip(("dt", "b", "c"), self._sizes, strict=True)
        ]
        self._dt = weights.column_parallel(
            [Projection(name=f"{prefix}dt_proj", size=num_channels, rows=[part])], shape.dt_rank
        )
        self._dt_bias_C = weights.float_vector(f"{prefix}dt_proj.bias", num_channels, part=part)
        self._a_CN = _read_a(build, f"{prefix}A_log", shape)
        self._d_C = weights.float_vector(f"{prefix}D", num_channels, part=part)
        self._out = weights.row_parallel(f"{prefix}out_proj", (hidden_size, num_channels), part, has_bias=has_bias)
        self._layer = layer
        self._eps = build.header.norm_eps
        self._ops, self._state_ops = build.ops, build.state_ops
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [self._in, self._select, self._dt, self._out]

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        states = step.caches.states(self._layer)
        x_TC, gate_TC = self._in(x_TE).chunk(2, dim=-1)
        inputs = self._selected(self._convolve(x_TC, states))
        y_TC = self._state_ops.selective_scan(inputs, state_BCN=states.tensors[1], metadata=states.metadata)
        return self._reduce(self._out(y_TC * functional.silu(gate_TC)))

    def _selected(self, x_TC: torch.Tensor) -> SelectiveInputs:
        """Step sizes, b and c depend on all channels, so the ranks sum up before the norms."""
        selected = self._reduce(self._select(x_TC)).split_with_sizes(self._sizes, -1)
        dt_TR, b_TN, c_TN = (
            self._ops.add_rms_norm(part, None, norm, self._eps)[0] for part, norm in zip(selected, self._norms)
        )
        return SelectiveInputs(
            x_TC=x_TC,
            dt_TC=functional.softplus(self._dt(dt_TR).float() + self._dt_bias_C),
            a_CN=self._a_CN,
            b_TN=b_TN,
            c_TN=c_TN,
            d_C=self._d_C,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """Sizes of one Mamba-2 layer, of all ranks, and this rank's heads and groups."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    num_taps: int
    heads: Span
    groups: Span  # those whose b and c this rank's heads read

    @property
    def num_channels(self) -> int:
        """Inner channels of all ranks."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Inner channels of a group."""
        return self.num_channels // self.num_groups

    @property
    def channels(self) -> Span:
        """This rank's inner channels."""
        return features_of(self.heads, self.head_dim)

    @property
    def conv_rows(self) -> list[Span]:
        """This rank's channels of the convolution: x, b, c."""
        group_features = features_of(self.groups, self.state_size)
        first_b = self.num_channels
        first_c = first_b + self.num_groups * self.state_size
        return [self.channels, _moved(group_features, first_b), _moved(group_features, first_c)]

    @property
    def num_conv_channels(self) -> int:
        """Channels of the convolution of all ranks."""
        return self.num_channels + 2 * self.num_groups * self.state_size


def mamba2_shape(build: Build) -> Mamba2Shape:
    """Raises ConfigError or ModelLoadError where the ranks cannot share heads and groups."""
    place = build.place
    conv, (num_heads, head_dim, state_size) = _state_shapes(build, mamba2_state)
    num_heads *= place.tp_size
    num_groups = build.config.integer("mamba_n_groups", default=1)
    if num_heads % num_groups or (num_groups % place.tp_size and place.tp_size % num_groups):
        raise ModelLoadError(
            f"{build.weights.checkpoint.path}: {place.tp_size} ranks cannot share {num_heads} Mamba heads in "
            f"{num_groups} groups; use a tensor_parallel that divides the groups, or a multiple of them"
        )
    heads = split_evenly(num_heads, place.tp_rank, place.tp_size)
    heads_per_group = num_heads // num_groups
    return Mamba2Shape(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=state_size,
        num_taps=conv[1] + 1,
        heads=heads,
        groups=Span(start=heads.start // heads_per_group, stop=-(-heads.stop // heads_per_group)),
    )


class GateOrder(enum.Enum):
    """Whether the gate is applied before a norm of each group or after it."""

    GATE_THEN_NORM = "gate, then norm"
    NORM_THEN_GATE = "norm, then gate"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Options:
    """What of a Mamba-2 layer differs between families."""

    gate_order: GateOrder | None = GateOrder.GATE_THEN_NORM  # None: no norm
    has_out_bias: bool = False
    feature_scales: tuple[float, float, float, float, float] | None = None  # of z, x, b, c, dt


class Mamba2Mixer:
    """Bamba's and Falcon-H1's mixer."""

    def __init__(self, build: Build, layer: int, shape: Mamba2Shape, options: Mamba2Options | None = None) -> None:
        """Raises ModelLoadError or ConfigError."""
        check_activation(build.config)
        options = options or Mamba2Options()
        weights, hidden_size, prefix = build.weights, build.header.hidden_size, f"model.layers.{layer}.mamba."
        num_inner, num_conv = shape.num_channels, shape.num_conv_channels
        rows = [
            shape.channels,
            *(_moved(span, num_inner) for span in shape.conv_rows),
            _moved(shape.heads, num_inner + num_conv),
        ]
        inputs = Projection(name=f"{prefix}in_proj", size=num_inner + num_conv + shape.num_heads, rows=rows)
        self._sizes = [len(span) for span in rows]
        self._in = weights.column_parallel(
            [inputs], hidden_size, has_bias=build.config.flag("mamba_proj_bias", default=False)
        )
        self._scale_F = _feature_scale(build, options, self._sizes)
        self._convolve = CausalConvolution(
            build, f"{prefix}conv1d", num_conv, rows=shape.conv_rows, num_taps=shape.num_taps
        )
        self._dt_bias_H = weights.float_vector(f"{prefix}dt_bias", shape.num_heads, part=shape.heads)
        self._dt_limits = _dt_limits(build)
        self._a_H = -weights.float_vector(f"{prefix}A_log", shape.num_heads, part=shape.heads).exp()
        self._d_H = weights.float_vector(f"{prefix}D", shape.num_heads, part=shape.heads)
        self._norm = None
        if options.gate_order is not None:
            self._norm = GatedNorm(build, f"{prefix}norm.weight", shape, options.gate_order)
        self._out = weights.row_parallel(
            f"{prefix}out_proj", (hidden_size, num_inner), shape.channels, has_bias=options.has_out_bias
        )
        self._shape = shape
        self._layer = layer
        self._state_ops = build.state_ops
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See Mixer."""
        return [self._in, self._out]

    def partial(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum. Leaves x as it is."""
        states = step.caches.states(self._layer)
        features_TF = self._in(x_TE)
        if self._scale_F is not None:
            features_TF *= self._scale_F
        gate_TC, x_TC, b_TC, c_TC, dt_TH = features_TF.split_with_sizes(self._sizes, -1)
        num_mixed = x_TC.shape[1] + b_TC.shape[1] + c_TC.shape[1]
        mixed_TC = features_TF[:, gate_TC.shape[1] : gate_TC.shape[1] + num_mixed]
        inputs = self._inputs(self._convolve(mixed_TC, states), dt_TH)
        y_TC = self._state_ops.ssd_scan(inputs, state_BHPN=states.tensors[1], metadata=states.metadata).flatten(1)
        if self._norm is None:
            return self._out(y_TC * functional.silu(gate_TC))
        return self._out(self._norm(y_TC, gate_TC))

    def __call__(self, x_TE: torch.Tensor, step: Step) -> torch.Tensor:
        """See Mixer."""
        return self._reduce(self.partial(x_TE, step))

    def _inputs(self, mixed_TC: torch.Tensor, dt_TH: torch.Tensor) -> SsdInputs:
        """Step sizes are limited in every step, so that a sequence does not depend on how it was cut into steps."""
        shape, num_tokens = self._shape, len(mixed_TC)
        x_TC, b_TC, c_TC = mixed_TC.split_with_sizes(self._sizes[1:4], -1)
        dt_TH = functional.softplus(dt_TH.float() + self._dt_bias_H)
        if self._dt_limits is not None:
            dt_TH = dt_TH.clamp(*self._dt_limits)
        group_shape = (num_tokens, len(shape.groups), shape.state_size)
        return SsdInputs(
            x_THP=x_TC.view(num_tokens, len(shape.heads), shape.head_dim),
            dt_TH=dt_TH,
            a_H=self._a_H,
            b_TGN=b_TC.view(group_shape),
            c_TGN=c_TC.view(group_shape),
            d_H=self._d_H,
        )


class GatedNorm:
    """RMS norm over each group's channels, and silu(z) before or after it. Computes in float32, rounds once.

    Ranks that share a group add up their squares first, so that the norm is that of the whole group.
    """

    def __init__(self, build: Build, name: str, shape: Mamba2Shape, order: GateOrder) -> None:
        """Raises ModelLoadError."""
        self._weight_C = build.weights.float_vector(name, shape.num_channels, part=shape.channels)
        self._shape = shape
        self._order = order
        self._eps = build.header.norm_eps
        is_shared = len(shape.channels) < len(shape.groups) * shape.group_size
        self._reduce = build.communicator.all_reduce if is_shared else None

    def __call__(self, y_TC: torch.Tensor, gate_TC: torch.Tensor) -> torch.Tensor:
        """Returns [T, C] in y's dtype."""
        dtype = y_TC.dtype
        y_TC, gate_TC = y_TC.float(), functional.silu(gate_TC.float())
        if self._order is GateOrder.GATE_THEN_NORM:
            y_TC = y_TC * gate_TC
        num_tokens, num_groups = len(y_TC), len(self._shape.groups)
        y_TGc = y_TC.view(num_tokens, num_groups, y_TC.shape[1] // num_groups)
        mean_TG = self._squares(y_TGc) / self._shape.group_size
        y_TC = (y_TGc * torch.rsqrt(mean_TG + self._eps).unsqueeze(-1)).flatten(1) * self._weight_C
        if self._order is GateOrder.NORM_THEN_GATE:
            y_TC = y_TC * gate_TC
        return y_TC.to(dtype)

    def _squares(self, y_TGc: torch.Tensor) -> torch.Tensor:
        """Sums [T, G] over whole groups. All groups' are reduced, as one communicator spans all ranks."""
        squares_TG = y_TGc.square().sum(-1)
        if self._reduce is None:
            return squares_TG
        groups = slice(self._shape.groups.start, self._shape.groups.stop)
        whole_TG = squares_TG.new_zeros(len(squares_TG), self._shape.num_groups)
        whole_TG[:, groups] = squares_TG
        return self._reduce(whole_TG)[:, groups]


def _state_shapes(build: Build, read: StateReader) -> tuple[Shape, Shape]:
    """This rank's shapes of the convolution's and the recurrence's state, as the ledger has them."""
    shapes = read(build.config, StateOptions(tp_size=build.place.tp_size))
    assert shapes.recurrent is not None, shapes
    return shapes.conv, shapes.recurrent


def _dt_rank(config: ModelConfig, hidden_size: int) -> int:
    if config.text("mamba_dt_rank", "auto") == "auto":
        return -(-hidden_size // 16)
    return config.integer("mamba_dt_rank")


def _read_a(build: Build, name: str, shape: Mamba1Shape) -> torch.Tensor:
    """-exp(A_log) [C, N] in float32, whatever the model's dtype."""
    a_CN = torch.empty(len(shape.channels), shape.state_size, device=build.weights.placement.device)
    whole = (shape.num_channels, shape.state_size)
    build.weights.checkpoint.read_into(a_CN, name, whole, rows=shape.channels)
    return a_CN.exp_().neg_()


def _feature_scale(build: Build, options: Mamba2Options, sizes: Sequence[int]) -> torch.Tensor | None:
    """A factor [F] for every feature of the first projection, in the model's dtype."""
    if options.feature_scales is None:
        return None
    placement = build.weights.placement
    parts = [
        torch.full((size,), scale, dtype=placement.dtype, device=placement.device)
        for size, scale in zip(sizes, options.feature_scales, strict=True)
    ]
    return torch.cat(parts)


def _dt_limits(build: Build) -> tuple[float, float] | None:
    """time_step_limit, where it limits anything. Raises ConfigError."""
    limits = build.header.values.get("time_step_limit")
    if limits is None:
        return None
    # transformers 5 writes infinity as {"__float__": "Infinity"}
    plain = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in _entries(limits)]
    if len(plain) != 2 or not all(isinstance(limit, int | float) for limit in plain):
        raise ConfigError("config.json", f"time_step_limit is {limits!r}; it must be a list of two numbers")
    low, high = map(float, plain)
    return None if low <= 0 and math.isinf(high) else (low, high)


def _entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _moved(span: Span, offset: int) -> Span:
    return Span(start=span.start + offset, stop=span.stop + offset)
