"""Who holds which heads, columns, vocabulary rows and layers under tensor and pipeline parallelism.

Pure arithmetic without torch, so that planning and launching use the same answers as the workers.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A half-open range [start, stop) of heads, columns, rows or layers."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's place in its instance."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """The query heads and KV heads of one tensor-parallel rank; every query head's KV head is local."""

    query: Span
    kv: Span


def split_evenly(size: int, rank: int, num_ranks: int) -> Span:
    """The rank's part of `size`, parts differing by at most one; the first ranks hold the larger ones."""
    share, rest = divmod(size, num_ranks)
    start = rank * share + min(rank, rest)
    return Span(start=start, stop=start + share + (rank < rest))


def split_padded(size: int, rank: int, num_ranks: int) -> Span:
    """The rank's part when all parts are padded to one length; the last spans may be short or empty."""
    share = -(-size // num_ranks)
    return Span(start=min(rank * share, size), stop=min((rank + 1) * share, size))


def split_heads(*, num_heads: int, num_kv_heads: int, tp_rank: int, tp_size: int) -> HeadSplit:
    """Share heads among ranks without separating a query head from its KV head.

    Up to num_kv_heads ranks: each holds whole groups of query heads, as evenly as whole groups allow
    (9 query and 3 KV heads on 2 ranks: 6/2 and 3/1). Beyond: tp_size / num_kv_heads ranks hold a copy of one
    KV head and share its query heads. Raises ValueError where neither works.
    """
    heads_per_group = num_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        kv = split_evenly(num_kv_heads, tp_rank, tp_size)
        return HeadSplit(query=Span(start=kv.start * heads_per_group, stop=kv.stop * heads_per_group), kv=kv)
    num_copies, rest = divmod(tp_size, num_kv_heads)
    if rest or num_copies > heads_per_group:
        usable = sorted({*range(1, num_kv_heads + 1), *(num_kv_heads * c for c in range(2, heads_per_group + 1))})
        raise ValueError(
            f"tensor_parallel={tp_size} cannot share {num_heads} query heads and {num_kv_heads} KV heads; "
            f"use one of {', '.join(map(str, usable))}"
        )
    kv_head, copy = divmod(tp_rank, num_copies)
    inner = split_evenly(heads_per_group, copy, num_copies)
    first = kv_head * heads_per_group
    return HeadSplit(
        query=Span(start=first + inner.start, stop=first + inner.stop), kv=Span(start=kv_head, stop=kv_head + 1)
    )


def split_layers(num_layers: int, pp_rank: int, pp_size: int) -> Span:
    """The layers of one pipeline stage. Raises ValueError when there are more stages than layers."""
    if pp_size > num_layers:
        raise ValueError(
            f"pipeline_parallel={pp_size} exceeds the model's {num_layers} layers; use at most {num_layers}"
        )
    return split_evenly(num_layers, pp_rank, pp_size)
