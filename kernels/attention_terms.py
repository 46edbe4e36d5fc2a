"""What attention kernels are told of a layer's rule, and what the rule means in plain torch, for their oracles.

    key          0 . . . . . . . . . p        p // chunk * chunk = 4, window = 4
    in a chunk           x x x x x x x        s >= p // chunk * chunk
    in a window                x x x x        s > p - window

Owns nothing. Knows no pages: callers gather what is in reach.

Legend: R rows, Q queries of a row, S keys of a row, H query heads, K kv heads, G query heads per kv head, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from blockferry.kernels.fp8 import CacheScales

NO_LIMIT = (1 << 31) - 1  # tokens, more than any sequence has: what kernels are told for no window and no chunk


class AttentionTerms(Protocol):
    """How one layer attends; the engine's AttentionRule says what each term does."""

    @property
    def scale(self) -> float:
        """Factor of the products of queries and keys."""

    @property
    def window(self) -> int | None:
        """Tokens in reach of a query, its own included."""

    @property
    def chunk(self) -> int | None:
        """Tokens between two places that no query looks back over."""

    @property
    def soft_cap(self) -> float | None:
        """Bound of the scores' magnitude."""

    @property
    def sinks_H(self) -> torch.Tensor | None:  # noqa: N802  # a tensor, so it carries its shape
        """float32 logits, one a head, that take weight and give nothing."""

    @property
    def scales(self) -> CacheScales | None:
        """Of keys and values that are stored in fp8."""


def first_in_reach(terms: AttentionTerms, position: int) -> int:
    """The first key that a query at `position` reads."""
    first = 0
    if terms.window is not None:
        first = max(first, position - terms.window + 1)
    if terms.chunk is not None:
        first = max(first, position // terms.chunk * terms.chunk)
    return first


def first_keys(terms: AttentionTerms, positions: torch.Tensor) -> torch.Tensor:
    """first_in_reach of every position of an int64 tensor."""
    first = torch.zeros_like(positions)
    if terms.window is not None:
        first = (positions - terms.window + 1).clamp(min=0)
    if terms.chunk is not None:
        first = first.maximum(positions // terms.chunk * terms.chunk)
    return first


def longest_reach(terms: AttentionTerms, seq_len: int) -> int:
    """The most keys that a query of a sequence of seq_len tokens reads."""
    return min(limit for limit in (seq_len, terms.window, terms.chunk) if limit is not None)


def seen_keys(terms: AttentionTerms, queries_Q: torch.Tensor, keys_S: torch.Tensor) -> torch.Tensor:
    """Bool [..., Q, S]: which key positions each query position reads. Leading dims broadcast."""
    keys, queries = keys_S[..., None, :], queries_Q[..., :, None]
    return (keys <= queries) & (keys >= first_keys(terms, queries_Q)[..., :, None])


def attend_dense(
    q_RQHD: torch.Tensor, kv_RKSC: torch.Tensor, seen_RQS: torch.Tensor, terms: AttentionTerms
) -> torch.Tensor:
    """[R, Q, H, D] in q's dtype: attention over the keys seen, which are all that may be defined. float32 inside."""
    num_rows, num_queries, num_heads, head_dim = q_RQHD.shape
    num_kv_heads = kv_RKSC.shape[1]
    # a weight of 0 times an undefined inf or NaN would still be NaN
    kv_RKSC = kv_RKSC.float().masked_fill(~seen_RQS.any(1)[:, None, :, None], 0)
    q_RKMD = (
        q_RQHD.float()
        .view(num_rows, num_queries, num_kv_heads, -1, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(num_rows, num_kv_heads, -1, head_dim)
    )
    scores_RKMS = q_RKMD @ kv_RKSC[..., :head_dim].transpose(2, 3) * terms.scale
    if terms.soft_cap is not None:
        scores_RKMS = terms.soft_cap * (scores_RKMS / terms.soft_cap).tanh()
    scores_RHQS = scores_RKMS.view(num_rows, num_heads, num_queries, -1).masked_fill(~seen_RQS[:, None], -torch.inf)
    weights_RHQS = _softmax(scores_RHQS, terms.sinks_H)
    out_RKMD = weights_RHQS.view(scores_RKMS.shape) @ kv_RKSC[..., head_dim:]
    return out_RKMD.view(num_rows, num_heads, num_queries, head_dim).transpose(1, 2).to(q_RQHD.dtype)


def _softmax(scores_RHQS: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    if sinks_H is None:
        return scores_RHQS.softmax(-1)
    sinks_RHQ1 = sinks_H.float()[None, :, None, None].expand(*scores_RHQS.shape[:3], 1)
    return torch.cat([scores_RHQS, sinks_RHQ1], dim=-1).softmax(-1)[..., :-1]
