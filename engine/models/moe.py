"""Mixture-of-experts layers: routed experts sharded over ranks as wholes, beside an optional shared expert.

    x --+-- router -- route --> expert ids, weights
        |                                  |
        +-- sort pairs by expert -- gate,up -- activation -- down -- weigh, add up per token --(+)-- this rank's summand
        |                                                                                       |
        +-- shared expert (a dense layer's shard), optionally times sigmoid(gate x) ------------+

Every rank routes all tokens, alike, and computes the pairs of its own experts. Weights are owned by the objects built
from them; moe_weights.py reads them, routing.py chooses the experts.

Legend: T tokens, K experts chosen per token, X this rank's experts, X1 = X + 1, M pairs of a token and one of its
experts, sorted by expert, E hidden, F feed-forward size of an expert, G = 2F: gates, then ups, I in, O out features.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from blockferry.engine.models.decoder import Build
from blockferry.engine.models.layers import Linear, make_linear
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes, ExpertWeights, read_experts
from blockferry.engine.models.routing import Route, Routing
from blockferry.engine.models.sharding import Span, split_evenly

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Gates and ups [M, G] -> [M, F]."""


def gated_silu(gate_up_MG: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Qwen, DeepSeek, Jamba, Llama 4)."""
    gate_MF, up_MF = gate_up_MG.chunk(2, dim=-1)
    return functional.silu(gate_MF) * up_MF


def gated_gelu_tanh(gate_up_MG: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation (the Gemma family)."""
    gate_MF, up_MF = gate_up_MG.chunk(2, dim=-1)
    return functional.gelu(gate_MF, approximate="tanh") * up_MF


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """gpt-oss: gates are capped at `limit`, ups kept within +-limit; (up + 1) * gate * sigmoid(alpha * gate)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate_up_MG: torch.Tensor) -> torch.Tensor:
        """See Activation."""
        gate_MF, up_MF = gate_up_MG.chunk(2, dim=-1)
        gate_MF = gate_MF.clamp(max=self.limit)
        up_MF = up_MF.clamp(min=-self.limit, max=self.limit)
        return (up_MF + 1) * (gate_MF * torch.sigmoid(gate_MF * self.alpha))


class Weighting(enum.Enum):
    """What the routing weight multiplies."""

    OUTPUT = "output"
    INPUT = "input"  # Llama 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """The pairs of a step sorted by expert, each expert's pairs in the order of their tokens."""

    pair_M: torch.Tensor  # int64, t * K + k
    starts_X1: torch.Tensor  # int32; the pairs of local expert x are [starts[x], starts[x + 1])
    row_TK: torch.Tensor  # int64, where a pair lies among the M; of no meaning where not local
    is_local_TK: torch.Tensor | None  # bool, None: every pair is of this rank


def group_by_expert(expert_ids_TK: torch.Tensor, experts: Span, *, num_experts: int) -> ExpertGroups:
    """Sort the pairs of this rank's experts, of num_experts, by expert.

    On a CPU M counts those pairs only. On a GPU their number is not known without waiting for it: there M = T * K, and
    the pairs of other ranks' experts come last, past starts[X].
    """
    local_P = expert_ids_TK.flatten() - experts.start
    is_local_P = None
    if len(experts) < num_experts:
        is_local_P = (local_P >= 0) & (local_P < len(experts))
        local_P = local_P.masked_fill(~is_local_P, len(experts))
    sorted_P, pair_P = torch.sort(local_P, stable=True)
    bounds_X1 = torch.arange(len(experts) + 1, device=local_P.device)
    starts_X1 = torch.searchsorted(sorted_P, bounds_X1).int()
    row_P = torch.empty_like(pair_P).scatter_(0, pair_P, torch.arange(len(pair_P), device=pair_P.device))
    if is_local_P is not None:
        row_P = row_P.masked_fill(~is_local_P, 0)
    return ExpertGroups(
        pair_M=pair_P[: int(starts_X1[-1])] if pair_P.device.type == "cpu" else pair_P,
        starts_X1=starts_X1,
        row_TK=row_P.view(expert_ids_TK.shape),
        is_local_TK=None if is_local_P is None else is_local_P.view(expert_ids_TK.shape),
    )


class GroupedLinear(Protocol):
    """y = x W^T + b with a matrix of its own for each group of rows."""

    def __call__(self, x_MI: torch.Tensor, starts_X1: torch.Tensor) -> torch.Tensor:
        """Returns [M, O]; rows past starts[X] are of no meaning. x is contiguous."""


class LoopedLinear:
    """One linear layer per expert, each with the kernel that is fastest for a dense one."""

    def __init__(self, weight_XOI: torch.Tensor, bias_XO: torch.Tensor | None) -> None:
        self._out_features = weight_XOI.shape[1]
        biases = [None] * len(weight_XOI) if bias_XO is None else list(bias_XO)
        self._linears: list[Linear] = [make_linear(weight, bias) for weight, bias in zip(weight_XOI, biases)]

    def __call__(self, x_MI: torch.Tensor, starts_X1: torch.Tensor) -> torch.Tensor:
        """See GroupedLinear. Costs one call per expert that has rows."""
        y_MO = x_MI.new_empty(len(x_MI), self._out_features)
        starts = starts_X1.tolist()
        for linear, start, stop in zip(self._linears, starts, starts[1:]):
            if start < stop:
                y_MO[start:stop] = linear(x_MI[start:stop])
        return y_MO


def make_grouped_linear(weight_XOI: torch.Tensor, bias_XO: torch.Tensor | None) -> GroupedLinear:
    """The fastest exact grouped linear layer for the weights' device and dtype."""
    return LoopedLinear(weight_XOI, bias_XO)


class Experts:
    """One rank's routed experts of one layer. One thread calls it.

    A token's result depends on its own routing and hidden state only, up to what a matmul's rounding owes to the number
    of its rows (nothing at all with the CPU's bfloat16 tiles). Its experts are added up in float32, in an order
    that its batch has no part in.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        num_experts: int,
        activation: Activation,
        weighting: Weighting = Weighting.OUTPUT,
    ) -> None:
        self._experts = weights.experts
        self._num_experts = num_experts  # of the layer, on all ranks
        self._gate_up = make_grouped_linear(weights.gate_up_XGE, weights.gate_up_bias_XG)
        self._down = make_grouped_linear(weights.down_XEF, weights.down_bias_XE)
        self._activation = activation
        self._weighting = weighting

    def __call__(self, x_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
        """This rank's summand [T, E] of the layer, in x's dtype."""
        groups = group_by_expert(routing.expert_ids_TK, self._experts, num_experts=self._num_experts)
        if not len(groups.pair_M):
            return torch.zeros_like(x_TE)
        num_chosen = routing.expert_ids_TK.shape[1]
        x_ME = x_TE[groups.pair_M // num_chosen]
        if self._weighting is Weighting.INPUT:
            x_ME *= routing.weights_TK.flatten()[groups.pair_M, None].to(x_ME.dtype)
        hidden_MF = self._activation(self._gate_up(x_ME, groups.starts_X1))
        y_TKE = self._down(hidden_MF, groups.starts_X1)[groups.row_TK]
        if self._weighting is Weighting.OUTPUT:
            y_TKE = y_TKE * routing.weights_TK.unsqueeze(-1)
        if groups.is_local_TK is not None:
            y_TKE.masked_fill_(~groups.is_local_TK.unsqueeze(-1), 0)
        return y_TKE.sum(dim=1, dtype=torch.float32).to(x_TE.dtype)


class SharedExpert(Protocol):
    """A feed-forward layer that every token passes, sharded by features; blocks.GatedMlp is one."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Its linear layers."""

    def partial(self, x_TE: torch.Tensor) -> torch.Tensor:
        """This rank's summand [T, E]."""


class GatedSharedExpert:
    """A shared expert whose output is multiplied with sigmoid(gate x), one number per token (Qwen3-Next)."""

    def __init__(self, expert: SharedExpert, gate: Linear) -> None:
        self._expert = expert
        self._gate = gate

    @property
    def linears(self) -> Sequence[Linear]:
        """See SharedExpert."""
        return [*self._expert.linears, self._gate]

    def partial(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See SharedExpert."""
        return torch.sigmoid(self._gate(x_TE)) * self._expert.partial(x_TE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SparseParts:
    """What one layer's feed-forward part consists of on one rank."""

    router: Linear  # of all experts, alike on all ranks; computes in its own dtype
    route: Route
    experts: Experts
    shared: SharedExpert | None = None


class SparseMlp:
    """A router with its experts, and a shared expert where there is one: the blocks.FeedForward of sparse layers."""

    def __init__(self, build: Build, parts: SparseParts) -> None:
        self._parts = parts
        self._reduce = build.communicator.all_reduce

    @property
    def linears(self) -> Sequence[Linear]:
        """See FeedForward: the layers that every token passes, which routed experts are not."""
        parts = self._parts
        return [parts.router] if parts.shared is None else [parts.router, *parts.shared.linears]

    def partial(self, x_TE: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum."""
        parts = self._parts
        routing = parts.route(parts.router(x_TE.to(parts.router.dtype)))
        y_TE = parts.experts(x_TE, routing)
        return y_TE if parts.shared is None else y_TE + parts.shared.partial(x_TE)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See FeedForward."""
        return self._reduce(self.partial(x_TE))


def read_routed_experts(
    build: Build,
    names: ExpertNames,
    shapes: ExpertShapes,
    *,
    activation: Activation | None = None,
    weighting: Weighting = Weighting.OUTPUT,
) -> Experts:
    """This rank's experts of one layer; the activation is silu(gate) * up by default. Raises ModelLoadError."""
    span = split_evenly(shapes.num_experts, build.place.tp_rank, build.place.tp_size)
    weights = read_experts(build.weights.checkpoint, names, shapes, span, build.weights.placement)
    return Experts(
        weights,
        num_experts=shapes.num_experts,
        activation=activation or build.ops.silu_and_mul,
        weighting=weighting,
    )


def read_float_router(build: Build, name: str, shape: tuple[int, int]) -> Linear:
    """A router [X, E] that computes in float32 whatever the model's dtype (DeepSeek-V3). Raises ModelLoadError."""
    weight_XE = torch.empty(shape, dtype=torch.float32, device=build.weights.placement.device)
    build.weights.checkpoint.read_into(weight_XE, f"{name}.weight", shape)
    return make_linear(weight_XE)
