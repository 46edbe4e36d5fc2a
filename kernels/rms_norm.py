"""RMS norms: of the hidden state with the residual added first, and of each head of q or k.

Legend: T tokens, E hidden size, H heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, check_head_dim, check_tensor

MAX_HIDDEN_SIZE = 32768
HEAD_ELEMENTS_PER_PROGRAM = 2048


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, E]: x / sqrt(mean(x^2) + eps), computed in float32 and rounded to x's dtype, times weight."""
    return _add_rms_norm(x_TE, None, weight_E, eps)


def add_rms_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to the residual in place (rounded to its dtype), return the rms_norm of the sum."""
    return _add_rms_norm(x_TE, residual_TE, weight_E, eps)


def _add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    num_tokens, hidden_size = x_TE.shape
    check_tensor("x", x_TE, shape=(None, None), dtypes=FLOAT_DTYPES)
    check_tensor("weight", weight_E, shape=(hidden_size,), dtypes=FLOAT_DTYPES)
    if residual_TE is not None:
        check_tensor("residual", residual_TE, shape=(num_tokens, hidden_size), dtypes=(x_TE.dtype,))
    if hidden_size > MAX_HIDDEN_SIZE:
        raise ValueError(f"hidden size {hidden_size} exceeds {MAX_HIDDEN_SIZE}, one program's tile; use the torch ops")
    normed_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    if not num_tokens:
        return normed_TE
    tile_e = triton.next_power_of_2(hidden_size)
    sum_TE = normed_TE if residual_TE is None else residual_TE
    add_rms_norm_kernel[(num_tokens,)](
        x_TE,
        sum_TE,
        weight_E,
        normed_TE,
        eps,
        x_TE.stride(0),
        sum_TE.stride(0),
        E=hidden_size,
        TILE_E=tile_e,
        HAS_RESIDUAL=residual_TE is not None,
        num_warps=min(16, max(1, tile_e // 512)),
    )
    return normed_TE


def rms_norm_heads(x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, H, D] contiguous: every head normed on its own. x may be a slice of a fused projection."""
    num_tokens, num_heads, head_dim = x_THD.shape
    check_tensor("x", x_THD, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    check_tensor("weight", weight_D, shape=(head_dim,), dtypes=FLOAT_DTYPES)
    check_head_dim(head_dim)
    out_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out_THD
    tile_d = triton.next_power_of_2(head_dim)
    tile_r = max(1, HEAD_ELEMENTS_PER_PROGRAM // tile_d)
    rms_norm_heads_kernel[(triton.cdiv(num_tokens * num_heads, tile_r),)](
        x_THD,
        weight_D,
        out_THD,
        eps,
        num_tokens * num_heads,
        x_THD.stride(0),
        x_THD.stride(1),
        H=num_heads,
        D=head_dim,
        TILE_R=tile_r,
        TILE_D=tile_d,
        num_warps=4,
    )
    return out_THD


@triton.jit
def add_rms_norm_kernel(
    x_ptr: tl.tensor,  # [T, E]
    residual_ptr: tl.tensor,  # [T, E], x is added to it; unused without a residual
    weight_ptr: tl.tensor,  # [E]
    normed_ptr: tl.tensor,  # [T, E], contiguous
    eps: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    E: tl.constexpr,
    TILE_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """One program norms one token.

    Bytes 4 T E e (x, residual read and written, normed; 2 T E e without a residual) + E e; FLOPs about 5 T E.
    T = 8,192, E = 4,096, bfloat16: 268 MB, 56 us on an H200 (4.8 TB/s); a decode step of T = 256: 8.4 MB, 1.7 us.
    """
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, TILE_E)
    mask = dims < E
    x = tl.load(x_ptr + token * stride_x + dims, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + token * stride_residual + dims
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
        # Rounded before it is normed: the next layer sees the same sum.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(residual_ptrs, x, mask=mask)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / E + eps)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    # transformers rounds before it weighs
    normed = ((x * scale).to(x_ptr.dtype.element_ty).to(tl.float32) * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + token * E + dims, normed, mask=mask)


@triton.jit
def rms_norm_heads_kernel(
    x_ptr: tl.tensor,  # [T, H, D]
    weight_ptr: tl.tensor,  # [D]
    out_ptr: tl.tensor,  # [T, H, D], contiguous
    eps: tl.tensor,
    num_vectors: tl.tensor,  # T * H
    stride_xt: tl.tensor,
    stride_xh: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """One program norms TILE_R heads, of one or several tokens.

    Bytes 2 T H D e; FLOPs about 4 T H D. T = 8,192, H = 32, D = 128, bfloat16: 134 MB, 28 us on an H200 (4.8 TB/s).
    """
    vectors = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)[:, None]
    dims = tl.arange(0, TILE_D)[None, :]
    mask = (vectors < num_vectors) & (dims < D)
    x_ptrs = x_ptr + (vectors // H) * stride_xt + (vectors % H) * stride_xh + dims
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
    weight = tl.load(weight_ptr + dims, mask=dims < D, other=0.0).to(tl.float32)
    normed = (x * scale[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_ptr + vectors * D + dims, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The oracle of rms_norm and rms_norm_heads: over the last dim."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed.float() * weight.float()).to(x.dtype)


def add_rms_norm_torch(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """The oracle of add_rms_norm."""
    residual_TE += x_TE
    return rms_norm_torch(residual_TE, weight_E, eps)
