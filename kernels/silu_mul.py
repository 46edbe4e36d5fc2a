"""The gated activation of a SwiGLU layer: silu(gate) * up, from the fused projection.

Legend: T tokens, F intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor

TILE = 1024


def silu_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """[T, F]: silu(x[:, :F]) * x[:, F:], each operation rounded to x's dtype. Raises ValueError for an odd width."""
    check_tensor("x", x_T2F, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_tokens, width = x_T2F.shape
    if width % 2:
        raise ValueError(f"x has width {width}; it must be twice the intermediate size: gate, then up")
    out_TF = x_T2F.new_empty((num_tokens, width // 2))
    if out_TF.numel():
        silu_mul_kernel[(num_tokens, triton.cdiv(width // 2, TILE))](
            x_T2F, out_TF, x_T2F.stride(0), F=width // 2, TILE_F=TILE, num_warps=4
        )
    return out_TF


@triton.jit
def silu_mul_kernel(
    x_ptr: tl.tensor,  # [T, 2*F]
    out_ptr: tl.tensor,  # [T, F], contiguous
    stride_x: tl.tensor,
    F: tl.constexpr,
    TILE_F: tl.constexpr,
) -> None:
    """One program computes TILE_F elements of one token.

    Bytes 3 T F e; FLOPs about 5 T F. T = 8,192, F = 14,336, bfloat16: 705 MB, 147 us on an H200 (4.8 TB/s); a decode
    step of T = 256: 22 MB, 4.6 us.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE_F + tl.arange(0, TILE_F)
    mask = columns < F
    gate = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + F + columns, mask=mask, other=0.0).to(tl.float32)
    # transformers rounds between the two operations
    out = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32) * up
    tl.store(out_ptr + token * F + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul_torch(x_T2F: torch.Tensor) -> torch.Tensor:
    """The oracle."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF) * up_TF
