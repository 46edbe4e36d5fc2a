"""The router's choice in one launch: softmax over the experts, the largest K, and their weights.

Legend: T tokens, X experts, K experts chosen per token.
"""

from __future__ import annotations

import dataclasses
import enum

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor

MAX_EXPERTS = 2048
ELEMENTS_PER_PROGRAM = 2048
LARGEST = tl.constexpr(3.0e38)


class Normalisation(enum.IntEnum):
    """What the weights of the chosen experts are."""

    OF_ALL = 0  # their part of the softmax over all experts
    OF_CHOSEN = 1  # the same, made to sum to one
    AFTER_CHOICE = 2  # the softmax over the chosen logits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Chosen experts, best first, and their weights."""

    expert_ids_TK: torch.Tensor  # int64
    weights_TK: torch.Tensor  # float32, of values of the logits' dtype


def softmax_top_k(logits_TX: torch.Tensor, num_chosen: int, normalisation: Normalisation) -> Choice:
    """Choose the num_chosen largest; of equal ones the one with the smaller number. NaN is chosen last.

    Computed in float32; weights are rounded to the logits' dtype once. Raises ValueError for more than MAX_EXPERTS, or
    for more chosen than there are.
    """
    check_tensor("logits", logits_TX, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_tokens, num_experts = logits_TX.shape
    if not 1 <= num_chosen <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"{num_chosen} of {num_experts} experts cannot be chosen; needed: 1 <= chosen <= experts <= {MAX_EXPERTS}"
        )
    expert_ids_TK = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits_TX.device)
    weights_TK = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits_TX.device)
    tile_x = triton.next_power_of_2(num_experts)
    tile_t = max(1, min(ELEMENTS_PER_PROGRAM // tile_x, 16))
    if num_tokens:
        softmax_top_k_kernel[(triton.cdiv(num_tokens, tile_t),)](
            logits_TX,
            expert_ids_TK,
            weights_TK,
            num_tokens,
            logits_TX.stride(0),
            X=num_experts,
            K=num_chosen,
            NORMALISATION=int(normalisation),
            TILE_T=tile_t,
            TILE_X=tile_x,
            TILE_K=triton.next_power_of_2(num_chosen),
            num_warps=4,
        )
    return Choice(expert_ids_TK=expert_ids_TK, weights_TK=weights_TK)


@triton.jit
def softmax_top_k_kernel(
    logits_ptr: tl.tensor,  # [T, X]
    ids_ptr: tl.tensor,  # int64 [T, K], contiguous
    weights_ptr: tl.tensor,  # float32 [T, K], contiguous
    num_tokens: tl.tensor,
    stride_logits: tl.tensor,
    X: tl.constexpr,
    K: tl.constexpr,
    NORMALISATION: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_X: tl.constexpr,
    TILE_K: tl.constexpr,
) -> None:
    """One program routes TILE_T tokens; it looks for the largest K times.

    Bytes T (X e + 12 K); FLOPs about T X (5 + 2 K). T = 8,192, X = 128, K = 8 in bfloat16: 2.9 MB, 0.6 us on an
    H200 (4.8 TB/s), 22 MFLOP: a launch costs more than its work.
    """
    tokens = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    experts = tl.arange(0, TILE_X)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (experts < X)[None, :]
    rows = logits_ptr + tokens[:, None].to(tl.int64) * stride_logits
    scores = tl.load(rows + experts[None, :], mask=mask, other=0.0).to(tl.float32)
    scores = tl.where(mask & (scores > -LARGEST), scores, -LARGEST)  # NaN is greater than nothing
    scores = tl.minimum(scores, LARGEST)
    if NORMALISATION != 2:
        parts = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        scores = tl.where((experts < X)[None, :], parts / tl.sum(parts, axis=1)[:, None], -1.0)
    places = tl.arange(0, TILE_K)
    weights = tl.full([TILE_T, TILE_K], float("-inf"), tl.float32)
    ids = tl.zeros([TILE_T, TILE_K], tl.int64)
    for k in tl.static_range(K):
        best, expert = tl.max(scores, axis=1, return_indices=True)
        weights = tl.where((places == k)[None, :], best[:, None], weights)
        ids = tl.where((places == k)[None, :], expert[:, None].to(tl.int64), ids)
        scores = tl.where(experts[None, :] == expert[:, None], float("-inf"), scores)
    if NORMALISATION == 1:
        weights = weights / tl.sum(tl.where((places < K)[None, :], weights, 0.0), axis=1)[:, None]
    if NORMALISATION == 2:
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])  # unused places give exp(-inf) = 0
        weights = weights / tl.sum(weights, axis=1)[:, None]
    out = tokens[:, None].to(tl.int64) * K + places[None, :]
    out_mask = is_token[:, None] & (places < K)[None, :]
    tl.store(weights_ptr + out, weights.to(logits_ptr.dtype.element_ty).to(tl.float32), mask=out_mask)
    tl.store(ids_ptr + out, ids, mask=out_mask)


def softmax_top_k_torch(logits_TX: torch.Tensor, num_chosen: int, normalisation: Normalisation) -> Choice:
    """The oracle, up to the order of equal ones."""
    is_first = normalisation is not Normalisation.AFTER_CHOICE
    scores_TX = logits_TX.softmax(dim=-1, dtype=torch.float32) if is_first else logits_TX.float()
    weights_TK, expert_ids_TK = scores_TX.topk(num_chosen, dim=-1)
    if normalisation is Normalisation.OF_CHOSEN:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if normalisation is Normalisation.AFTER_CHOICE:
        weights_TK = weights_TK.softmax(dim=-1)
    return Choice(expert_ids_TK=expert_ids_TK, weights_TK=weights_TK.to(logits_TX.dtype).float())
