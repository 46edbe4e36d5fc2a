"""Which experts see a token, and with what weight: pure functions of a router's logits.

Owns no weights. Every function computes in the dtype in which transformers 5 computes it and rounds where it rounds, so
that both choose the same experts; the routing of a token depends on its own logits only. Equal scores are ordered as
torch.topk orders them.

Legend: T tokens, X experts of the layer, K experts chosen per token, G groups of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The chosen experts of each token and their weights. A token chooses an expert at most once."""

    expert_ids_TK: torch.Tensor  # int64, of all experts of the layer
    weights_TK: torch.Tensor  # float32; values already rounded to the logits' dtype where the model does so


Route = Callable[[torch.Tensor], Routing]
"""Router logits [T, X] -> Routing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """How the experts of DeepSeek-V3's router are chosen."""

    num_groups: int  # G, which divides X into at least two experts each
    num_chosen_groups: int
    num_chosen: int  # K
    scale: float  # of all weights
    is_normalised: bool  # the chosen weights are made to sum to one before they are scaled


def softmax_top_k(logits_TX: torch.Tensor, *, num_chosen: int) -> Routing:
    """The largest K of the softmax over all experts, as they are (Jamba; Qwen3-MoE without norm_topk_prob)."""
    if logits_TX.is_cuda:
        return _choose_on_gpu(logits_TX, num_chosen, "OF_ALL")
    weights_TK, expert_ids_TK = _top_probabilities(logits_TX, num_chosen)
    return Routing(expert_ids_TK=expert_ids_TK, weights_TK=weights_TK.to(logits_TX.dtype).float())


def softmax_top_k_normalised(logits_TX: torch.Tensor, *, num_chosen: int) -> Routing:
    """The largest K of the softmax over all experts, made to sum to one (Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE)."""
    if logits_TX.is_cuda:
        return _choose_on_gpu(logits_TX, num_chosen, "OF_CHOSEN")
    weights_TK, expert_ids_TK = _top_probabilities(logits_TX, num_chosen)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routing(expert_ids_TK=expert_ids_TK, weights_TK=weights_TK.to(logits_TX.dtype).float())


def top_k_softmax(logits_TX: torch.Tensor, *, num_chosen: int) -> Routing:
    """The softmax over the K largest logits, in the logits' dtype (gpt-oss)."""
    if logits_TX.is_cuda:
        return _choose_on_gpu(logits_TX, num_chosen, "AFTER_CHOICE")
    top_TK, expert_ids_TK = torch.topk(logits_TX, num_chosen, dim=-1)
    return Routing(expert_ids_TK=expert_ids_TK, weights_TK=top_TK.softmax(dim=-1).float())


def top_k_sigmoid(logits_TX: torch.Tensor, *, num_chosen: int) -> Routing:
    """The sigmoids of the K largest logits, each on its own (Llama 4, which weighs the experts' inputs with them)."""
    top_TK, expert_ids_TK = torch.topk(logits_TX, num_chosen, dim=-1)
    return Routing(expert_ids_TK=expert_ids_TK, weights_TK=top_TK.float().sigmoid().to(logits_TX.dtype).float())


def sigmoid_grouped_top_k(logits_TX: torch.Tensor, *, bias_X: torch.Tensor, limits: GroupLimits) -> Routing:
    """Sigmoids of the K experts with the largest corrected scores within the best groups.

    The correction `bias_X` (float32) takes part in the choice only, not in the weights; a group is as good as its two
    best experts together. Logits are float32. Source: DeepSeek-V3 technical report (arXiv 2412.19437), 2.1.2.
    """
    scores_TX = logits_TX.float().sigmoid()
    choice_TX = scores_TX + bias_X
    choice_TX = choice_TX.masked_fill(~_in_best_groups(choice_TX, limits), float("-inf"))
    expert_ids_TK = torch.topk(choice_TX, limits.num_chosen, dim=-1, sorted=False).indices
    weights_TK = scores_TX.gather(1, expert_ids_TK)
    if limits.is_normalised:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(expert_ids_TK=expert_ids_TK, weights_TK=weights_TK * limits.scale)


def _choose_on_gpu(logits_TX: torch.Tensor, num_chosen: int, normalisation: str) -> Routing:
    """The same in one launch; equal scores are ordered by expert."""
    from blockferry.engine.models.triton_expert_ops import Normalisation, choose  # loads Triton, which CPUs never need

    return choose(logits_TX, num_chosen, Normalisation[normalisation])


def _top_probabilities(logits_TX: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    values_TK, expert_ids_TK = torch.topk(logits_TX.softmax(dim=-1, dtype=torch.float32), num_chosen, dim=-1)
    return values_TK, expert_ids_TK


def _in_best_groups(choice_TX: torch.Tensor, limits: GroupLimits) -> torch.Tensor:
    """Per token and expert, bool [T, X]: is the expert's group among the chosen ones?"""
    choice_TGX = choice_TX.view(len(choice_TX), limits.num_groups, choice_TX.shape[1] // limits.num_groups)
    score_TG = choice_TGX.topk(2, dim=-1).values.sum(dim=-1)
    best = torch.topk(score_TG, limits.num_chosen_groups, dim=-1, sorted=False).indices
    is_best_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, best, value=True)
    return is_best_TG.unsqueeze(-1).expand(choice_TGX.shape).flatten(1)
