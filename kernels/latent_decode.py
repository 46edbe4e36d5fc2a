"""Paged latent decode attention: one query per row over the row's latents, split over them (flash-decoding).

After Dao et al., "Flash-Decoding for long-context inference" (2023), on the absorbed form of multi-head latent
attention (DeepSeek-V2, arXiv:2405.04434, appendix C): all query heads share one latent per token.

    latent_decode_kernel        (head tile, row, split) -> output of the split and its log2-sum-exp
    latent_decode_merge_kernel  (head, row, 128 dims)    -> splits merged; not launched when one split holds all

Legend: R rows, H query heads, C latent dim = V value dim + W dims after it, B blocks, M blocks of a row, N block size,
P splits, S latents of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.fp8 import CacheScales, check_cache
from blockferry.kernels.latent_tile import attend_latent_tile, check_latent_dims, latent_config, window_of
from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor, num_processors, target_of
from blockferry.kernels.online_softmax import LOG2_E, tile_of
from blockferry.kernels.paged_decode import choose_split_size

PROGRAMS_PER_PROCESSOR = 2
MERGED_DIMS = 128  # of one merging program, which holds this many times the splits in registers


def latent_decode(
    q_RHC: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    seq_lens_R: torch.Tensor,
    total_seq_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    out_RHV: torch.Tensor,
    scales: CacheScales | None = None,
) -> torch.Tensor:
    """Fill and return out_RHV: row r attends to the last `window` of its first seq_lens[r] latents.

    kv_cache is a [B, N, C] view, in fp8 where there are scales. A row of length 0 yields zeros. total_seq_len and
    max_seq_len (host values, need not be exact; max_seq_len must be an upper bound) choose the split. Raises ValueError
    for arguments of another shape or dtype.
    """
    num_rows, num_heads, latent_dim = q_RHC.shape
    value_dim = out_RHV.shape[2]
    check_latent_dims(latent_dim, value_dim)
    check_tensor("q", q_RHC, shape=(num_rows, num_heads, latent_dim), dtypes=FLOAT_DTYPES)
    check_cache(kv_cache, scales, shape=(None, None, latent_dim), dtypes=(q_RHC.dtype,))
    check_tensor("block_table", block_table_RM, shape=(num_rows, None), dtypes=(torch.int32,))
    check_tensor("seq_lens", seq_lens_R, shape=(num_rows,), dtypes=(torch.int32,))
    check_tensor("out", out_RHV, shape=(num_rows, num_heads, value_dim), dtypes=(q_RHC.dtype,))
    if not num_rows:
        return out_RHV
    config = latent_config(
        num_heads,
        latent_dim,
        value_dim,
        dtype=q_RHC.dtype,
        target=target_of(q_RHC.device),
        cache_dtype=kv_cache.dtype,
    )
    head_tiles = triton.cdiv(num_heads, config.tile_m)
    reach = window_of(window)
    longest = min(max_seq_len, reach)
    split_size = choose_split_size(
        total_work=min(total_seq_len, num_rows * reach) * head_tiles,
        max_keys=longest,
        bytes_per_split=out_RHV.numel() * 4,
        num_programs=num_processors(q_RHC.device) * PROGRAMS_PER_PROCESSOR,
    )
    num_splits = max(1, triton.cdiv(longest, split_size))
    parts_RHPV, lse_RHP = out_RHV.unsqueeze(2), out_RHV
    if num_splits > 1:
        parts_RHPV = out_RHV.new_empty((num_rows, num_heads, num_splits, value_dim), dtype=torch.float32)
        lse_RHP = out_RHV.new_empty((num_rows, num_heads, num_splits), dtype=torch.float32)
    latent_decode_kernel[(head_tiles, num_rows, num_splits)](
        q_RHC,
        kv_cache,
        block_table_RM,
        seq_lens_R,
        parts_RHPV,
        lse_RHP,
        q_RHC if scales is None else scales.k_K,
        scale * LOG2_E,
        reach,
        split_size,
        q_RHC.stride(0),
        q_RHC.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table_RM.stride(0),
        parts_RHPV.stride(0),
        parts_RHPV.stride(1),
        parts_RHPV.stride(2),
        num_heads * num_splits,
        num_splits,
        H=num_heads,
        N=kv_cache.shape[1],
        V=value_dim,
        W=latent_dim - value_dim,
        TILE_H=config.tile_m,
        TILE_S=config.tile_s,
        TILE_V=tile_of(value_dim),
        TILE_W=tile_of(latent_dim - value_dim),
        HAS_SCALE=scales is not None,
        IS_SPLIT=num_splits > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        latent_decode_merge_kernel[(num_heads, num_rows, triton.cdiv(value_dim, MERGED_DIMS))](
            parts_RHPV,
            lse_RHP,
            seq_lens_R,
            out_RHV,
            reach,
            split_size,
            num_splits,
            num_heads,
            out_RHV.stride(0),
            out_RHV.stride(1),
            V=value_dim,
            TILE_P=triton.next_power_of_2(num_splits),
            TILE_V=MERGED_DIMS,
            num_warps=4,
        )
    return out_RHV


@triton.jit
def latent_decode_kernel(
    q_ptr: tl.tensor,  # [R, H, C]
    cache_ptr: tl.tensor,  # [B, N, C]
    table_ptr: tl.tensor,  # int32 [R, M]
    seq_lens_ptr: tl.tensor,  # int32 [R]
    parts_ptr: tl.tensor,  # [R, H, P, V]: float32 where split, else the output itself
    lse_ptr: tl.tensor,  # float32 [R, H, P]: log2 of the sum of exponentials; unused where not split
    cache_scale_ptr: tl.tensor,  # float32 [1], read with HAS_SCALE only
    scale_log2: tl.tensor,
    window: tl.tensor,
    split_size: tl.tensor,
    stride_qr: tl.tensor,
    stride_qh: tl.tensor,
    stride_cb: tl.tensor,
    stride_cn: tl.tensor,
    stride_table: tl.tensor,
    stride_pr: tl.tensor,
    stride_ph: tl.tensor,
    stride_pp: tl.tensor,
    stride_lr: tl.tensor,
    stride_lh: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_W: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """One program: TILE_H heads of one row over at most split_size latents. Head tiles of a row run side by side.

    Bytes C e sum(S) + R H (C + V) e (e bytes an element, S latents of a row; head tiles after the first find the
    latents in the L2 cache); FLOPs 2 H (C + V) sum(S). R = 64, S = 4,096, H = 128, C = 576, V = 512, bfloat16 (a layer
    of DeepSeek-V3): 320 MB, 67 us on an H200 at 4.8 TB/s; 73 GFLOP, 74 us at 989 TFLOP/s, which decides. With the heads
    split over 8 GPUs (H = 16): 304 MB, 63 us; 9.1 GFLOP, 9 us: bandwidth decides for every H below 109.
    """
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    first = tl.maximum(seq_len - window, 0)
    begin = first + split * split_size
    if (begin >= seq_len) & (split > 0):
        return
    end = tl.minimum(begin + split_size, seq_len)
    heads = tl.program_id(0) * TILE_H + tl.arange(0, TILE_H)
    is_head = (heads < H)[:, None]
    dims_v = tl.arange(0, TILE_V)[None, :]
    dims_w = tl.arange(0, TILE_W)[None, :]
    q_ptrs = q_ptr + row * stride_qr + heads[:, None] * stride_qh
    q_v = tl.load(q_ptrs + dims_v, mask=is_head & (dims_v < V), other=0.0)
    q_w = tl.load(q_ptrs + V + dims_w, mask=is_head & (dims_w < W), other=0.0)
    row_table_ptr = table_ptr + row * stride_table
    first_pos = tl.zeros([TILE_H], tl.int32) + first
    last_pos = tl.zeros([TILE_H], tl.int32) + (seq_len - 1)
    acc = tl.zeros([TILE_H, TILE_V], tl.float32)
    if HAS_SCALE:
        scale_log2 = scale_log2 * tl.load(cache_scale_ptr)
    row_max = tl.full([TILE_H], -1e30, tl.float32)
    row_sum = tl.zeros([TILE_H], tl.float32)
    for start in range(begin, end, TILE_S):
        acc, row_max, row_sum = attend_latent_tile(
            q_v, q_w, acc, row_max, row_sum, row_table_ptr, cache_ptr, start, end, first_pos, last_pos, scale_log2,
            stride_cb, stride_cn, N, V, W, TILE_S, TILE_V, TILE_W,
        )  # fmt: skip
    total = tl.where(row_sum > 0, row_sum, 1.0)  # a row of length 0 yields zeros
    out = acc / total[:, None]
    if HAS_SCALE:
        out = out * tl.load(cache_scale_ptr)
    part_ptrs = parts_ptr + row * stride_pr + heads[:, None] * stride_ph + split * stride_pp + dims_v
    tl.store(part_ptrs, out.to(parts_ptr.dtype.element_ty), mask=is_head & (dims_v < V))
    if IS_SPLIT:
        tl.store(lse_ptr + row * stride_lr + heads * stride_lh + split, row_max + tl.log2(total), mask=heads < H)


@triton.jit
def latent_decode_merge_kernel(
    parts_ptr: tl.tensor,  # float32 [R, H, P, V], contiguous
    lse_ptr: tl.tensor,  # float32 [R, H, P], contiguous
    seq_lens_ptr: tl.tensor,  # int32 [R]
    out_ptr: tl.tensor,  # [R, H, V]
    window: tl.tensor,
    split_size: tl.tensor,
    num_splits: tl.tensor,  # P
    num_heads: tl.tensor,  # H
    stride_or: tl.tensor,
    stride_oh: tl.tensor,
    V: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
) -> None:
    """One program merges TILE_V dims of the splits of one head of one row, weighted by their sums of exponentials.

    Bytes 4 R H P (V + 1) + R H V e; FLOPs 2 R H P V. R = 1, H = 128, P = 64, V = 512: 17 MB, 3.5 us on an H200
    (4.8 TB/s).
    """
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    num_latents = tl.minimum(tl.load(seq_lens_ptr + row), window)
    splits = tl.arange(0, TILE_P)
    is_used = splits * split_size < num_latents
    dims = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    first = (row * num_heads + head) * num_splits
    lse = tl.load(lse_ptr + first + splits, mask=is_used, other=float("-inf"))
    # Bounded below, so that a row of length 0 has weights 0 and not NaN.
    weights = tl.exp2(lse - tl.maximum(tl.max(lse, 0), -1e30))
    part_ptrs = parts_ptr + (first + splits)[:, None] * V + dims[None, :]
    parts = tl.load(part_ptrs, mask=is_used[:, None] & (dims < V)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * stride_or + head * stride_oh + dims, out.to(out_ptr.dtype.element_ty), mask=dims < V)


def latent_decode_torch(
    q_RHC: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    seq_lens_R: torch.Tensor,
    scale: float,
    window: int | None,
    value_dim: int,
) -> torch.Tensor:
    """The oracle: [R, H, V], scores in float32."""
    block_size = kv_cache.shape[1]
    out_RHV = q_RHC.new_zeros(*q_RHC.shape[:2], value_dim)
    for row, seq_len in enumerate(seq_lens_R.tolist()):
        if not seq_len:
            continue
        places = torch.arange(max(0, seq_len - window_of(window)), seq_len, device=q_RHC.device)
        blocks = block_table_RM[row].long()[places // block_size]
        latent_SC = kv_cache[blocks, places % block_size].float()
        weights_HS = (q_RHC[row].float() @ latent_SC.T * scale).softmax(-1)
        out_RHV[row] = (weights_HS @ latent_SC[:, :value_dim]).to(q_RHC.dtype)
    return out_RHV
