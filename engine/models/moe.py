"""Mixture-of-experts layers: routed experts sharded over ranks as wholes, beside an optional shared expert.

    x --+-- router -- route --> expert ids, weights
        |                                  |
        +-- sort pairs by expert -- gate,up -- activation -- down -- weigh, add up per token --(+)-- this rank's summand
        |                                                                                       |
        +-- shared expert (a dense layer's shard), optionally times sigmoid(gate x) ------------+

Every rank routes all tokens, alike, and computes the pairs of its own experts. Weights are owned by the objects built
from them; moe_weights.py reads them, routing.py chooses the experts, expert_ops.py has what is between.

Legend: T tokens, K experts chosen per token, X this rank's experts, X1 = X + 1, M pairs of a token and one of its
experts, sorted by expert, E hidden, F feed-forward size of an expert, G = 2F: gates, then ups.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.decoder import Build
from blockferry.engine.models.expert_ops import ExpertOps, expert_ops_for
from blockferry.engine.models.layers import Linear, make_linear
from blockferry.engine.models.moe_weights import ExpertNames, ExpertShapes, ExpertWeights, read_experts
from blockferry.engine.models.routing import Route, Routing
from blockferry.engine.models.sharding import split_evenly

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Gates and ups [M, G] -> [M, F]."""


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
        ops: ExpertOps,
        activation: Activation,
        weighting: Weighting = Weighting.OUTPUT,
    ) -> None:
        self._experts = weights.experts
        self._gate_up = ops.grouped_linear(weights.gate_up_XGE, weights.gate_up_bias_XG)
        self._down = ops.grouped_linear(weights.down_XEF, weights.down_bias_XE)
        self._ops = ops
        self._activation = activation
        self._weighting = weighting

    def __call__(self, x_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
        """This rank's summand [T, E] of the layer, in x's dtype."""
        groups = self._ops.group(routing.expert_ids_TK, self._experts)
        starts_X1, token_M = groups.starts_X1, groups.pair_M // routing.expert_ids_TK.shape[1]
        weights_TK: torch.Tensor | None = routing.weights_TK
        if self._weighting is Weighting.INPUT:
            weights_M = routing.weights_TK.flatten()[groups.pair_M]
            gate_up_MG = self._gate_up(x_TE[token_M] * weights_M[:, None].to(x_TE.dtype), starts_X1)
            weights_TK = None
        else:
            gate_up_MG = self._gate_up(x_TE, starts_X1, token_M)
        return self._ops.combine(self._down(self._activation(gate_up_MG), starts_X1), groups, weights_TK)


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
        ops=expert_ops_for(build.weights.placement.device),
        activation=activation or build.ops.silu_and_mul,
        weighting=weighting,
    )


def experts_per_token(config: ModelConfig, num_experts: int, *, default: int | None = None) -> int:
    """num_experts_per_tok. Raises ConfigError, also where a layer has fewer experts."""
    num_chosen = config.integer("num_experts_per_tok", default=default)
    if num_chosen > num_experts:
        raise ConfigError(
            "config.json", f"num_experts_per_tok={num_chosen} exceeds the {num_experts} experts of a layer"
        )
    return num_chosen


def read_float_router(build: Build, name: str, shape: tuple[int, int]) -> Linear:
    """A router [X, E] that computes in float32 whatever the model's dtype (DeepSeek-V3). Raises ModelLoadError."""
    weight_XE = torch.empty(shape, dtype=torch.float32, device=build.weights.placement.device)
    build.weights.checkpoint.read_into(weight_XE, f"{name}.weight", shape)
    return make_linear(weight_XE)
