"""Paged prefill attention: chunks of queries over their rows' pages, causal within the chunk.

The queries of a tile and the query heads of one kv head share one tl.dot tile, so each key tile is read once for all
of them. Tiles are counted on the GPU without knowing the rows' lengths, as vLLM's unified attention does (vllm
v1/attention/ops/triton_unified_attention.py): row i owns tiles start[i] // Q + i onwards, a few of which are empty.

    keys:     |<------- context ------->|<---- chunk ---->|
    query j:   all of the context         the chunk's 0..j     of these, what is in the query's reach

A tile's loop begins at the first key in reach of its first query and has a mask where its queries' reaches begin and
end, but not between. Key tiles begin at multiples of S, so a query is computed alike in every chunk.

Legend: T tokens of the step, R rows, Q queries of a tile, H query heads, K kv heads, G = H / K, D head dim, B blocks,
M blocks of a row, N block size, S keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.attention_terms import AttentionTerms, attend_dense, first_in_reach, seen_keys
from blockferry.kernels.fp8 import FP8, check_cache, dequantise_kv
from blockferry.kernels.launch import (
    FLOAT_DTYPES,
    Target,
    check_group,
    check_head_dim,
    check_tensor,
    target_of,
)
from blockferry.kernels.online_softmax import (
    TileConfig,
    TileTerms,
    attend_tile,
    first_key,
    load_sinks,
    stages_for,
    tile_of,
    tile_terms,
)


def paged_prefill(
    q_THD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_start_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    num_tokens: int,
    rule: AttentionTerms,
    out_THD: torch.Tensor,
) -> torch.Tensor:
    """Fill out_THD for tokens query_start[0]..query_start[R] and return it; row r's queries are its last ones.

    Blocks before the reach of a row's first query are not read, nor are their entries in the block table. num_tokens
    (host) is at least query_start[R] - query_start[0]. The chunk's keys must be in the pages already. kv_cache is a
    [B, K, N, 2*D] view. Raises ValueError for arguments of another shape or dtype.
    """
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads, num_rows = kv_cache.shape[1], seq_lens_R.shape[0]
    check_head_dim(head_dim)
    group = check_group(num_heads, num_kv_heads)
    check_tensor("q", q_THD, shape=(None, num_heads, head_dim), dtypes=FLOAT_DTYPES)
    check_cache(kv_cache, rule.scales, shape=(None, num_kv_heads, None, 2 * head_dim), dtypes=(q_THD.dtype,))
    check_tensor("block_table", block_table_RM, shape=(num_rows, None), dtypes=(torch.int32,))
    check_tensor("query_start", query_start_R1, shape=(num_rows + 1,), dtypes=(torch.int32,))
    check_tensor("seq_lens", seq_lens_R, shape=(num_rows,), dtypes=(torch.int32,))
    check_tensor("out", out_THD, shape=tuple(q_THD.shape), dtypes=(q_THD.dtype,))
    if rule.sinks_H is not None:
        check_tensor("sinks", rule.sinks_H, shape=(num_heads,), dtypes=(torch.float32,))
    if not num_rows or not num_tokens:
        return out_THD
    terms = tile_terms(rule)
    config = prefill_config(head_dim, q_THD.dtype, target_of(q_THD.device), terms, cache_dtype=kv_cache.dtype)
    tile_g = min(group, config.tile_m)
    tile_q = config.tile_m // tile_g
    paged_prefill_kernel[(num_tokens // tile_q + num_rows, num_kv_heads * triton.cdiv(group, tile_g))](
        q_THD,
        kv_cache,
        block_table_RM,
        query_start_R1,
        seq_lens_R,
        out_THD,
        q_THD if rule.sinks_H is None else rule.sinks_H,
        q_THD if rule.scales is None else rule.scales.k_K,
        q_THD if rule.scales is None else rule.scales.v_K,
        terms.factor,
        num_rows,
        q_THD.stride(0),
        q_THD.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        block_table_RM.stride(0),
        out_THD.stride(0),
        out_THD.stride(1),
        G=group,
        N=kv_cache.shape[2],
        D=head_dim,
        TILE_G=tile_g,
        TILE_Q=tile_q,
        TILE_M=config.tile_m,
        TILE_S=config.tile_s,
        TILE_D=tile_of(head_dim),
        WINDOW=terms.window,
        CHUNK=terms.chunk,
        SOFT_CAP=terms.soft_cap,
        HAS_SINKS=rule.sinks_H is not None,
        HAS_SCALES=rule.scales is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_THD


def prefill_config(
    head_dim: int, dtype: torch.dtype, target: Target, terms: TileTerms, *, cache_dtype: torch.dtype | None = None
) -> TileConfig:
    """Tile sizes by reason, not by tuning: accumulator in registers without spills, key tiles in shared memory."""
    tile_d = tile_of(head_dim)
    if dtype is torch.float32:  # products run on the scalar units, out of registers
        return TileConfig(tile_m=32, tile_s=16, num_warps=4, num_stages=1)
    if target is Target.CDNA:
        return TileConfig(
            tile_m=128 if tile_d <= 128 else 64, tile_s=32, num_warps=4, num_stages=2 if tile_d <= 128 else 1
        )
    tile_m = 128 if tile_d <= 128 or target is Target.HOPPER else 64
    # Masks at both ends of the reach take the registers that 64 keys of D = 128 would.
    has_registers = tile_d <= 64 or target is Target.HOPPER or not terms.window + terms.chunk
    tile_s = 64 if tile_d <= 128 and has_registers else 32
    if tile_d > 128 and cache_dtype is FP8:  # which takes registers once more while it is converted
        tile_s = 16
    row_bytes = tile_d * dtype.itemsize
    fits_two_ahead = (tile_m + 3 * 2 * tile_s) * row_bytes <= target.shared_bytes
    return TileConfig(tile_m=tile_m, tile_s=tile_s, num_warps=8, num_stages=stages_for(2 if fits_two_ahead else 1))


@triton.jit
def paged_prefill_kernel(
    q_ptr: tl.tensor,  # [T, H, D]
    cache_ptr: tl.tensor,  # [B, K, N, 2*D]
    table_ptr: tl.tensor,  # int32 [R, M]
    query_start_ptr: tl.tensor,  # int32 [R + 1]
    seq_lens_ptr: tl.tensor,  # int32 [R]
    out_ptr: tl.tensor,  # [T, H, D]
    sinks_ptr: tl.tensor,  # float32 [H], read with HAS_SINKS only
    k_scales_ptr: tl.tensor,  # float32 [K], as v_scales read with HAS_SCALES only
    v_scales_ptr: tl.tensor,
    factor: tl.tensor,  # TileTerms.factor
    num_rows: tl.tensor,
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_cb: tl.tensor,
    stride_ck: tl.tensor,
    stride_cn: tl.tensor,
    stride_table: tl.tensor,
    stride_ot: tl.tensor,
    stride_oh: tl.tensor,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    TILE_G: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
) -> None:
    """One program: TILE_Q queries of one row times TILE_G heads of one kv head over every key they see.

    FLOPs 4 H D times the (query, key) pairs: q (c + (q + 1) / 2) for q queries after c context tokens. Bytes: q and
    out 2 H D e each query, pages 2 K D e each key at least. q = 8,192, c = 0, H = 32, K = 8, D = 128, bfloat16 (a
    layer of an 8B Llama): 550 GFLOP, 0.555 ms on an H200 at 990 TFLOP/s; 168 MB, 0.035 ms at 4.8 TB/s. In a window
    of w < c tokens the pairs are q w: w = 1,024, c = 32,768: 137 GFLOP, 0.139 ms; 172 MB.
    """
    # The last tiles of a chunk see the most keys: start them first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
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

    tiles_per_head: tl.constexpr = (G + TILE_G - 1) // TILE_G
    kv_head = tl.program_id(1) // tiles_per_head
    rows_M = tl.arange(0, TILE_M)
    queries = first_query + rows_M // TILE_G
    group = (tl.program_id(1) % tiles_per_head) * TILE_G + rows_M % TILE_G
    heads = kv_head * G + group
    tokens = (query_start + queries).to(tl.int64)
    dims = tl.arange(0, TILE_D)
    is_real = (rows_M < TILE_Q * TILE_G) & (queries < query_len) & (group < G)
    mask = is_real[:, None] & (dims < D)[None, :]
    q_ptrs = q_ptr + tokens[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)

    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_ck
    if HAS_SCALES:
        factor = factor * tl.load(k_scales_ptr + kv_head)
    row_table_ptr = table_ptr + tl.cast(row, tl.int64) * stride_table
    last_pos = context + queries
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    # Finite, because a query may see nothing of the first tiles.
    row_max = tl.full([TILE_M], -1e30, tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    if HAS_SINKS:
        row_max = load_sinks(sinks_ptr, heads, is_real)
        row_sum += 1.0
    end = tl.minimum(seq_len, context + first_query + TILE_Q)
    seen_by_all = (context + first_query + 1) // TILE_S * TILE_S
    is_local: tl.constexpr = WINDOW + CHUNK > 0
    low = first_key(context + first_query, WINDOW, CHUNK)
    begin = 0
    if is_local:
        begin = tl.cdiv(first_key(end - 1, WINDOW, CHUNK), TILE_S) * TILE_S
        for start in range(low // TILE_S * TILE_S, tl.minimum(begin, end), TILE_S):
            acc, row_max, row_sum = attend_tile(
                q, acc, row_max, row_sum, row_table_ptr, head_ptr, start, low, end, last_pos, factor, stride_cb,
                stride_cn, N, D, TILE_S, TILE_D, SOFT_CAP, True, WINDOW, CHUNK,
            )  # fmt: skip
    for start in range(begin, seen_by_all, TILE_S):
        acc, row_max, row_sum = attend_tile(
            q, acc, row_max, row_sum, row_table_ptr, head_ptr, start, low, end, last_pos, factor, stride_cb,
            stride_cn, N, D, TILE_S, TILE_D, SOFT_CAP, False, 0, 0,
        )  # fmt: skip
    for start in range(tl.maximum(begin, seen_by_all), end, TILE_S):
        acc, row_max, row_sum = attend_tile(
            q, acc, row_max, row_sum, row_table_ptr, head_ptr, start, low, end, last_pos, factor, stride_cb,
            stride_cn, N, D, TILE_S, TILE_D, SOFT_CAP, True, 0, 0,
        )  # fmt: skip
    total = tl.where(row_sum > 0, row_sum, 1.0)  # of queries that are not real
    out = acc / total[:, None]
    if HAS_SCALES:
        out = out * tl.load(v_scales_ptr + kv_head)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :], out, mask=mask)


def paged_prefill_torch(
    q_THD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    query_start_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    rule: AttentionTerms,
) -> torch.Tensor:
    """The oracle: [T, H, D], scores in float32; tokens outside the rows are zeros."""
    if rule.scales is not None:
        kv_cache = dequantise_kv(kv_cache, rule.scales, torch.float32)
    block_size = kv_cache.shape[2]
    out_THD = torch.zeros_like(q_THD)
    starts = query_start_R1.tolist()
    for row, seq_len in enumerate(seq_lens_R.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        context = seq_len - (starts[row + 1] - starts[row])
        keys_S = torch.arange(first_in_reach(rule, context), seq_len, device=q_THD.device)
        blocks_S = block_table_RM[row, keys_S // block_size].long()
        kv_KSC = kv_cache[blocks_S, :, keys_S % block_size].transpose(0, 1)
        seen_QS = seen_keys(rule, torch.arange(context, seq_len, device=q_THD.device), keys_S)
        out_THD[tokens] = attend_dense(q_THD[tokens][None], kv_KSC[None], seen_QS[None], rule)[0]
    return out_THD
