"""Paged latent prefill attention: chunks of queries over their rows' latents, causal within the chunk.

The absorbed form of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, appendix C): all heads read the same
latent, so a tile's rows are heads first, then queries. Tiles are counted on the GPU without knowing the rows' lengths,
as in paged_prefill.py: row i owns tiles start[i] // Q + i onwards, a few of which are empty.

Legend: T tokens of the step, R rows, Q queries of a tile, H query heads, C latent dim = V value dim + W dims after it,
B blocks, M blocks of a row, N block size, S latents of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.fp8 import CacheScales, check_cache
from blockferry.kernels.latent_tile import attend_latent_tile, check_latent_dims, latent_config, window_of
from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor, target_of
from blockferry.kernels.online_softmax import LOG2_E, tile_of


def latent_prefill(
    q_THC: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_start_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    num_tokens: int,
    scale: float,
    window: int | None,
    out_THV: torch.Tensor,
    scales: CacheScales | None = None,
) -> torch.Tensor:
    """Fill out_THV for tokens query_start[0]..query_start[R] and return it; row r's queries are its last ones.

    num_tokens (host) is at least query_start[R] - query_start[0]. The chunk's latents must be in the pages already.
    kv_cache is a [B, N, C] view, in fp8 where there are scales. Raises ValueError for arguments of another shape
    or dtype.
    """
    _, num_heads, latent_dim = q_THC.shape
    value_dim, num_rows = out_THV.shape[2], seq_lens_R.shape[0]
    check_latent_dims(latent_dim, value_dim)
    check_tensor("q", q_THC, shape=(None, num_heads, latent_dim), dtypes=FLOAT_DTYPES)
    check_cache(kv_cache, scales, shape=(None, None, latent_dim), dtypes=(q_THC.dtype,))
    check_tensor("block_table", block_table_RM, shape=(num_rows, None), dtypes=(torch.int32,))
    check_tensor("query_start", query_start_R1, shape=(num_rows + 1,), dtypes=(torch.int32,))
    check_tensor("seq_lens", seq_lens_R, shape=(num_rows,), dtypes=(torch.int32,))
    check_tensor("out", out_THV, shape=(q_THC.shape[0], num_heads, value_dim), dtypes=(q_THC.dtype,))
    if not num_rows or not num_tokens:
        return out_THV
    num_tile_rows = num_heads * num_tokens
    config = latent_config(
        num_tile_rows,
        latent_dim,
        value_dim,
        dtype=q_THC.dtype,
        target=target_of(q_THC.device),
        cache_dtype=kv_cache.dtype,
    )
    tile_h = min(num_heads, config.tile_m)
    tile_q = config.tile_m // tile_h
    latent_prefill_kernel[(triton.cdiv(num_heads, tile_h) * (num_tokens // tile_q + num_rows),)](
        q_THC,
        kv_cache,
        block_table_RM,
        query_start_R1,
        seq_lens_R,
        out_THV,
        q_THC if scales is None else scales.k_K,
        scale * LOG2_E,
        window_of(window),
        num_rows,
        q_THC.stride(0),
        q_THC.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table_RM.stride(0),
        out_THV.stride(0),
        out_THV.stride(1),
        H=num_heads,
        N=kv_cache.shape[1],
        V=value_dim,
        W=latent_dim - value_dim,
        TILE_H=tile_h,
        TILE_Q=tile_q,
        TILE_M=config.tile_m,
        TILE_S=config.tile_s,
        TILE_V=tile_of(value_dim),
        TILE_W=tile_of(latent_dim - value_dim),
        HAS_SCALE=scales is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_THV


@triton.jit
def latent_prefill_kernel(
    q_ptr: tl.tensor,  # [T, H, C]
    cache_ptr: tl.tensor,  # [B, N, C]
    table_ptr: tl.tensor,  # int32 [R, M]
    query_start_ptr: tl.tensor,  # int32 [R + 1]
    seq_lens_ptr: tl.tensor,  # int32 [R]
    out_ptr: tl.tensor,  # [T, H, V]
    cache_scale_ptr: tl.tensor,  # float32 [1], read with HAS_SCALE only
    scale_log2: tl.tensor,
    window: tl.tensor,
    num_rows: tl.tensor,
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_cb: tl.tensor,
    stride_cn: tl.tensor,
    stride_table: tl.tensor,
    stride_ot: tl.tensor,
    stride_oh: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_W: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    """One program: TILE_Q queries of one row times TILE_H heads over every latent they see.

    FLOPs 2 H (C + V) times the (query, latent) pairs: q (c + (q + 1) / 2) for q queries after c context tokens. Bytes:
    q and out H (C + V) e each query, C e each latent at least. q = 8,192, c = 0, H = 128, C = 576, V = 512, bfloat16 (a
    layer of DeepSeek-V3): 9.3 TFLOP, 9.45 ms on an H200 at 989 TFLOP/s; 2.3 GB, 0.48 ms at 4.8 TB/s. A tile of 64 rows
    reads a latent for 121 FLOPs a byte, so it is the L2 cache that must deliver 8 TB/s to reach that.
    """
    head_tiles: tl.constexpr = (H + TILE_H - 1) // TILE_H
    # The last tiles of a chunk see the most latents: start them first. Head tiles share them, so run side by side.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // head_tiles
    first_token = tl.load(query_start_ptr)
    low = 0
    high = num_rows
    while high - low > 1:  # the last row whose first tile is at or before this one
        middle = (low + high) // 2
        first_tile = (tl.load(query_start_ptr + middle) - first_token) // TILE_Q + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    row = low
    query_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_start
    first_query = (tile - (query_start - first_token) // TILE_Q - row) * TILE_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    context = seq_len - query_len

    rows_M = tl.arange(0, TILE_M)
    queries = first_query + rows_M // TILE_H
    heads = (tl.program_id(0) % head_tiles) * TILE_H + rows_M % TILE_H
    tokens = (query_start + queries).to(tl.int64)
    is_real = ((rows_M < TILE_Q * TILE_H) & (queries < query_len) & (heads < H))[:, None]
    dims_v = tl.arange(0, TILE_V)[None, :]
    dims_w = tl.arange(0, TILE_W)[None, :]
    q_ptrs = q_ptr + tokens[:, None] * stride_qt + heads[:, None] * stride_qh
    q_v = tl.load(q_ptrs + dims_v, mask=is_real & (dims_v < V), other=0.0)
    q_w = tl.load(q_ptrs + V + dims_w, mask=is_real & (dims_w < W), other=0.0)

    row_table_ptr = table_ptr + tl.cast(row, tl.int64) * stride_table
    last_pos = context + queries
    first_pos = last_pos + 1 - window
    acc = tl.zeros([TILE_M, TILE_V], tl.float32)
    if HAS_SCALE:
        scale_log2 = scale_log2 * tl.load(cache_scale_ptr)
    row_max = tl.full([TILE_M], -1e30, tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    begin = tl.maximum(context + first_query + 1 - window, 0)
    end = tl.minimum(seq_len, context + first_query + TILE_Q)
    for start in range(begin, end, TILE_S):
        acc, row_max, row_sum = attend_latent_tile(
            q_v, q_w, acc, row_max, row_sum, row_table_ptr, cache_ptr, start, end, first_pos, last_pos, scale_log2,
            stride_cb, stride_cn, N, V, W, TILE_S, TILE_V, TILE_W,
        )  # fmt: skip
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if HAS_SCALE:
        out = out * tl.load(cache_scale_ptr)
    out_ptrs = out_ptr + tokens[:, None] * stride_ot + heads[:, None] * stride_oh + dims_v
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_real & (dims_v < V))


def latent_prefill_torch(
    q_THC: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_start_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    scale: float,
    window: int | None,
    value_dim: int,
) -> torch.Tensor:
    """The oracle: [T, H, V], scores in float32; tokens outside the rows are zeros."""
    block_size = kv_cache.shape[1]
    out_THV = q_THC.new_zeros(*q_THC.shape[:2], value_dim)
    starts = query_start_R1.tolist()
    for row, seq_len in enumerate(seq_lens_R.tolist()):
        num_queries = starts[row + 1] - starts[row]
        for query in range(num_queries):
            stop = seq_len - num_queries + query + 1
            places = torch.arange(max(0, stop - window_of(window)), stop, device=q_THC.device)
            latent_SC = kv_cache[block_table_RM[row].long()[places // block_size], places % block_size].float()
            weights_HS = (q_THC[starts[row] + query].float() @ latent_SC.T * scale).softmax(-1)
            out_THV[starts[row] + query] = (weights_HS @ latent_SC[:, :value_dim]).to(q_THC.dtype)
    return out_THV
