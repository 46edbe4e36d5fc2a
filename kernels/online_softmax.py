"""The step that both paged attention kernels repeat: attend to one tile of paged keys, softmax computed online.

After Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), as arranged by
FlashAttention-2 (arXiv:2307.08691, algorithm 1), with base-2 exponentials. Not launched on its own. A sink is where
the running maximum and sum begin: it takes weight and gives nothing.

Legend: M query rows of the tile (queries x heads of one kv head), S keys of the tile, D head dim, N block size.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl

from blockferry.kernels.attention_terms import AttentionTerms

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)  # kernels read no other globals


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How one attention kernel is cut and compiled."""

    tile_m: int  # query rows of a program
    tile_s: int  # keys of one step of its loop
    num_warps: int
    num_stages: int  # Triton's; see stages_for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileTerms:
    """A layer's rule as the kernels take it; 0 where it has no such term."""

    factor: float  # of q k; gives log2 units, or with a cap 2 log2(e) times the argument of tanh
    soft_cap: float  # log2 units
    window: int
    chunk: int


def tile_terms(rule: AttentionTerms) -> TileTerms:
    """See TileTerms."""
    factor, soft_cap = rule.scale * LOG2_E, 0.0
    if rule.soft_cap is not None:
        factor, soft_cap = 2 * factor / rule.soft_cap, rule.soft_cap * LOG2_E
    return TileTerms(factor=factor, soft_cap=soft_cap, window=rule.window or 0, chunk=rule.chunk or 0)


def stages_for(num_tiles_ahead: int) -> int:
    """Triton's num_stages that loads key tiles this far ahead on NVIDIA GPUs.

    A key tile's addresses come from block ids that are loaded too, so Triton shares the stages between both loads:
    three stages fetch the next tile only when this one is used up, five really overlap. (Read off the PTX.)
    """
    return 2 * num_tiles_ahead + 1


def tile_of(head_dim: int) -> int:
    """Head dims of a tl.dot tile: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@triton.jit
def first_key(positions: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """The first key that queries at these positions read: kernels.attention_terms.first_in_reach."""
    first = positions * 0
    if WINDOW > 0:
        first = tl.maximum(first, positions - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, positions // CHUNK * CHUNK)
    return first


@triton.jit
def load_sinks(sinks_ptr: tl.tensor, heads: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """float32 [M]: the heads' sinks in log2 units, to begin row_max with; row_sum then begins with 1."""
    return tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * _LOG2_E


@triton.jit
def attend_tile(
    q: tl.tensor,  # [M, D]
    acc: tl.tensor,  # float32 [M, D], sum of weights * v so far, relative to row_max
    row_max: tl.tensor,  # float32 [M], in log2 units; finite, or the first tile has a key for each query
    row_sum: tl.tensor,  # float32 [M]
    table_ptr: tl.tensor,  # int32, this row's block ids
    head_ptr: tl.tensor,  # this kv head of block 0
    start: tl.tensor,  # first key position of the tile
    low: tl.tensor,  # no key before it is read; used with WINDOW or CHUNK only
    end: tl.tensor,  # no key at or past it is read
    last_pos: tl.tensor,  # int32 [M], last key position each query may see, before end
    factor: tl.tensor,  # TileTerms.factor, times the keys' scale where they are fp8
    stride_cb: tl.tensor,
    stride_cn: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # TileTerms.soft_cap
    IS_MASKED: tl.constexpr,  # False: every key of the tile is read and seen by every query
    WINDOW: tl.constexpr,  # with CHUNK, 0 where no key read is before any query's reach; see first_key
    CHUNK: tl.constexpr,
) -> tl.tuple:
    """Returns (acc, row_max, row_sum) with the tile's keys included."""
    positions = start + tl.arange(0, TILE_S)
    dims = tl.arange(0, TILE_D)[None, :]
    mask = dims < D
    if IS_MASKED:
        is_read = positions < end
        if WINDOW + CHUNK > 0:
            is_read = is_read & (positions >= low)
        mask = mask & is_read[:, None]
        blocks = tl.load(table_ptr + positions // N, mask=is_read, other=0)
    else:
        blocks = tl.load(table_ptr + positions // N)
    entries = blocks.to(tl.int64) * stride_cb + (positions % N) * stride_cn
    entry_ptrs = head_ptr + entries[:, None] + dims
    k = tl.load(entry_ptrs, mask=mask, other=0.0).to(q.dtype)  # of fp8; every value has one in q's type
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    if SOFT_CAP > 0:  # tanh x = 1 - 2 / (1 + exp 2x)
        scores = SOFT_CAP - 2 * SOFT_CAP / (1 + tl.exp2(scores))
    if IS_MASKED:
        is_seen = positions[None, :] <= last_pos[:, None]
        if WINDOW + CHUNK > 0:  # not kept from tile to tile, registers are short
            is_seen = is_seen & (positions[None, :] >= first_key(last_pos, WINDOW, CHUNK)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    v = tl.load(entry_ptrs + D, mask=mask, other=0.0).to(q.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum
