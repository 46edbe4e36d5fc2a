"""Matmul of rows sorted by expert, each run of rows with its expert's matrix, in one launch that waits for no count.

The tiles of expert x are numbered after those of the experts before it. How many there are only the GPU knows, so the
grid holds as many as there may be at most, and a program finds its expert by a running sum over all of them:

    starts     0       5   5         16            17        rows of experts 0..3, tiles of 4 rows
    tiles      0   1       2   3   4   5   (empty) ...
    expert     0   0       2   2   2   3

After the grouped kernels of vLLM (fused_moe.py) and MegaBlocks (arXiv:2211.15841), without their list of tiles.

Legend: M rows sorted by expert, N rows of x, X experts, X1 = X + 1, I in features, O out features.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, Target, check_tensor, target_of

MAX_EXPERTS = 2048


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTiles:
    """How the kernel is cut and compiled."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def grouped_matmul(
    x_NI: torch.Tensor,
    weight_XOI: torch.Tensor,
    *,
    starts_X1: torch.Tensor,
    bias_XO: torch.Tensor | None = None,
    row_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """[M, O]: row m of expert x's run starts[x]..starts[x + 1] is x[row_M[m]] weight[x]^T + bias[x].

    Without row_M, M = N and row m is of x[m]. Products are added up in float32 and rounded once. Rows past starts[X]
    are left as they are in fresh memory. starts is int32 and must not fall nor exceed M, row_M is int64 within N;
    neither is checked. Raises ValueError for arguments of another shape or dtype.
    """
    num_experts, num_outputs, num_inputs = weight_XOI.shape
    check_tensor("x", x_NI, shape=(None, num_inputs), dtypes=FLOAT_DTYPES)
    check_tensor("weight", weight_XOI, shape=(None, None, None), dtypes=(x_NI.dtype,))
    check_tensor("starts", starts_X1, shape=(num_experts + 1,), dtypes=(torch.int32,))
    if bias_XO is not None:
        check_tensor("bias", bias_XO, shape=(num_experts, num_outputs), dtypes=(x_NI.dtype,))
    if row_M is not None:
        check_tensor("row", row_M, shape=(None,), dtypes=(torch.int64,))
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts exceed {MAX_EXPERTS}, what one program looks through; share them")
    num_rows = len(x_NI if row_M is None else row_M)
    y_MO = x_NI.new_empty(num_rows, num_outputs)
    if not num_rows or not num_experts:
        return y_MO
    tiles = matmul_tiles(num_rows, num_experts, x_NI.dtype, target_of(x_NI.device))
    grid = (triton.cdiv(num_outputs, tiles.outputs), num_rows // tiles.rows + min(num_experts, num_rows))
    grouped_matmul_kernel[grid](
        x_NI,
        weight_XOI,
        x_NI if bias_XO is None else bias_XO,
        x_NI if row_M is None else row_M,
        starts_X1,
        y_MO,
        x_NI.stride(0),
        weight_XOI.stride(0),
        weight_XOI.stride(1),
        X=num_experts,
        O=num_outputs,
        I=num_inputs,
        HAS_BIAS=bias_XO is not None,
        HAS_ROWS=row_M is not None,
        TILE_X=triton.next_power_of_2(num_experts),
        TILE_M=tiles.rows,
        TILE_O=tiles.outputs,
        TILE_I=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return y_MO


def matmul_tiles(num_rows: int, num_experts: int, dtype: torch.dtype, target: Target) -> MatmulTiles:
    """As many rows as an expert has on average, so that few are empty and a matrix is read few times."""
    rows = min(max(triton.next_power_of_2(-(-num_rows // num_experts)), 16), 128)
    if dtype is torch.float32:  # products run on the scalar units, out of registers
        return MatmulTiles(rows=min(rows, 32), outputs=32, inputs=32, num_warps=4, num_stages=1)
    if target is Target.CDNA:
        return MatmulTiles(rows=rows, outputs=64, inputs=64, num_warps=4, num_stages=2)
    if rows < 64:  # few rows: the time is that of reading matrices, so keep many bytes in flight
        return MatmulTiles(rows=rows, outputs=64, inputs=128, num_warps=4, num_stages=4 if rows == 16 else 3)
    return MatmulTiles(rows=rows, outputs=128, inputs=64, num_warps=8, num_stages=3)


@triton.jit
def grouped_matmul_kernel(
    x_ptr: tl.tensor,  # [N, I]
    weight_ptr: tl.tensor,  # [X, O, I]
    bias_ptr: tl.tensor,  # [X, O], contiguous, read with HAS_BIAS only
    row_ptr: tl.tensor,  # int64 [M], read with HAS_ROWS only
    starts_ptr: tl.tensor,  # int32 [X + 1]
    y_ptr: tl.tensor,  # [M, O], contiguous
    stride_x: tl.tensor,
    stride_wx: tl.tensor,
    stride_wo: tl.tensor,
    X: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    I: tl.constexpr,  # noqa: E741
    HAS_BIAS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    TILE_X: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
) -> None:
    """One program computes TILE_M rows of one expert by TILE_O outputs.

    FLOPs 2 M O I; bytes e (X' O I + M I + M O), X' the experts that have rows. The gate and up projections of
    Qwen3-30B-A3B (X = 128, O = 1,536, I = 2,048, 8 experts a token) in bfloat16 on an H200 (989 TFLOP/s, 4.8 TB/s):
    8,192 tokens, M = 65,536: 412 GFLOP, 417 us, against 1.3 GB, 265 us, so the matrix units decide;
    64 tokens, M = 512, some 126 experts: 3.2 GFLOP, 3.3 us, against 797 MB, 166 us, so memory decides.
    """
    experts = tl.arange(0, TILE_X)
    in_use = experts < X
    starts = tl.load(starts_ptr + experts, mask=in_use, other=0)
    num_rows = tl.load(starts_ptr + 1 + experts, mask=in_use, other=0) - starts
    num_tiles = (num_rows + TILE_M - 1) // TILE_M
    past = tl.cumsum(num_tiles, axis=0)  # tiles of the expert and of those before it
    tile = tl.program_id(1)
    expert = tl.sum((past <= tile).to(tl.int32), axis=0)  # unused lanes repeat the last sum
    if expert >= X:
        return
    own = experts == expert
    first = tl.sum(tl.where(own, starts, 0), axis=0)
    last = first + tl.sum(tl.where(own, num_rows, 0), axis=0)
    tile = tile - tl.sum(tl.where(own, past - num_tiles, 0), axis=0)

    rows = first + tile * TILE_M + tl.arange(0, TILE_M)
    row_mask = rows < last
    x_rows = rows.to(tl.int64)
    if HAS_ROWS:
        x_rows = tl.load(row_ptr + rows, mask=row_mask, other=0)
    outputs = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    output_mask = outputs < O
    inputs = tl.arange(0, TILE_I)
    x_ptrs = x_ptr + x_rows[:, None] * stride_x + inputs[None, :]
    weight_ptr += expert.to(tl.int64) * stride_wx
    weight_ptrs = weight_ptr + outputs[:, None].to(tl.int64) * stride_wo + inputs[None, :]
    acc = tl.zeros([TILE_M, TILE_O], tl.float32)
    for start in range(0, I, TILE_I):
        if I % TILE_I == 0:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            weight = tl.load(weight_ptrs, mask=output_mask[:, None], other=0.0)
        else:
            in_width = inputs[None, :] < I - start
            x = tl.load(x_ptrs, mask=row_mask[:, None] & in_width, other=0.0)
            weight = tl.load(weight_ptrs, mask=output_mask[:, None] & in_width, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        x_ptrs += TILE_I
        weight_ptrs += TILE_I
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert * O + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows[:, None].to(tl.int64) * O + outputs[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def grouped_matmul_torch(
    x_NI: torch.Tensor,
    weight_XOI: torch.Tensor,
    *,
    starts_X1: torch.Tensor,
    bias_XO: torch.Tensor | None = None,
    row_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """The oracle; rows past starts[X] are zero."""
    x_MI = x_NI if row_M is None else x_NI[row_M]
    y_MO = x_MI.new_zeros(len(x_MI), weight_XOI.shape[1])
    starts = starts_X1.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(starts)):
        bias_O = None if bias_XO is None else bias_XO[expert]
        y_MO[start:stop] = torch.nn.functional.linear(x_MI[start:stop], weight_XOI[expert], bias_O)
    return y_MO
