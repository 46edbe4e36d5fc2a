"""The step that both paged attention kernels repeat: attend to one tile of paged keys, softmax computed online.

After Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), as arranged by
FlashAttention-2 (arXiv:2307.08691, algorithm 1), with base-2 exponentials. Not launched on its own.

Legend: M query rows of the tile (queries x heads of one kv head), S keys of the tile, D head dim, N block size.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How one attention kernel is cut and compiled."""

    tile_m: int  # query rows of a program
    tile_s: int  # keys of one step of its loop
    num_warps: int
    num_stages: int  # Triton's; see stages_for


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
def attend_tile(
    q: tl.tensor,  # [M, D]
    acc: tl.tensor,  # float32 [M, D], sum of weights * v so far, relative to row_max
    row_max: tl.tensor,  # float32 [M], in log2 units
    row_sum: tl.tensor,  # float32 [M]
    table_ptr: tl.tensor,  # int32, this row's block ids
    head_ptr: tl.tensor,  # this kv head of block 0
    start: tl.tensor,  # first key position of the tile
    end: tl.tensor,  # no key at or past it is read
    last_pos: tl.tensor,  # int32 [M], last key position each query may see; >= start for at least the first tile
    scale_log2: tl.tensor,
    stride_cb: tl.tensor,
    stride_cn: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: every key of the tile is read and seen by every query
) -> tl.tuple:
    """Returns (acc, row_max, row_sum) with the tile's keys included."""
    positions = start + tl.arange(0, TILE_S)
    dims = tl.arange(0, TILE_D)[None, :]
    mask = dims < D
    if IS_MASKED:
        is_read = positions < end
        mask = mask & is_read[:, None]
        blocks = tl.load(table_ptr + positions // N, mask=is_read, other=0)
    else:
        blocks = tl.load(table_ptr + positions // N)
    entries = blocks.to(tl.int64) * stride_cb + (positions % N) * stride_cn
    entry_ptrs = head_ptr + entries[:, None] + dims
    k = tl.load(entry_ptrs, mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if IS_MASKED:
        scores = tl.where((positions[None, :] <= last_pos[:, None]) & is_read[None, :], scores, float("-inf"))
    # Every query sees a key of the first tile, so the maximum is finite from there on.
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    v = tl.load(entry_ptrs + D, mask=mask, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum
