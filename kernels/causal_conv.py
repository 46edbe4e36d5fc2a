"""Depthwise causal convolution over paged states: the short convolution before a recurrence, or LFM2's whole one.

    state of a block [C, w]: the row's last w inputs, oldest first; a row's new ones are its last w again

One kernel serves decode and prefill: a decode row is a row of one token. After causal_conv1d (Dao, 2023), which keeps
its window likewise.

Legend: T tokens, C channels, W taps, w = W - 1, B blocks, R rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor
from blockferry.kernels.state_rows import StateRows, check_state, load_state, store_state

MAX_TAPS = 16
MAX_TILE_T = 16
TILE_ELEMENTS = 1024


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    *,
    state_BCw: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """[T, C] in x's dtype, summed in float32; no activation. The rows' states are brought forward.

    x may have strided rows. Raises ValueError for arguments of another shape, dtype or layout.
    """
    num_channels, num_taps = weight_CW.shape
    check_tensor("x", x_TC, shape=(None, num_channels), dtypes=FLOAT_DTYPES)
    check_tensor("weight", weight_CW, shape=(num_channels, None), dtypes=FLOAT_DTYPES)
    if bias_C is not None:
        check_tensor("bias", bias_C, shape=(num_channels,), dtypes=FLOAT_DTYPES)
    if not 2 <= num_taps <= MAX_TAPS:
        raise ValueError(f"the convolution has {num_taps} taps, the kernel takes 2..{MAX_TAPS}; use the torch ops")
    check_state("state", state_BCw, shape=(num_channels, num_taps - 1), rows=rows)
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    if not rows.num_rows:
        return out_TC
    # A tile is at least the window, so that only a row's first tile reads the state, and may write it.
    tile_t = triton.next_power_of_2(max(num_taps, min(rows.max_query_len, MAX_TILE_T)))
    tile_c = min(triton.next_power_of_2(num_channels), max(16, TILE_ELEMENTS // tile_t))
    grid = (triton.cdiv(rows.max_query_len, tile_t), triton.cdiv(num_channels, tile_c), rows.num_rows)
    causal_conv_kernel[grid](
        x_TC,
        weight_CW,
        weight_CW if bias_C is None else bias_C,
        state_BCw,
        out_TC,
        rows.query_start_R1,
        rows.source_R,
        rows.target_R,
        rows.is_fresh_R,
        x_TC.stride(0),
        weight_CW.stride(0),
        state_BCw.stride(0),
        C=num_channels,
        W=num_taps,
        TILE_T=tile_t,
        TILE_C=tile_c,
        TILE_W=triton.next_power_of_2(num_taps - 1),
        HAS_BIAS=bias_C is not None,
        num_warps=4,
    )
    return out_TC


@triton.jit
def causal_conv_kernel(
    x_ptr: tl.tensor,  # [T, C]
    weight_ptr: tl.tensor,  # [C, W]
    bias_ptr: tl.tensor,  # [C]; unused without a bias
    state_ptr: tl.tensor,  # [B, C, w]
    out_ptr: tl.tensor,  # [T, C], contiguous
    starts_ptr: tl.tensor,  # int32 [R+1]
    source_ptr: tl.tensor,  # int64 [R]
    target_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    stride_xt: tl.tensor,
    stride_wc: tl.tensor,
    stride_sb: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """One program: TILE_C channels of TILE_T tokens of one row; a row's first tile also moves its state.

    Bytes 2 T C e + 2 R C w s (e bytes an input, s a state; taps hit the cache); FLOPs 2 T C W. T = 8,192, C = 8,192,
    W = 4, bfloat16 (the convolution of a Qwen3-Next layer): 268 MB, 56 us on an H200 (4.8 TB/s); a decode step of
    R = 256: 21 MB, 4.4 us. FLOPs never decide.
    """
    row = tl.program_id(2).to(tl.int64)
    begin = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    first = begin + tl.program_id(0) * TILE_T
    if first >= end:
        return
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    is_channel = channels < C
    tokens = first + tl.arange(0, TILE_T)
    acc = tl.zeros([TILE_T, TILE_C], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    is_old = (tl.load(is_fresh_ptr + row) == 0) & (first == begin)
    block_ptr = state_ptr + tl.load(source_ptr + row, mask=is_old, other=0) * stride_sb
    for tap in tl.static_range(W):
        weight = tl.load(weight_ptr + channels * stride_wc + tap, mask=is_channel, other=0.0).to(tl.float32)
        inputs = tokens + (tap - (W - 1))
        x_ptrs = x_ptr + inputs[:, None] * stride_xt + channels[None, :]
        x_mask = ((inputs >= begin) & (inputs < end))[:, None] & is_channel[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0).to(tl.float32)
        kept = inputs - begin + (W - 1)  # column of the state, where the input is older than the row's tokens
        kept_mask = ((inputs < begin) & is_old)[:, None] & is_channel[None, :]
        x += tl.load(block_ptr + channels[None, :] * (W - 1) + kept[:, None], mask=kept_mask, other=0.0).to(tl.float32)
        acc += x * weight[None, :]
    out_mask = (tokens < end)[:, None] & is_channel[None, :]
    tl.store(out_ptr + tokens[:, None] * C + channels[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    if first == begin:
        columns = tl.arange(0, TILE_W)
        newest = end - (W - 1) + columns  # tokens whose inputs the state shall hold
        mask = is_channel[:, None] & (columns < W - 1)[None, :]
        shifted = channels[:, None] * (W - 1) + (columns + (end - begin))[None, :]
        is_kept = mask & (newest < begin)[None, :]
        state = load_state(state_ptr, stride_sb, row, source_ptr, is_fresh_ptr, shifted, is_kept)
        newest_ptrs = x_ptr + newest[None, :] * stride_xt + channels[:, None]
        state += tl.load(newest_ptrs, mask=mask & (newest >= begin)[None, :], other=0.0).to(tl.float32)
        offsets = channels[:, None] * (W - 1) + columns[None, :]
        store_state(state_ptr, stride_sb, row, target_ptr, offsets, mask, state)
