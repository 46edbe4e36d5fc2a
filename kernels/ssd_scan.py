"""Mamba-2's scan over paged states: state' = exp(dt a) state + dt x b with one decay a head; y = state' . c + d x.

    ssd_step_kernel    (row, head, tile of P)          token after token: decode rows, and prompts in float32
    ssd_scores_kernel  (chunk, prefill row, group)     c . b of each chunk [S, S], to scratch memory: all heads share it
    ssd_chunk_kernel   (prefill row, head, tile of P)  chunk after chunk, each as attention with decaying weights

After Dao and Gu, "Transformers are SSMs" (2024), section 6, with the state passed from chunk to chunk in registers in
place of three kernels: states never touch memory in between.

Legend: T tokens, S tokens of a chunk, H heads, P channels of a head, N state size of a channel, G groups, B blocks,
R rows.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, Target, check_group, check_tensor, target_of
from blockferry.kernels.state_rows import StateRows, check_state, decay_between, load_state, store_state

MAX_STATE_SIZE = 256
STEP_ELEMENTS = 2048  # of a step program's state
CHUNK_ELEMENTS = 2048  # of a chunk program's state: small, so that one prompt fills the GPU


def ssd_scan(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    d_H: torch.Tensor,
    *,
    state_BHPN: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """[T, H, P] in x's dtype, computed in float32, but that chunks of half precision multiply matrices of x's dtype.

    The rows' states are brought forward. b and c have x's dtype; only the last dims of x, dt, b and c need be
    contiguous. Raises ValueError for arguments of another shape or dtype.
    """
    num_tokens, num_heads, head_dim = x_THP.shape
    num_groups, state_size = b_TGN.shape[1:]
    heads_per_group = check_group(num_heads, num_groups)
    check_tensor("x", x_THP, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    check_tensor("dt", dt_TH, shape=(num_tokens, num_heads), dtypes=FLOAT_DTYPES)
    check_tensor("a", a_H, shape=(num_heads,), dtypes=FLOAT_DTYPES)
    check_tensor("b", b_TGN, shape=(num_tokens, None, None), dtypes=(x_THP.dtype,))
    check_tensor("c", c_TGN, shape=(num_tokens, num_groups, state_size), dtypes=(x_THP.dtype,))
    check_tensor("d", d_H, shape=(num_heads,), dtypes=FLOAT_DTYPES)
    check_state("state", state_BHPN, shape=(num_heads, head_dim, state_size), rows=rows)
    if state_size > MAX_STATE_SIZE:
        raise ValueError(f"state size {state_size} exceeds {MAX_STATE_SIZE}, one program's tile; use the torch ops")
    out_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    tensors = (x_THP, dt_TH, a_H, b_TGN, c_TGN, d_H, state_BHPN, out_THP)
    places = (rows.query_start_R1, rows.source_R, rows.target_R, rows.is_fresh_R)
    strides = (
        *(x_THP.stride(0), x_THP.stride(1), dt_TH.stride(0)),
        *(b_TGN.stride(0), b_TGN.stride(1), c_TGN.stride(0), c_TGN.stride(1), state_BHPN.stride(0)),
    )
    sizes = {"H": num_heads, "P": head_dim, "N": state_size, "HEADS_PER_GROUP": heads_per_group}
    is_chunked = x_THP.dtype is not torch.float32
    num_stepped_rows = rows.num_decode_rows if is_chunked else rows.num_rows
    if num_stepped_rows:
        tile_n = triton.next_power_of_2(state_size)
        tile_p = min(triton.next_power_of_2(head_dim), max(1, STEP_ELEMENTS // tile_n))
        ssd_step_kernel[(num_stepped_rows, num_heads, triton.cdiv(head_dim, tile_p))](
            *tensors, *places, *strides, **sizes, TILE_P=tile_p, TILE_N=tile_n, num_warps=4
        )
    if is_chunked and rows.num_prefill_rows:
        config = chunk_config(head_dim, state_size, target_of(x_THP.device))
        scores_TGS = torch.empty((num_tokens, num_groups, config.tile_s), dtype=torch.float32, device=x_THP.device)
        ssd_scores_kernel[(triton.cdiv(rows.max_query_len, config.tile_s), rows.num_prefill_rows, num_groups)](
            *(b_TGN, c_TGN, scores_TGS, rows.query_start_R1),
            *(b_TGN.stride(0), b_TGN.stride(1), c_TGN.stride(0), c_TGN.stride(1)),
            rows.num_decode_rows,
            G=num_groups,
            N=state_size,
            TILE_S=config.tile_s,
            TILE_N=config.tile_n,
            num_warps=4,
            num_stages=1,
        )
        ssd_chunk_kernel[(rows.num_prefill_rows, num_heads, triton.cdiv(head_dim, config.tile_p))](
            scores_TGS,
            *tensors,
            *places,
            *strides,
            rows.num_decode_rows,
            **sizes,
            TILE_S=config.tile_s,
            TILE_P=config.tile_p,
            TILE_N=config.tile_n,
            num_warps=4,
            num_stages=1,
        )
    return out_THP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig:
    """How the kernels for prompts are cut: by what keeps the chunk kernel out of its registers' way."""

    tile_s: int
    tile_p: int
    tile_n: int


def chunk_config(head_dim: int, state_size: int, target: Target) -> ChunkConfig:
    """Hopper multiplies out of shared memory; the others hold both factors in registers, so that chunks are shorter."""
    tile_n = max(16, triton.next_power_of_2(state_size))
    return ChunkConfig(
        tile_s=64 if target is Target.HOPPER and tile_n <= 128 else 32,
        tile_p=max(16, min(triton.next_power_of_2(head_dim), CHUNK_ELEMENTS // tile_n)),
        tile_n=tile_n,
    )


@triton.jit
def ssd_step_kernel(
    x_ptr: tl.tensor,  # [T, H, P]
    dt_ptr: tl.tensor,  # [T, H]
    a_ptr: tl.tensor,  # [H]
    b_ptr: tl.tensor,  # [T, G, N]
    c_ptr: tl.tensor,  # [T, G, N]
    d_ptr: tl.tensor,  # [H]
    state_ptr: tl.tensor,  # [B, H, P, N]
    out_ptr: tl.tensor,  # [T, H, P], contiguous
    starts_ptr: tl.tensor,  # int32 [R+1]
    source_ptr: tl.tensor,  # int64 [R]
    target_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    stride_xt: tl.tensor,
    stride_xh: tl.tensor,
    stride_dt: tl.tensor,
    stride_bt: tl.tensor,
    stride_bg: tl.tensor,
    stride_ct: tl.tensor,
    stride_cg: tl.tensor,
    stride_sb: tl.tensor,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_N: tl.constexpr,
) -> None:
    """One program: TILE_P channels of one head of one row.

    Bytes 2 R H P N s + 2 T H P e (s bytes a state, e an input); FLOPs 5 T H P N. A decode step of T = R = 256, H = 128,
    P = 64, N = 128, float32 states (a layer of Bamba 9B): 2.15 GB, 449 us on an H200 (4.8 TB/s); 1.3 GFLOP, 20 us of
    its 67 TFLOP/s.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = head // HEADS_PER_GROUP
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    channels = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    entries = tl.arange(0, TILE_N)
    is_channel, is_entry = channels < P, entries < N
    mask = is_channel[:, None] & is_entry[None, :]
    offsets = (head * P + channels)[:, None] * N + entries[None, :]
    state = load_state(state_ptr, stride_sb, row, source_ptr, is_fresh_ptr, offsets, mask)
    a = tl.load(a_ptr + head).to(tl.float32)
    d = tl.load(d_ptr + head).to(tl.float32)
    x_ptrs = x_ptr + head * stride_xh + channels
    b_ptrs = b_ptr + group * stride_bg + entries
    c_ptrs = c_ptr + group * stride_cg + entries
    for token in range(begin, end):
        dt = tl.load(dt_ptr + token * stride_dt + head).to(tl.float32)
        x = tl.load(x_ptrs + token * stride_xt, mask=is_channel, other=0.0).to(tl.float32)
        b = tl.load(b_ptrs + token * stride_bt, mask=is_entry, other=0.0).to(tl.float32)
        c = tl.load(c_ptrs + token * stride_ct, mask=is_entry, other=0.0).to(tl.float32)
        state = tl.exp(dt * a) * state + (dt * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + d * x
        tl.store(out_ptr + (token * H + head) * P + channels, y.to(out_ptr.dtype.element_ty), mask=is_channel)
    store_state(state_ptr, stride_sb, row, target_ptr, offsets, mask, state)


@triton.jit(do_not_specialize=["first_row"])
def ssd_scores_kernel(
    b_ptr: tl.tensor,  # [T, G, N]
    c_ptr: tl.tensor,  # [T, G, N]
    scores_ptr: tl.tensor,  # float32 [T, G, S], contiguous: c of a token . b of each token of its chunk
    starts_ptr: tl.tensor,  # int32 [R+1]
    stride_bt: tl.tensor,
    stride_bg: tl.tensor,
    stride_ct: tl.tensor,
    stride_cg: tl.tensor,
    first_row: tl.tensor,  # decode rows are not these programs' business
    G: tl.constexpr,
    N: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_N: tl.constexpr,
) -> None:
    """One program: one chunk of one group.

    Bytes T G (2 N e + 4 S); FLOPs 2 T G S N. T = 8,192, G = 1, N = 128, S = 64, bfloat16 (a layer of Bamba 9B): 6 MB,
    1.3 us on an H200 (4.8 TB/s), below launch time; 0.1 GFLOP.
    """
    row = first_row + tl.program_id(1)
    group = tl.program_id(2)
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    first = begin + tl.program_id(0) * TILE_S
    if first >= end:
        return
    places = tl.arange(0, TILE_S)
    entries = tl.arange(0, TILE_N)
    tokens = first + places
    is_token = tokens < end
    entry_mask = is_token[:, None] & (entries < N)[None, :]
    b_ptrs = b_ptr + tokens[:, None] * stride_bt + group * stride_bg + entries[None, :]
    b = tl.load(b_ptrs, mask=entry_mask, other=0.0)
    c_ptrs = c_ptr + tokens[:, None] * stride_ct + group * stride_cg + entries[None, :]
    c = tl.load(c_ptrs, mask=entry_mask, other=0.0)
    scores_ptrs = scores_ptr + (tokens[:, None] * G + group) * TILE_S + places[None, :]
    tl.store(scores_ptrs, tl.dot(c, tl.trans(b)), mask=is_token[:, None])


@triton.jit(do_not_specialize=["first_row"])
def ssd_chunk_kernel(
    scores_ptr: tl.tensor,  # float32 [T, G, S], contiguous
    x_ptr: tl.tensor,  # [T, H, P]
    dt_ptr: tl.tensor,  # [T, H]
    a_ptr: tl.tensor,  # [H]
    b_ptr: tl.tensor,  # [T, G, N]
    c_ptr: tl.tensor,  # [T, G, N]
    d_ptr: tl.tensor,  # [H]
    state_ptr: tl.tensor,  # [B, H, P, N]
    out_ptr: tl.tensor,  # [T, H, P], contiguous
    starts_ptr: tl.tensor,  # int32 [R+1]
    source_ptr: tl.tensor,  # int64 [R]
    target_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    stride_xt: tl.tensor,
    stride_xh: tl.tensor,
    stride_dt: tl.tensor,
    stride_bt: tl.tensor,
    stride_bg: tl.tensor,
    stride_ct: tl.tensor,
    stride_cg: tl.tensor,
    stride_sb: tl.tensor,
    first_row: tl.tensor,  # decode rows are not these programs' business
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_N: tl.constexpr,
) -> None:
    """One program: TILE_P channels of one head of one prefill row.

    Bytes 2 T H P e + T G (2 N e + 4 S) (b, c and scores once from memory, then from the cache) + 2 R H P N s; FLOPs
    T H (2 S P + 4 P N). T = 8,192, H = 128, P = 64, N = 128, S = 64, bfloat16 (a layer of Bamba 9B): 283 MB, 59 us on
    an H200 (4.8 TB/s); 43 GFLOP, 43 us of its 990 TFLOP/s. With one row, the latency of the 128 chunks that follow on
    each other decides.
    """
    row = first_row + tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = head // HEADS_PER_GROUP
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    channels = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    entries = tl.arange(0, TILE_N)
    is_channel, is_entry = channels < P, entries < N
    mask = is_entry[:, None] & is_channel[None, :]  # the state is held transposed, [N, P]: no product turns it then
    offsets = (head * P + channels)[None, :] * N + entries[:, None]
    state = load_state(state_ptr, stride_sb, row, source_ptr, is_fresh_ptr, offsets, mask)
    a = tl.load(a_ptr + head).to(tl.float32)
    d = tl.load(d_ptr + head).to(tl.float32)
    places = tl.arange(0, TILE_S)
    is_causal = places[:, None] >= places[None, :]
    for first in range(begin, end, TILE_S):
        # Tokens past the end have dt = 0: they neither decay the state nor add to it.
        tokens = first + places
        is_token = tokens < end
        token_mask = is_token[:, None] & is_channel[None, :]
        entry_mask = is_token[:, None] & is_entry[None, :]
        dt = tl.load(dt_ptr + tokens * stride_dt + head, mask=is_token, other=0.0).to(tl.float32)
        x_ptrs = x_ptr + tokens[:, None] * stride_xt + head * stride_xh + channels[None, :]
        x = tl.load(x_ptrs, mask=token_mask, other=0.0)
        b_ptrs = b_ptr + tokens[:, None] * stride_bt + group * stride_bg + entries[None, :]
        b = tl.load(b_ptrs, mask=entry_mask, other=0.0)
        c_ptrs = c_ptr + tokens[:, None] * stride_ct + group * stride_cg + entries[None, :]
        c = tl.load(c_ptrs, mask=entry_mask, other=0.0)
        # Sums of logarithms are float64: the differences between them may be small against the sums.
        log_decay = (dt * a).to(tl.float64)
        sums = tl.cumsum(log_decay, 0)
        total = tl.sum(log_decay, 0)
        scores_ptrs = scores_ptr + (tokens[:, None] * (H // HEADS_PER_GROUP) + group) * TILE_S + places[None, :]
        scores = tl.load(scores_ptrs, mask=is_token[:, None], other=0.0)
        weights = scores * decay_between(sums, is_causal) * dt[None, :]
        y = tl.dot(c, state.to(c.dtype)) * tl.exp(sums.to(tl.float32))[:, None]
        y = tl.dot(weights.to(x.dtype), x, y)
        y += d * x.to(tl.float32)
        out_ptrs = out_ptr + (tokens[:, None] * H + head) * P + channels[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=token_mask)
        kept = x.to(tl.float32) * (dt * tl.exp((total - sums).to(tl.float32)))[:, None]
        state = tl.dot(tl.trans(b), kept.to(b.dtype), state * tl.exp(total.to(tl.float32)))
    store_state(state_ptr, stride_sb, row, target_ptr, offsets, mask, state)
