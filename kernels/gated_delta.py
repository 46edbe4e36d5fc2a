"""The gated delta rule over paged states: the state S decays, beta of what k finds in it is replaced by v, q reads it.

    S' = exp(log_decay) S;  S'' = S' + k (x) beta (v - k . S');  o = q . S''

    delta_step_kernel   (row, head, tile of V)          token after token: decode rows, and prompts in float32
    delta_solve_kernel  (chunk, prefill row, head)      each chunk's two matrices [S, S], to scratch memory: the inverse
                                                        of its triangular system, and how queries weigh its deltas
    delta_chunk_kernel  (prefill row, head, tile of V)  chunk after chunk, through those matrices

After Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), section 3.3, and flash-linear-attention
(fla/ops/gated_delta_rule), which also keeps the systems apart from the scan: those of all chunks are solved at once.

Legend: T tokens, S tokens of a chunk, H heads, K key dim, V value dim, B blocks, R rows.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, Target, check_tensor, target_of
from blockferry.kernels.state_rows import StateRows, check_state, decay_between, load_state, store_state

MAX_KEY_DIM = 256
STEP_ELEMENTS = 2048  # of a step program's state


def gated_delta(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    *,
    state_BHKV: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """[T, H, V] in v's dtype, computed in float32, but that chunks of half precision multiply matrices of v's dtype.

    The rows' states are brought forward. q and k are l2-normalised, q scaled, both of v's dtype; only the last dims of
    q, k and v need be contiguous. Raises ValueError for arguments of another shape or dtype.
    """
    num_tokens, num_heads, key_dim = k_THK.shape
    value_dim = v_THV.shape[2]
    check_tensor("q", q_THK, shape=(num_tokens, num_heads, key_dim), dtypes=(v_THV.dtype,))
    check_tensor("k", k_THK, shape=(None, None, None), dtypes=(v_THV.dtype,))
    check_tensor("v", v_THV, shape=(num_tokens, num_heads, None), dtypes=FLOAT_DTYPES)
    check_tensor("log_decay", log_decay_TH, shape=(num_tokens, num_heads), dtypes=FLOAT_DTYPES)
    check_tensor("beta", beta_TH, shape=(num_tokens, num_heads), dtypes=FLOAT_DTYPES)
    check_state("state", state_BHKV, shape=(num_heads, key_dim, value_dim), rows=rows)
    if key_dim > MAX_KEY_DIM:
        raise ValueError(f"key dim {key_dim} exceeds {MAX_KEY_DIM}, one program's tile; use the torch ops")
    out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
    is_chunked = v_THV.dtype is not torch.float32
    num_stepped_rows = rows.num_decode_rows if is_chunked else rows.num_rows
    if num_stepped_rows:
        tile_k = triton.next_power_of_2(key_dim)
        tile_v = min(triton.next_power_of_2(value_dim), max(1, STEP_ELEMENTS // tile_k))
        delta_step_kernel[(num_stepped_rows, num_heads, triton.cdiv(value_dim, tile_v))](
            *(q_THK, k_THK, v_THV, log_decay_TH, beta_TH, state_BHKV, out_THV),
            *(rows.query_start_R1, rows.source_R, rows.target_R, rows.is_fresh_R),
            *(q_THK.stride(0), q_THK.stride(1), k_THK.stride(0), k_THK.stride(1), v_THV.stride(0), v_THV.stride(1)),
            *(log_decay_TH.stride(0), beta_TH.stride(0), state_BHKV.stride(0)),
            H=num_heads,
            K=key_dim,
            V=value_dim,
            TILE_K=tile_k,
            TILE_V=tile_v,
            num_warps=4,
        )
    if is_chunked and rows.num_prefill_rows:
        _run_chunks(q_THK, k_THK, v_THV, log_decay_TH, beta_TH, out_THV, state_BHKV=state_BHKV, rows=rows)
    return out_THV


def _run_chunks(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    out_THV: torch.Tensor,
    *,
    state_BHKV: torch.Tensor,
    rows: StateRows,
) -> None:
    num_tokens, num_heads, key_dim = k_THK.shape
    value_dim = v_THV.shape[2]
    target = target_of(k_THK.device)
    config = chunk_config(key_dim, value_dim, target)
    inverse_THS = torch.empty((num_tokens, num_heads, config.tile_s), dtype=k_THK.dtype, device=k_THK.device)
    weights_THS = torch.empty_like(inverse_THS)
    delta_solve_kernel[(triton.cdiv(rows.max_query_len, config.tile_s), rows.num_prefill_rows, num_heads)](
        *(q_THK, k_THK, log_decay_TH, beta_TH, inverse_THS, weights_THS, rows.query_start_R1),
        *(q_THK.stride(0), q_THK.stride(1), k_THK.stride(0), k_THK.stride(1)),
        *(log_decay_TH.stride(0), beta_TH.stride(0)),
        rows.num_decode_rows,
        H=num_heads,
        K=key_dim,
        TILE_S=config.tile_s,
        TILE_K=config.tile_k,
        PRECISION="ieee" if target is Target.CDNA else "tf32",
        num_warps=4,
        num_stages=1,
    )
    delta_chunk_kernel[(rows.num_prefill_rows, num_heads, triton.cdiv(value_dim, config.tile_v))](
        *(q_THK, k_THK, v_THV, log_decay_TH, beta_TH, inverse_THS, weights_THS, state_BHKV, out_THV),
        *(rows.query_start_R1, rows.source_R, rows.target_R, rows.is_fresh_R),
        *(q_THK.stride(0), q_THK.stride(1), k_THK.stride(0), k_THK.stride(1), v_THV.stride(0), v_THV.stride(1)),
        *(log_decay_TH.stride(0), beta_TH.stride(0), state_BHKV.stride(0)),
        rows.num_decode_rows,
        H=num_heads,
        K=key_dim,
        V=value_dim,
        TILE_S=config.tile_s,
        TILE_K=config.tile_k,
        TILE_V=config.tile_v,
        num_warps=4,
        num_stages=1,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig:
    """How the kernels for prompts are cut: by what keeps the chunk kernel out of its registers' way."""

    tile_s: int
    tile_k: int
    tile_v: int


def chunk_config(key_dim: int, value_dim: int, target: Target) -> ChunkConfig:
    """Hopper multiplies out of shared memory; the others hold both factors in registers, so that tiles are smaller."""
    tile_k = max(16, triton.next_power_of_2(key_dim))
    num_elements = 4096 if target is Target.HOPPER else 2048
    longest = 64 if target in {Target.HOPPER, Target.AMPERE} else 32
    return ChunkConfig(
        tile_s=longest if tile_k <= 128 else 16,
        tile_k=tile_k,
        tile_v=max(16, min(triton.next_power_of_2(value_dim), num_elements // tile_k)),
    )


@triton.jit
def delta_step_kernel(
    q_ptr: tl.tensor,  # [T, H, K]
    k_ptr: tl.tensor,  # [T, H, K]
    v_ptr: tl.tensor,  # [T, H, V]
    log_decay_ptr: tl.tensor,  # [T, H]
    beta_ptr: tl.tensor,  # [T, H]
    state_ptr: tl.tensor,  # [B, H, K, V]
    out_ptr: tl.tensor,  # [T, H, V], contiguous
    starts_ptr: tl.tensor,  # int32 [R+1]
    source_ptr: tl.tensor,  # int64 [R]
    target_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_kt: tl.tensor,
    stride_kh: tl.tensor,
    stride_vt: tl.tensor,
    stride_vh: tl.tensor,
    stride_gt: tl.tensor,
    stride_bt: tl.tensor,
    stride_sb: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
) -> None:
    """One program: TILE_V values of one head of one row.

    Bytes 2 R H K V s + 2 T H (K + V) e (s bytes a state, e an input); FLOPs 7 T H K V. A decode step of T = R = 256,
    H = 32, K = V = 128, float32 states (a layer of Qwen3-Next): 1.08 GB, 225 us on an H200 (4.8 TB/s); 0.9 GFLOP, 14 us
    of its 67 TFLOP/s.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    keys = tl.arange(0, TILE_K)
    values = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    is_key, is_value = keys < K, values < V
    mask = is_key[:, None] & is_value[None, :]
    offsets = (head * K + keys)[:, None] * V + values[None, :]
    state = load_state(state_ptr, stride_sb, row, source_ptr, is_fresh_ptr, offsets, mask)
    q_ptrs = q_ptr + head * stride_qh + keys
    k_ptrs = k_ptr + head * stride_kh + keys
    v_ptrs = v_ptr + head * stride_vh + values
    for token in range(begin, end):
        q = tl.load(q_ptrs + token * stride_qt, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + token * stride_kt, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(v_ptrs + token * stride_vt, mask=is_value, other=0.0).to(tl.float32)
        log_decay = tl.load(log_decay_ptr + token * stride_gt + head).to(tl.float32)
        beta = tl.load(beta_ptr + token * stride_bt + head).to(tl.float32)
        state = tl.exp(log_decay) * state
        delta = beta * (v - tl.sum(k[:, None] * state, 0))
        state += k[:, None] * delta[None, :]
        out = tl.sum(q[:, None] * state, 0)
        tl.store(out_ptr + (token * H + head) * V + values, out.to(out_ptr.dtype.element_ty), mask=is_value)
    store_state(state_ptr, stride_sb, row, target_ptr, offsets, mask, state)


@triton.jit(do_not_specialize=["first_row"])
def delta_solve_kernel(
    q_ptr: tl.tensor,  # [T, H, K]
    k_ptr: tl.tensor,  # [T, H, K]
    log_decay_ptr: tl.tensor,  # [T, H]
    beta_ptr: tl.tensor,  # [T, H]
    inverse_ptr: tl.tensor,  # [T, H, S], contiguous: row t of its chunk's inverse
    weights_ptr: tl.tensor,  # [T, H, S], contiguous: (q_t . k_s) decay(s..t) up to the diagonal
    starts_ptr: tl.tensor,  # int32 [R+1]
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_kt: tl.tensor,
    stride_kh: tl.tensor,
    stride_gt: tl.tensor,
    stride_bt: tl.tensor,
    first_row: tl.tensor,  # decode rows are not these programs' business
    H: tl.constexpr,
    K: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program inverts I + A of one chunk and head, A[t, s] = beta_t (k_t . k_s) decay(s..t) below the diagonal.

    Blocks of 1, 2, 4, ... on the diagonal are inverted from those of half the size: [[P, 0], [X, Q]] has the inverse
    [[P', 0], [-Q' X P', Q']]. Every intermediate is an inverse itself, so that nothing grows that would have to cancel.

    Bytes 2 T H (K + S) e; FLOPs T H (4 S K + 4 S S (log2(S) - 1)). T = 8,192, H = 32, K = 128, S = 64, bfloat16 (a
    layer of Qwen3-Next): 201 MB, 42 us on an H200 (4.8 TB/s); 30 GFLOP, most of them in tf32, 56 us at 495 TFLOP/s.
    """
    row = first_row + tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    first = begin + tl.program_id(0) * TILE_S
    if first >= end:
        return
    places = tl.arange(0, TILE_S)
    tokens = first + places
    is_token = tokens < end
    keys = tl.arange(0, TILE_K)
    key_mask = is_token[:, None] & (keys < K)[None, :]
    q_ptrs = q_ptr + tokens[:, None] * stride_qt + head * stride_qh + keys[None, :]
    q = tl.load(q_ptrs, mask=key_mask, other=0.0)
    k_ptrs = k_ptr + tokens[:, None] * stride_kt + head * stride_kh + keys[None, :]
    k = tl.load(k_ptrs, mask=key_mask, other=0.0)
    log_decay = tl.load(log_decay_ptr + tokens * stride_gt + head, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + tokens * stride_bt + head, mask=is_token, other=0.0).to(tl.float32)
    sums = tl.cumsum(log_decay.to(tl.float64), 0)
    decay = decay_between(sums, places[:, None] >= places[None, :])
    matrix_offsets = (tokens[:, None] * H + head) * TILE_S + places[None, :]
    weights = tl.dot(q, tl.trans(k)) * decay
    tl.store(weights_ptr + matrix_offsets, weights.to(weights_ptr.dtype.element_ty), mask=is_token[:, None])
    system = tl.dot(k, tl.trans(k)) * decay * beta[:, None]  # only what is below the diagonal is looked at
    in_pair = (places[:, None] // 2) == (places[None, :] // 2)
    inverse = tl.where(places[:, None] == places[None, :], 1.0, tl.where(in_pair, -system, 0.0))
    for level in tl.static_range(1, 8):
        size = 1 << level
        if size < TILE_S:
            is_corner = (places[:, None] // (2 * size)) == (places[None, :] // (2 * size))
            is_corner &= (places[:, None] // size) != (places[None, :] // size)
            corner = tl.dot(inverse, tl.where(is_corner, system, 0.0), input_precision=PRECISION)
            inverse -= tl.dot(corner, inverse, input_precision=PRECISION)
    tl.store(inverse_ptr + matrix_offsets, inverse.to(inverse_ptr.dtype.element_ty), mask=is_token[:, None])


@triton.jit(do_not_specialize=["first_row"])
def delta_chunk_kernel(
    q_ptr: tl.tensor,  # [T, H, K]
    k_ptr: tl.tensor,  # [T, H, K]
    v_ptr: tl.tensor,  # [T, H, V]
    log_decay_ptr: tl.tensor,  # [T, H]
    beta_ptr: tl.tensor,  # [T, H]
    inverse_ptr: tl.tensor,  # [T, H, S], contiguous
    weights_ptr: tl.tensor,  # [T, H, S], contiguous
    state_ptr: tl.tensor,  # [B, H, K, V]
    out_ptr: tl.tensor,  # [T, H, V], contiguous
    starts_ptr: tl.tensor,  # int32 [R+1]
    source_ptr: tl.tensor,  # int64 [R]
    target_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_kt: tl.tensor,
    stride_kh: tl.tensor,
    stride_vt: tl.tensor,
    stride_vh: tl.tensor,
    stride_gt: tl.tensor,
    stride_bt: tl.tensor,
    stride_sb: tl.tensor,
    first_row: tl.tensor,  # decode rows are not these programs' business
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
) -> None:
    """One program: TILE_V values of one head of one prefill row.

    Bytes 2 T H (V + K + S) e (q, k and matrices once from memory, then from the cache) + 2 R H K V s; FLOPs
    T H (6 K V + 4 S V). T = 8,192, H = 32, K = V = 128, S = 64, bfloat16 (a layer of Qwen3-Next): 336 MB, 70 us on an
    H200 (4.8 TB/s); 34 GFLOP, 35 us of its 990 TFLOP/s. With one row, the latency of the 128 chunks that follow on each
    other decides.
    """
    row = first_row + tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    keys = tl.arange(0, TILE_K)
    values = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    is_key, is_value = keys < K, values < V
    mask = is_key[:, None] & is_value[None, :]
    offsets = (head * K + keys)[:, None] * V + values[None, :]
    state = load_state(state_ptr, stride_sb, row, source_ptr, is_fresh_ptr, offsets, mask)
    places = tl.arange(0, TILE_S)
    for first in range(begin, end, TILE_S):
        # Tokens past the end have log_decay = beta = 0 and k = 0: they neither decay the state nor add to it.
        tokens = first + places
        is_token = tokens < end
        key_mask = is_token[:, None] & is_key[None, :]
        value_mask = is_token[:, None] & is_value[None, :]
        k_ptrs = k_ptr + tokens[:, None] * stride_kt + head * stride_kh + keys[None, :]
        k = tl.load(k_ptrs, mask=key_mask, other=0.0)
        v_ptrs = v_ptr + tokens[:, None] * stride_vt + head * stride_vh + values[None, :]
        v = tl.load(v_ptrs, mask=value_mask, other=0.0).to(tl.float32)
        log_decay = tl.load(log_decay_ptr + tokens * stride_gt + head, mask=is_token, other=0.0).to(tl.float64)
        beta = tl.load(beta_ptr + tokens * stride_bt + head, mask=is_token, other=0.0).to(tl.float32)
        sums = tl.cumsum(log_decay, 0)
        total = tl.sum(log_decay, 0)
        since_start = tl.exp(sums.to(tl.float32))[:, None]

        half_state = state.to(k.dtype)
        found = tl.dot(k, half_state) * since_start
        matrix_offsets = (tokens[:, None] * H + head) * TILE_S + places[None, :]
        inverse = tl.load(inverse_ptr + matrix_offsets, mask=is_token[:, None], other=0.0)
        delta = tl.dot(inverse, (beta[:, None] * (v - found)).to(inverse.dtype))

        q_ptrs = q_ptr + tokens[:, None] * stride_qt + head * stride_qh + keys[None, :]
        q = tl.load(q_ptrs, mask=key_mask, other=0.0)
        weights = tl.load(weights_ptr + matrix_offsets, mask=is_token[:, None], other=0.0)
        out = tl.dot(q, half_state) * since_start
        out = tl.dot(weights, delta.to(weights.dtype), out)
        out_ptrs = out_ptr + (tokens[:, None] * H + head) * V + values[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=value_mask)

        kept = delta * tl.exp((total - sums).to(tl.float32))[:, None]
        state = tl.dot(tl.trans(k), kept.to(k.dtype), state * tl.exp(total.to(tl.float32)))
    store_state(state_ptr, stride_sb, row, target_ptr, offsets, mask, state)
