"""The operations between a router and its experts' weights: the seam behind which a device puts its own kernels.

    expert ids of tokens -- group --> pairs sorted by expert -- GroupedLinear, activation, GroupedLinear --> combine

Owns no state but the matrices that grouped linear layers are made of.

Legend: T tokens, K experts chosen per token, X this rank's experts, X1 = X + 1, M pairs of a token and one of its
experts, sorted by expert, N rows of x, E hidden, I in, O out features.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Protocol

import torch

from blockferry.engine.models.layers import Linear, make_linear
from blockferry.engine.models.sharding import Span


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """The pairs of a step sorted by expert, each expert's pairs in the order of their tokens."""

    pair_M: torch.Tensor  # int64, t * K + k; pairs of other ranks' experts come last where there are any
    starts_X1: torch.Tensor  # int32; the pairs of this rank's expert x are [starts[x], starts[x + 1])
    row_TK: torch.Tensor  # int64, where a pair lies among the sorted; past starts[X] where not of this rank


class GroupedLinear(Protocol):
    """y = x W^T + b with a matrix of its own for each group of rows."""

    def __call__(self, x_NI: torch.Tensor, starts_X1: torch.Tensor, row_M: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [M, O], row m of x[row_M[m]], or of x[m] without row_M.

        x is contiguous. Rows past starts[X] are of no meaning.
        """


class ExpertOps(Protocol):
    """What routed experts need beside their activation. One thread calls it."""

    def group(self, expert_ids_TK: torch.Tensor, experts: Span) -> ExpertGroups:
        """Sort the pairs of this rank's experts by expert."""

    def grouped_linear(self, weight_XOI: torch.Tensor, bias_XO: torch.Tensor | None) -> GroupedLinear:
        """The fastest exact layer for the weights' dtype; may keep or copy them."""

    def combine(self, y_ME: torch.Tensor, groups: ExpertGroups, weights_TK: torch.Tensor | None) -> torch.Tensor:
        """[T, E] in y's dtype: each token's rows of this rank, times their float32 weights, added up in float32.

        A fixed order, in which neither other tokens nor the number of ranks have a part. Without weights they are one.
        """


def expert_ops_for(device: torch.device) -> ExpertOps:
    """The operations of a device."""
    if device.type == "cuda":
        from blockferry.engine.models.triton_expert_ops import TritonExpertOps  # loads Triton, which CPUs never need

        return TritonExpertOps()
    return TorchExpertOps()


def group_by_expert(expert_ids_TK: torch.Tensor, experts: Span) -> ExpertGroups:
    """All pairs, those of other ranks' experts last; M = T * K, so that nobody waits for a count."""
    local_P = expert_ids_TK.flatten() - experts.start
    is_foreign_P = (local_P < 0) | (local_P >= len(experts))
    sorted_P, pair_P = torch.sort(local_P.masked_fill(is_foreign_P, len(experts)), stable=True)
    bounds_X1 = torch.arange(len(experts) + 1, device=sorted_P.device)
    places_P = torch.arange(len(pair_P), device=pair_P.device)
    return ExpertGroups(
        pair_M=pair_P,
        starts_X1=torch.searchsorted(sorted_P, bounds_X1).int(),
        row_TK=torch.empty_like(pair_P).scatter_(0, pair_P, places_P).view(expert_ids_TK.shape),
    )


class TorchExpertOps:
    """Plain torch on any device: the oracle of faster implementations, and what CPUs use."""

    def group(self, expert_ids_TK: torch.Tensor, experts: Span) -> ExpertGroups:
        """See ExpertOps; only pairs of this rank, the number of which is waited for."""
        groups = group_by_expert(expert_ids_TK, experts)
        return dataclasses.replace(groups, pair_M=groups.pair_M[: int(groups.starts_X1[-1])])

    def grouped_linear(self, weight_XOI: torch.Tensor, bias_XO: torch.Tensor | None) -> GroupedLinear:
        """See ExpertOps."""
        return LoopedLinear(weight_XOI, bias_XO)

    def combine(self, y_ME: torch.Tensor, groups: ExpertGroups, weights_TK: torch.Tensor | None) -> torch.Tensor:
        """See ExpertOps."""
        num_rows, row_TK = len(y_ME), groups.row_TK
        if not num_rows:
            return y_ME.new_zeros(len(row_TK), y_ME.shape[1])
        y_TKE = y_ME.index_select(0, row_TK.flatten().clamp(max=num_rows - 1)).view(*row_TK.shape, -1)
        if weights_TK is not None:
            y_TKE = y_TKE * weights_TK.unsqueeze(-1)
        if num_rows < row_TK.numel():
            y_TKE.masked_fill_((row_TK >= num_rows).unsqueeze(-1), 0)
        return y_TKE.sum(dim=1, dtype=torch.float32).to(y_ME.dtype)


class LoopedLinear:
    """One linear layer per expert, each with the kernel that is fastest for a dense one."""

    def __init__(self, weight_XOI: torch.Tensor, bias_XO: torch.Tensor | None) -> None:
        self._out_features = weight_XOI.shape[1]
        biases = [None] * len(weight_XOI) if bias_XO is None else list(bias_XO)
        self._linears: list[Linear] = [make_linear(weight, bias) for weight, bias in zip(weight_XOI, biases)]

    def __call__(self, x_NI: torch.Tensor, starts_X1: torch.Tensor, row_M: torch.Tensor | None = None) -> torch.Tensor:
        """See GroupedLinear. Costs one call per expert that has rows."""
        x_MI = x_NI if row_M is None else x_NI.index_select(0, row_M)  # three times as fast as indexing, on CPUs
        y_MO = x_MI.new_empty(len(x_MI), self._out_features)
        for linear, (start, stop) in zip(self._linears, itertools.pairwise(starts_X1.tolist())):
            if start < stop:
                y_MO[start:stop] = linear(x_MI[start:stop])
        return y_MO
