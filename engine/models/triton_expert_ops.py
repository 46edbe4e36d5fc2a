"""ExpertOps on a GPU: experts' matrices in one launch, tokens' sums in another, nothing that waits for a count.

Launches only.

Legend: T tokens, K experts chosen per token, X this rank's experts, X1 = X + 1, M sorted pairs, N rows of x, E hidden,
I in, O out features.
"""

from __future__ import annotations

import torch

from blockferry.engine.models.expert_ops import ExpertGroups, ExpertOps, GroupedLinear, group_by_expert
from blockferry.engine.models.routing import Routing
from blockferry.engine.models.sharding import Span
from blockferry.kernels import moe_combine, moe_grouped_matmul, moe_routing
from blockferry.kernels.moe_routing import Normalisation

__all__ = ["Normalisation", "TritonExpertOps", "TritonGroupedLinear", "choose"]


class TritonExpertOps(ExpertOps):
    """Triton kernels. Called by the worker's model thread."""

    def group(self, expert_ids_TK: torch.Tensor, experts: Span) -> ExpertGroups:
        """See ExpertOps; M = T * K."""
        return group_by_expert(expert_ids_TK, experts)

    def grouped_linear(self, weight_XOI: torch.Tensor, bias_XO: torch.Tensor | None) -> GroupedLinear:
        """See ExpertOps; keeps the weights."""
        return TritonGroupedLinear(weight_XOI, bias_XO)

    def combine(self, y_ME: torch.Tensor, groups: ExpertGroups, weights_TK: torch.Tensor | None) -> torch.Tensor:
        """See ExpertOps."""
        return moe_combine.combine(y_ME, groups.row_TK, weights_TK, groups.starts_X1[-1:])


class TritonGroupedLinear:
    """All experts of a rank in one tensor."""

    def __init__(self, weight_XOI: torch.Tensor, bias_XO: torch.Tensor | None) -> None:
        self._weight_XOI = weight_XOI
        self._bias_XO = bias_XO

    def __call__(self, x_NI: torch.Tensor, starts_X1: torch.Tensor, row_M: torch.Tensor | None = None) -> torch.Tensor:
        """See GroupedLinear."""
        return moe_grouped_matmul.grouped_matmul(
            x_NI, self._weight_XOI, starts_X1=starts_X1, bias_XO=self._bias_XO, row_M=row_M
        )


def choose(logits_TX: torch.Tensor, num_chosen: int, normalisation: Normalisation) -> Routing:
    """The routers that take a softmax, see routing.py."""
    choice = moe_routing.softmax_top_k(logits_TX, num_chosen, normalisation)
    return Routing(expert_ids_TK=choice.expert_ids_TK, weights_TK=choice.weights_TK)
