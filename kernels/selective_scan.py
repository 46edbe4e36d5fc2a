"""Mamba-1's selective scan over paged states: state' = exp(dt a) state + dt x b; y = state' . c + d x.

    selective_step_kernel  (decode row, channel tile)   one token
    selective_scan_kernel  (prefill row, channel tile)  tiles of tokens one after the other, each scanned in parallel

After Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces" (2023), section 3.3.2: states stay
on chip, decays are only ever multiplied, so that they may vanish but not overflow.

Legend: T tokens, S tokens of a tile, C channels, N state size of a channel, B blocks, R rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor
from blockferry.kernels.state_rows import StateRows, check_state, load_state, store_state

MAX_STATE_SIZE = 256
STEP_ELEMENTS = 1024  # of a decode program's state: small, so that few rows fill the GPU
SCAN_ELEMENTS = 4096  # of a prefill program's tile [S, C, N]: 32 a thread, twice
MAX_TILE_S = 16


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    a_CN: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    d_C: torch.Tensor,
    *,
    state_BCN: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """[T, C] in x's dtype, computed in float32. The rows' states are brought forward.

    x, dt, b and c may have strided rows. Raises ValueError for arguments of another shape, dtype or layout.
    """
    num_tokens, num_channels = x_TC.shape
    state_size = a_CN.shape[1]
    check_tensor("x", x_TC, shape=(None, None), dtypes=FLOAT_DTYPES)
    check_tensor("dt", dt_TC, shape=(num_tokens, num_channels), dtypes=FLOAT_DTYPES)
    check_tensor("a", a_CN, shape=(num_channels, None), dtypes=FLOAT_DTYPES)
    check_tensor("b", b_TN, shape=(num_tokens, state_size), dtypes=FLOAT_DTYPES)
    check_tensor("c", c_TN, shape=(num_tokens, state_size), dtypes=FLOAT_DTYPES)
    check_tensor("d", d_C, shape=(num_channels,), dtypes=FLOAT_DTYPES)
    check_state("state", state_BCN, shape=(num_channels, state_size), rows=rows)
    if state_size > MAX_STATE_SIZE:
        raise ValueError(f"state size {state_size} exceeds {MAX_STATE_SIZE}, one program's tile; use the torch ops")
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    tensors = (x_TC, dt_TC, a_CN, b_TN, c_TN, d_C, state_BCN, out_TC)
    places = (rows.source_R, rows.target_R, rows.is_fresh_R)
    strides = tuple(tensor.stride(0) for tensor in (x_TC, dt_TC, a_CN, b_TN, c_TN, state_BCN))
    tile_n = triton.next_power_of_2(state_size)
    tile_c = triton.next_power_of_2(num_channels)
    if rows.num_decode_rows:
        tile = min(tile_c, max(1, STEP_ELEMENTS // tile_n))
        selective_step_kernel[(rows.num_decode_rows, triton.cdiv(num_channels, tile))](
            *tensors, *places, *strides, C=num_channels, N=state_size, TILE_C=tile, TILE_N=tile_n, num_warps=4
        )
    if rows.num_prefill_rows:
        tile = min(tile_c, max(1, SCAN_ELEMENTS // tile_n // MAX_TILE_S))
        selective_scan_kernel[(rows.num_prefill_rows, triton.cdiv(num_channels, tile))](
            *tensors,
            rows.query_start_R1,
            *places,
            *strides,
            rows.num_decode_rows,
            C=num_channels,
            N=state_size,
            TILE_S=MAX_TILE_S,
            TILE_C=tile,
            TILE_N=tile_n,
            num_warps=4,
        )
    return out_TC


@triton.jit
def selective_step_kernel(
    x_ptr: tl.tensor,  # [T, C]
    dt_ptr: tl.tensor,  # [T, C]
    a_ptr: tl.tensor,  # [C, N]
    b_ptr: tl.tensor,  # [T, N]
    c_ptr: tl.tensor,  # [T, N]
    d_ptr: tl.tensor,  # [C]
    state_ptr: tl.tensor,  # [B, C, N]
    out_ptr: tl.tensor,  # [T, C], contiguous
    source_ptr: tl.tensor,  # int64 [R]
    target_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    stride_xt: tl.tensor,
    stride_dt: tl.tensor,
    stride_ac: tl.tensor,
    stride_bt: tl.tensor,
    stride_ct: tl.tensor,
    stride_sb: tl.tensor,
    C: tl.constexpr,
    N: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_N: tl.constexpr,
) -> None:
    """One program: TILE_C channels of one decode row.

    Bytes 2 R C N s + R C (2 e + 4) + 4 C N (s bytes a state, e an input); FLOPs 7 R C N. R = 256, C = 8,192, N = 16,
    float32 states (a layer of Jamba 1.5 Mini): 286 MB, 60 us on an H200 (4.8 TB/s); 235 MFLOP, 4 us of its 67 TFLOP/s.
    """
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    entries = tl.arange(0, TILE_N)
    is_channel, is_entry = channels < C, entries < N
    mask = is_channel[:, None] & is_entry[None, :]
    offsets = channels[:, None] * N + entries[None, :]
    state = load_state(state_ptr, stride_sb, row, source_ptr, is_fresh_ptr, offsets, mask)
    x = tl.load(x_ptr + row * stride_xt + channels, mask=is_channel, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * stride_dt + channels, mask=is_channel, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + channels[:, None] * stride_ac + entries[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * stride_bt + entries, mask=is_entry, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + row * stride_ct + entries, mask=is_entry, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    state = tl.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b[None, :]
    y = tl.sum(state * c[None, :], 1) + d * x
    tl.store(out_ptr + row * C + channels, y.to(out_ptr.dtype.element_ty), mask=is_channel)
    store_state(state_ptr, stride_sb, row, target_ptr, offsets, mask, state)


@triton.jit(do_not_specialize=["first_row"])
def selective_scan_kernel(
    x_ptr: tl.tensor,  # [T, C]
    dt_ptr: tl.tensor,  # [T, C]
    a_ptr: tl.tensor,  # [C, N]
    b_ptr: tl.tensor,  # [T, N]
    c_ptr: tl.tensor,  # [T, N]
    d_ptr: tl.tensor,  # [C]
    state_ptr: tl.tensor,  # [B, C, N]
    out_ptr: tl.tensor,  # [T, C], contiguous
    starts_ptr: tl.tensor,  # int32 [R+1]
    source_ptr: tl.tensor,  # int64 [R]
    target_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    stride_xt: tl.tensor,
    stride_dt: tl.tensor,
    stride_ac: tl.tensor,
    stride_bt: tl.tensor,
    stride_ct: tl.tensor,
    stride_sb: tl.tensor,
    first_row: tl.tensor,  # decode rows are not these programs' business
    C: tl.constexpr,
    N: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_N: tl.constexpr,
) -> None:
    """One program: TILE_C channels of one prefill row.

    Bytes T C (2 e + 4) + 2 T N e C / TILE_C (b and c, mostly from the cache) + 2 R C N s; FLOPs about 7 T C N and the
    scan's 3 log2(TILE_S) / 2 times T C N more. T = 8,192, C = 8,192, N = 16, bfloat16 (a layer of Jamba 1.5 Mini):
    537 MB, 112 us on an H200 (4.8 TB/s); 14 GFLOP, 210 us of its 67 TFLOP/s in float32: FLOPs decide, and with one row
    the 128 dependent tiles of each of 512 programs do.
    """
    row = first_row + tl.program_id(0).to(tl.int64)
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    entries = tl.arange(0, TILE_N)
    is_channel, is_entry = channels < C, entries < N
    mask = is_channel[:, None] & is_entry[None, :]
    offsets = channels[:, None] * N + entries[None, :]
    state = load_state(state_ptr, stride_sb, row, source_ptr, is_fresh_ptr, offsets, mask)
    a = tl.load(a_ptr + channels[:, None] * stride_ac + entries[None, :], mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    is_last = (tl.arange(0, TILE_S) == TILE_S - 1)[:, None, None]
    for first in range(begin, end, TILE_S):
        # Tokens past the end have dt = 0: they neither decay the state nor add to it.
        tokens = first + tl.arange(0, TILE_S)
        is_token = tokens < end
        token_mask = is_token[:, None] & is_channel[None, :]
        entry_mask = is_token[:, None] & is_entry[None, :]
        x = tl.load(x_ptr + tokens[:, None] * stride_xt + channels[None, :], mask=token_mask, other=0.0)
        dt = tl.load(dt_ptr + tokens[:, None] * stride_dt + channels[None, :], mask=token_mask, other=0.0)
        b = tl.load(b_ptr + tokens[:, None] * stride_bt + entries[None, :], mask=entry_mask, other=0.0)
        c = tl.load(c_ptr + tokens[:, None] * stride_ct + entries[None, :], mask=entry_mask, other=0.0)
        x, dt, b, c = x.to(tl.float32), dt.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        decay = tl.exp(dt[:, :, None] * a[None, :, :])
        added = (dt * x)[:, :, None] * b[:, None, :]
        decay, added = tl.associative_scan((decay, added), 0, _compose)
        states = added + decay * state[None, :, :]
        y = tl.sum(states * c[:, None, :], 2) + d[None, :] * x
        out_ptrs = out_ptr + tokens[:, None] * C + channels[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=token_mask)
        state = tl.sum(tl.where(is_last, states, 0.0), 0)
    store_state(state_ptr, stride_sb, row, target_ptr, offsets, mask, state)


@triton.jit
def _compose(
    first_decay: tl.tensor, first_added: tl.tensor, second_decay: tl.tensor, second_added: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return first_decay * second_decay, first_added * second_decay + second_added
