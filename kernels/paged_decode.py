"""Paged decode attention: one query per row over the row's pages, split over the keys (flash-decoding).

After Dao et al., "Flash-Decoding for long-context inference" (2023). The query heads of one kv head share one
tl.dot tile, so each key is read once.

    paged_decode_kernel         (row, kv head, split) -> output of the split and its log2-sum-exp
    paged_decode_reduce_kernel  (row, head)           -> splits merged; not launched when one split holds all

Legend: R rows, H query heads, K kv heads, G = H / K, D head dim, B blocks, M blocks of a row, N block size, P splits,
S keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.attention_terms import (
    AttentionTerms,
    attend_dense,
    first_in_reach,
    longest_reach,
    seen_keys,
)
from blockferry.kernels.fp8 import FP8, check_cache, dequantise_kv
from blockferry.kernels.launch import (
    FLOAT_DTYPES,
    Target,
    check_group,
    check_head_dim,
    check_tensor,
    num_processors,
    target_of,
)
from blockferry.kernels.online_softmax import (
    TileConfig,
    attend_tile,
    first_key,
    load_sinks,
    stages_for,
    tile_of,
    tile_terms,
)

MIN_SPLIT_SIZE = 256  # keys: below that a split costs more to merge than it saves
MAX_SPLITS = 64
MAX_WORKSPACE_BYTES = 64 << 20
PROGRAMS_PER_PROCESSOR = 4
MAX_HEADS_PER_TILE = 64


def paged_decode(
    q_RHD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    seq_lens_R: torch.Tensor,
    total_seq_len: int,
    max_seq_len: int,
    rule: AttentionTerms,
    out_RHD: torch.Tensor,
) -> torch.Tensor:
    """Fill and return out_RHD: row r's query is its last of seq_lens[r] tokens; a row of length 0 yields zeros.

    Reads keys in the query's reach only, and as many entries of the block table; the work is split accordingly.
    kv_cache is a [B, K, N, 2*D] view. total_seq_len and max_seq_len (host values, need not be exact; max_seq_len must
    be an upper bound) choose the split. Raises ValueError for arguments of another shape or dtype.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    num_kv_heads = kv_cache.shape[1]
    check_head_dim(head_dim)
    group = check_group(num_heads, num_kv_heads)
    check_tensor("q", q_RHD, shape=(num_rows, num_heads, head_dim), dtypes=FLOAT_DTYPES)
    check_cache(kv_cache, rule.scales, shape=(None, num_kv_heads, None, 2 * head_dim), dtypes=(q_RHD.dtype,))
    check_tensor("block_table", block_table_RM, shape=(num_rows, None), dtypes=(torch.int32,))
    check_tensor("seq_lens", seq_lens_R, shape=(num_rows,), dtypes=(torch.int32,))
    check_tensor("out", out_RHD, shape=tuple(q_RHD.shape), dtypes=(q_RHD.dtype,))
    if rule.sinks_H is not None:
        check_tensor("sinks", rule.sinks_H, shape=(num_heads,), dtypes=(torch.float32,))
    if not num_rows:
        return out_RHD
    config = decode_config(head_dim, q_RHD.dtype, target_of(q_RHD.device), cache_dtype=kv_cache.dtype)
    tile_g = min(max(config.tile_m, triton.next_power_of_2(group)), MAX_HEADS_PER_TILE)
    head_tiles = num_kv_heads * triton.cdiv(group, tile_g)
    terms, max_keys = tile_terms(rule), longest_reach(rule, max_seq_len)
    split_size = choose_split_size(
        total_work=min(total_seq_len, num_rows * max_keys) * head_tiles,
        max_keys=max_keys,
        bytes_per_split=q_RHD.numel() * 4,
        num_programs=num_processors(q_RHD.device) * PROGRAMS_PER_PROCESSOR,
    )
    num_splits = max(1, triton.cdiv(max_keys, split_size))
    parts_RHPD, lse_RHP = out_RHD.unsqueeze(2), out_RHD
    if num_splits > 1:
        parts_RHPD = q_RHD.new_empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32)
        lse_RHP = q_RHD.new_empty((num_rows, num_heads, num_splits), dtype=torch.float32)
    paged_decode_kernel[(num_rows, head_tiles, num_splits)](
        q_RHD,
        kv_cache,
        block_table_RM,
        seq_lens_R,
        parts_RHPD,
        lse_RHP,
        q_RHD if rule.sinks_H is None else rule.sinks_H,
        q_RHD if rule.scales is None else rule.scales.k_K,
        q_RHD if rule.scales is None else rule.scales.v_K,
        terms.factor,
        split_size,
        q_RHD.stride(0),
        q_RHD.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        block_table_RM.stride(0),
        parts_RHPD.stride(0),
        parts_RHPD.stride(1),
        parts_RHPD.stride(2),
        num_heads * num_splits,
        num_splits,
        G=group,
        N=kv_cache.shape[2],
        D=head_dim,
        TILE_G=tile_g,
        TILE_S=config.tile_s,
        TILE_D=tile_of(head_dim),
        WINDOW=terms.window,
        CHUNK=terms.chunk,
        SOFT_CAP=terms.soft_cap,
        HAS_SINKS=rule.sinks_H is not None,
        HAS_SCALES=rule.scales is not None,
        IS_SPLIT=num_splits > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        paged_decode_reduce_kernel[(num_rows, num_heads)](
            parts_RHPD,
            lse_RHP,
            seq_lens_R,
            out_RHD,
            split_size,
            num_splits,
            num_heads,
            out_RHD.stride(0),
            out_RHD.stride(1),
            D=head_dim,
            WINDOW=terms.window,
            CHUNK=terms.chunk,
            TILE_P=triton.next_power_of_2(num_splits),
            TILE_D=triton.next_power_of_2(head_dim),
            num_warps=4,
        )
    return out_RHD


def decode_config(
    head_dim: int, dtype: torch.dtype, target: Target, *, cache_dtype: torch.dtype | None = None
) -> TileConfig:
    """Tile sizes by reason, not by tuning: enough key bytes in flight to cover the memory's latency.

    A processor of an H200 must keep 4.8 TB/s * 0.7 us / 132 = 25 KB in flight; three resident programs with two tiles
    of 32 KB each (k and v of 64 keys of D = 128 in bfloat16) keep more than that. Other GPUs need half, and have less
    shared memory. A tile of fp8 takes registers once more while it is converted, of which float32 has none to spare.
    """
    key_bytes = 2 * tile_of(head_dim) * dtype.itemsize
    is_short = dtype is torch.float32 and cache_dtype is FP8
    tile_bytes = (32 if target is Target.HOPPER else 16) << 10
    return TileConfig(
        tile_m=16,
        tile_s=16 if is_short else max(16, min(128, tile_bytes // key_bytes)),
        num_warps=8 if dtype is torch.float32 else 4,  # float32 products are made of registers
        num_stages=2 if target is Target.CDNA else stages_for(2),
    )


def choose_split_size(*, total_work: int, max_keys: int, bytes_per_split: int, num_programs: int) -> int:
    """Keys per split, a power of two: enough splits to fill the GPU, few enough for the workspace."""
    max_splits = max(1, min(MAX_SPLITS, MAX_WORKSPACE_BYTES // bytes_per_split))
    split_size: int = max(total_work // num_programs, -(-max_keys // max_splits), MIN_SPLIT_SIZE)
    return 1 << (split_size - 1).bit_length()


@triton.jit
def paged_decode_kernel(
    q_ptr: tl.tensor,  # [R, H, D]
    cache_ptr: tl.tensor,  # [B, K, N, 2*D]
    table_ptr: tl.tensor,  # int32 [R, M]
    seq_lens_ptr: tl.tensor,  # int32 [R]
    parts_ptr: tl.tensor,  # [R, H, P, D]: float32 where split, else the output itself
    lse_ptr: tl.tensor,  # float32 [R, H, P]: log2 of the sum of exponentials; unused where not split
    sinks_ptr: tl.tensor,  # float32 [H], read with HAS_SINKS only
    k_scales_ptr: tl.tensor,  # float32 [K], as v_scales read with HAS_SCALES only
    v_scales_ptr: tl.tensor,
    factor: tl.tensor,  # TileTerms.factor
    split_size: tl.tensor,
    stride_qr: tl.tensor,
    stride_qh: tl.tensor,
    stride_cb: tl.tensor,
    stride_ck: tl.tensor,
    stride_cn: tl.tensor,
    stride_table: tl.tensor,
    stride_pr: tl.tensor,
    stride_ph: tl.tensor,
    stride_pp: tl.tensor,
    stride_lr: tl.tensor,
    stride_lh: tl.tensor,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    TILE_G: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """One program: TILE_G heads of one kv head of one row over at most split_size keys.

    Bytes 2 K D e sum(S) + 2 R H D e (e bytes an element, S keys of a row in reach); FLOPs 4 H D sum(S). R = 64,
    S = 4,096, H = 32, K = 8, D = 128, bfloat16 (a layer of an 8B Llama): 1.07 GB, 224 us on an H200 at 4.8 TB/s;
    4.3 GFLOP, 4 us at 990 TFLOP/s. Bandwidth decides for every G below 206. A window of 1,024 tokens over as long
    sequences: 269 MB, 56 us.
    """
    row = tl.program_id(0).to(tl.int64)
    tiles_per_head: tl.constexpr = (G + TILE_G - 1) // TILE_G
    kv_head = tl.program_id(1) // tiles_per_head
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    # Split 0 begins at the first key in reach, so no key before it needs a mask.
    first = first_key(seq_len - 1, WINDOW, CHUNK)
    begin = first + split * split_size
    if (begin >= seq_len) & (split > 0):
        return
    end = tl.minimum(begin + split_size, seq_len)
    group = (tl.program_id(1) % tiles_per_head) * TILE_G + tl.arange(0, TILE_G)
    heads = kv_head * G + group
    dims = tl.arange(0, TILE_D)
    mask = (group < G)[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + row * stride_qr + heads[:, None] * stride_qh + dims[None, :], mask=mask, other=0.0)
    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_ck
    if HAS_SCALES:
        factor = factor * tl.load(k_scales_ptr + kv_head)
    row_table_ptr = table_ptr + row * stride_table
    last_pos = tl.zeros([TILE_G], tl.int32) + (end - 1)
    acc = tl.zeros([TILE_G, TILE_D], tl.float32)
    row_max = tl.full([TILE_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_G], tl.float32)
    if HAS_SINKS:
        row_max = tl.where(split == 0, load_sinks(sinks_ptr, heads, group < G), row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)
    for start in range(begin, end, TILE_S):
        acc, row_max, row_sum = attend_tile(
            q, acc, row_max, row_sum, row_table_ptr, head_ptr, start, begin, end, last_pos, factor, stride_cb,
            stride_cn, N, D, TILE_S, TILE_D, SOFT_CAP, True, 0, 0,
        )  # fmt: skip
    total = tl.where(row_sum > 0, row_sum, 1.0)  # a row of length 0 yields zeros
    out = acc / total[:, None]
    if HAS_SCALES:
        out = out * tl.load(v_scales_ptr + kv_head)
    part_ptrs = parts_ptr + row * stride_pr + heads[:, None] * stride_ph + split * stride_pp + dims[None, :]
    tl.store(part_ptrs, out.to(parts_ptr.dtype.element_ty), mask=mask)
    if IS_SPLIT:
        tl.store(lse_ptr + row * stride_lr + heads * stride_lh + split, row_max + tl.log2(total), mask=group < G)


@triton.jit
def paged_decode_reduce_kernel(
    parts_ptr: tl.tensor,  # float32 [R, H, P, D], contiguous
    lse_ptr: tl.tensor,  # float32 [R, H, P], contiguous
    seq_lens_ptr: tl.tensor,  # int32 [R]
    out_ptr: tl.tensor,  # [R, H, D]
    split_size: tl.tensor,
    num_splits: tl.tensor,  # P
    num_heads: tl.tensor,  # H
    stride_or: tl.tensor,
    stride_oh: tl.tensor,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """One program merges the splits of one head of one row, weighted by their sums of exponentials.

    Bytes 4 R H P (D + 1) + R H D e; FLOPs 2 R H P D. R = 8, H = 32, P = 32, D = 128: 4.2 MB, 0.9 us on an H200
    (4.8 TB/s), below launch time.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row)
    splits = tl.arange(0, TILE_P)
    is_used = splits * split_size < seq_len - first_key(seq_len - 1, WINDOW, CHUNK)
    dims = tl.arange(0, TILE_D)
    first = (row * num_heads + head) * num_splits
    lse = tl.load(lse_ptr + first + splits, mask=is_used, other=float("-inf"))
    # Bounded below, so that a row of length 0 has weights 0 and not NaN.
    weights = tl.exp2(lse - tl.maximum(tl.max(lse, 0), -1e30))
    part_ptrs = parts_ptr + (first + splits)[:, None] * D + dims[None, :]
    parts = tl.load(part_ptrs, mask=is_used[:, None] & (dims < D)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * stride_or + head * stride_oh + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D)


def paged_decode_torch(
    q_RHD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    block_table_RM: torch.Tensor,
    seq_lens_R: torch.Tensor,
    rule: AttentionTerms,
) -> torch.Tensor:
    """The oracle: [R, H, D], scores in float32."""
    if rule.scales is not None:
        kv_cache = dequantise_kv(kv_cache, rule.scales, torch.float32)
    block_size = kv_cache.shape[2]
    out_RHD = torch.zeros_like(q_RHD)
    for row in range(len(q_RHD)):
        seq_len = int(seq_lens_R[row])
        if not seq_len:
            continue
        keys_S = torch.arange(first_in_reach(rule, seq_len - 1), seq_len, device=q_RHD.device)
        blocks_S = block_table_RM[row, keys_S // block_size].long()
        kv_KSC = kv_cache[blocks_S, :, keys_S % block_size].transpose(0, 1)
        seen_QS = seen_keys(rule, keys_S[-1:], keys_S)
        out_RHD[row] = attend_dense(q_RHD[row][None, None], kv_KSC[None], seen_QS[None], rule)[0, 0]
    return out_RHD
