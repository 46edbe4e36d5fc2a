"""KV write: the step's rotated keys and values go to their slots in the paged pool.

    page of one block and layer (HND, any strides):   [K, N, 2*D]    k at [..., :D], v at [..., D:]

Legend: T tokens of the step, K kv heads, D head dim, B blocks, N block size (tokens), C = 2*D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.fp8 import FP8_MAX, CacheScales, check_cache, quantise
from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor

MAX_TILE = 4096  # elements of k (and of v) that one program moves
_FP8_MAX = tl.constexpr(FP8_MAX)  # kernels read no other globals


def kv_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    scales: CacheScales | None = None,
) -> None:
    """Store k and v, cast to the cache's dtype; tokens whose slot is negative, or past slot_mapping, are skipped.

    kv_cache is a [B, K, N, 2*D] view of one layer, in fp8 where there are scales: see fp8.quantise. Raises ValueError
    for arguments of another shape or dtype.
    """
    _, num_kv_heads, head_dim = k_TKD.shape
    num_tokens = slot_mapping_T.shape[0]
    check_tensor("k", k_TKD, shape=(None, num_kv_heads, head_dim), dtypes=FLOAT_DTYPES)
    check_tensor("v", v_TKD, shape=tuple(k_TKD.shape), dtypes=(k_TKD.dtype,))
    check_cache(kv_cache, scales, shape=(None, num_kv_heads, None, 2 * head_dim), dtypes=FLOAT_DTYPES)
    check_tensor("slot_mapping", slot_mapping_T, shape=(None,), dtypes=(torch.int64,))
    if num_tokens > k_TKD.shape[0]:
        raise ValueError(f"slot_mapping has {num_tokens} entries for {k_TKD.shape[0]} tokens of k; drop the rest")
    if not num_tokens:
        return
    tile_d = triton.next_power_of_2(head_dim)
    tile_k = min(triton.next_power_of_2(num_kv_heads), max(1, MAX_TILE // tile_d))
    kv_write_kernel[(num_tokens, triton.cdiv(num_kv_heads, tile_k))](
        k_TKD,
        v_TKD,
        kv_cache if scales is None else kv_cache.view(torch.uint8),
        slot_mapping_T,
        kv_cache if scales is None else scales.k_K,
        kv_cache if scales is None else scales.v_K,
        k_TKD.stride(0),
        k_TKD.stride(1),
        v_TKD.stride(0),
        v_TKD.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        K=num_kv_heads,
        N=kv_cache.shape[2],
        D=head_dim,
        TILE_K=tile_k,
        TILE_D=tile_d,
        HAS_SCALES=scales is not None,
        num_warps=4 if tile_k * tile_d >= 1024 else 1,
    )


@triton.jit
def kv_write_kernel(
    k_ptr: tl.tensor,  # [T, K, D]
    v_ptr: tl.tensor,  # [T, K, D]
    cache_ptr: tl.tensor,  # [B, K, N, 2*D], bytes of e4m3 with HAS_SCALES
    slots_ptr: tl.tensor,  # int64 [T]
    k_scales_ptr: tl.tensor,  # float32 [K], as v_scales read with HAS_SCALES only
    v_scales_ptr: tl.tensor,
    stride_kt: tl.tensor,
    stride_kk: tl.tensor,
    stride_vt: tl.tensor,
    stride_vk: tl.tensor,
    stride_cb: tl.tensor,
    stride_ck: tl.tensor,
    stride_cn: tl.tensor,
    K: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
) -> None:
    """One program moves TILE_K heads of one token.

    Bytes 4 T K D e (k and v read and written, e bytes an element) + 8 T; FLOPs none. T = 8,192, K = 8, D = 128,
    bfloat16: 67 MB, 14 us on an H200 (4.8 TB/s); a decode step of T = 256: 2.1 MB, 0.4 us, below launch time. A cache
    in fp8 takes half of the writes.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)[:, None]
    dims = tl.arange(0, TILE_D)[None, :]
    mask = (heads < K) & (dims < D)
    k = tl.load(k_ptr + token * stride_kt + heads * stride_kk + dims, mask=mask)
    v = tl.load(v_ptr + token * stride_vt + heads * stride_vk + dims, mask=mask)
    if HAS_SCALES:
        k = _e4m3_bytes(k, tl.load(k_scales_ptr + heads, mask=heads < K, other=1.0))
        v = _e4m3_bytes(v, tl.load(v_scales_ptr + heads, mask=heads < K, other=1.0))
    entry_ptr = cache_ptr + (slot // N) * stride_cb + (slot % N) * stride_cn
    entry_ptrs = entry_ptr + heads.to(tl.int64) * stride_ck + dims
    tl.store(entry_ptrs, k.to(cache_ptr.dtype.element_ty), mask=mask)
    tl.store(entry_ptrs + D, v.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _e4m3_bytes(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """uint8: what fp8.quantise stores. In integers, which round alike on every GPU and in Triton's interpreter.

    From 2^-6 on, e4m3 is the top of a float32's mantissa under a shorter exponent; what is smaller counts steps of
    2^-9, the last bit of a float32 at 2^14.
    """
    scaled = tl.div_rn(x.to(tl.float32), scale)
    size = tl.minimum(tl.abs(scaled), _FP8_MAX)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(scaled != scaled, 0x7F, code)  # noqa: PLR0124  # NaN
    return (code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


def kv_write_torch(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    scales: CacheScales | None = None,
) -> None:
    """The oracle: the same, one token after the other."""
    block_size, head_dim = kv_cache.shape[2], k_TKD.shape[2]
    if scales is not None:
        k_TKD, v_TKD = quantise(k_TKD, scales.k_K), quantise(v_TKD, scales.v_K)
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, :, slot % block_size, :head_dim] = k_TKD[token]
            kv_cache[slot // block_size, :, slot % block_size, head_dim:] = v_TKD[token]
