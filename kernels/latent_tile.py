"""What both latent attention kernels share: the step that attends to one tile of paged latents, and its tile sizes.

A latent is key and value at once, so its value part is loaded once for two products. Online softmax as in
online_softmax.py. The split of the latent into two dot products, so that both parts are powers of two, follows
SGLang's decode attention (sglang/srt/layers/attention/triton_ops/decode_attention.py). Not launched on its own.

    latent of one token:   [ value part, V | rotated part, W ]     scores = q_v . value + q_w . rotated

Legend: M query rows of the tile (queries x heads), S latents of the tile, V value dim, W dims after it, N block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.fp8 import FP8
from blockferry.kernels.launch import Target
from blockferry.kernels.online_softmax import TileConfig, stages_for, tile_of

MAX_VALUE_DIM = 512  # a program's accumulator of more does not fit the registers
MAX_ROTATED_DIM = 128
NO_WINDOW = (1 << 31) - 1


def check_latent_dims(latent_dim: int, value_dim: int) -> None:
    """Raises ValueError for parts of a latent that no tile covers."""
    if not 1 <= value_dim <= MAX_VALUE_DIM:
        raise ValueError(f"value_dim={value_dim} is outside 1..{MAX_VALUE_DIM}; use the torch backend for this model")
    if not 1 <= latent_dim - value_dim <= MAX_ROTATED_DIM:
        raise ValueError(
            f"a latent of {latent_dim} has {latent_dim - value_dim} dims after value_dim={value_dim}, outside "
            f"1..{MAX_ROTATED_DIM}; use the torch backend for this model"
        )


def window_of(window: int | None) -> int:
    """The window as the kernels take it."""
    return NO_WINDOW if window is None else window


def latent_config(
    num_rows: int,
    latent_dim: int,
    value_dim: int,
    *,
    dtype: torch.dtype,
    target: Target,
    cache_dtype: torch.dtype | None = None,
) -> TileConfig:
    """Tile sizes by reason, not by tuning, for tiles that can fill num_rows query rows.

    Hopper's matrix unit takes 64 rows at once, whose accumulator fills half of the registers of a processor: 64 x 512
    in float32. Other GPUs take 16 rows, for which the registers of 4 warps suffice, but for NVIDIA's float32 products,
    which are made of registers. Latents get what shared memory remains, 32 at most: 3 tiles of 36 KB (576 dims in
    bfloat16) beside queries of 72 KB on an H200. AMD's queries stay in registers.
    Latents in fp8 take registers once more while they are converted, for which 64 rows leave no room.
    """
    is_fp8 = cache_dtype is FP8
    is_wide = target is Target.HOPPER and dtype is not torch.float32 and num_rows > 16 and not is_fp8
    tile_m = 64 if is_wide else 16
    row_bytes = (tile_of(value_dim) + tile_of(latent_dim - value_dim)) * dtype.itemsize
    num_tiles = 1 if target is Target.CDNA else 3
    room_bytes = target.shared_bytes * 15 // 16 - tile_m * row_bytes
    tile_s = 32 if room_bytes >= 32 * row_bytes * num_tiles and not is_fp8 else 16
    if room_bytes < tile_s * row_bytes * num_tiles or (is_fp8 and dtype is torch.float32):
        num_tiles = 1
    return TileConfig(
        tile_m=tile_m,
        tile_s=tile_s,
        num_warps=8 if is_wide or (dtype is torch.float32 and target is not Target.CDNA) else 4,
        num_stages=1 if num_tiles == 1 else stages_for(2),
    )


@triton.jit
def attend_latent_tile(
    q_v: tl.tensor,  # [M, V]
    q_w: tl.tensor,  # [M, W]
    acc: tl.tensor,  # float32 [M, V], sum of weights * value so far, relative to row_max
    row_max: tl.tensor,  # float32 [M], in log2 units, finite
    row_sum: tl.tensor,  # float32 [M]
    table_ptr: tl.tensor,  # int32, this row's block ids
    cache_ptr: tl.tensor,  # [B, N, V + W]
    start: tl.tensor,  # first position of the tile
    end: tl.tensor,  # no latent at or past it is read
    first_pos: tl.tensor,  # int32 [M], first position each query may see
    last_pos: tl.tensor,  # int32 [M], last one
    scale_log2: tl.tensor,  # times the latents' scale where they are fp8
    stride_cb: tl.tensor,
    stride_cn: tl.tensor,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_W: tl.constexpr,
) -> tl.tuple:
    """Returns (acc, row_max, row_sum) with the tile's latents included.

    Every tile is masked: next to products over 1,088 dims a comparison per score costs nothing.
    """
    positions = start + tl.arange(0, TILE_S)
    dims_v = tl.arange(0, TILE_V)[None, :]
    dims_w = tl.arange(0, TILE_W)[None, :]
    is_read = positions < end
    blocks = tl.load(table_ptr + positions // N, mask=is_read, other=0)
    entries = blocks.to(tl.int64) * stride_cb + (positions % N) * stride_cn
    entry_ptrs = cache_ptr + entries[:, None]
    value = tl.load(entry_ptrs + dims_v, mask=is_read[:, None] & (dims_v < V), other=0.0).to(q_v.dtype)  # of fp8
    rotated = tl.load(entry_ptrs + V + dims_w, mask=is_read[:, None] & (dims_w < W), other=0.0).to(q_v.dtype)
    scores = tl.dot(q_v, tl.trans(value), input_precision="ieee")
    scores = tl.dot(q_w, tl.trans(rotated), scores, input_precision="ieee") * scale_log2
    is_seen = (positions[None, :] >= first_pos[:, None]) & (positions[None, :] <= last_pos[:, None]) & is_read[None, :]
    scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))  # finite, also where a query sees nothing of the tile
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum
