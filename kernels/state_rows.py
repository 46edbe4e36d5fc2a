"""What every kernel over paged states is told about a step's rows, and how it reads and writes their states.

    tokens   decode row 0 | decode row 1 | ... | prefill row D: tokens begin..end | prefill row D + 1 | ...

A program reads its part of a row's state from the source block and writes it to the target block, which may be the
same: nobody else touches that part in the launch.

Legend: R rows, D of them decode rows, T tokens.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from blockferry.kernels.launch import FLOAT_DTYPES, check_tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """Decode rows, of one token each, come first."""

    num_rows: int
    num_decode_rows: int
    max_query_len: int  # tokens; at least the longest row's
    query_start_R1: torch.Tensor  # int32 [R+1], offsets into T
    source_R: torch.Tensor  # int64 [R], of no meaning where fresh
    target_R: torch.Tensor  # int64 [R]
    is_fresh_R: torch.Tensor  # bool [R]

    @property
    def num_prefill_rows(self) -> int:
        """R - D."""
        return self.num_rows - self.num_decode_rows


def check_state(name: str, state_B: torch.Tensor, *, shape: tuple[int, ...], rows: StateRows) -> None:
    """Raises ValueError for a state of another shape, dtype or strides, or for rows that do not fit together."""
    check_tensor(name, state_B, shape=(None, *shape), dtypes=FLOAT_DTYPES)
    dense = 1
    for dim in range(state_B.ndim - 1, 0, -1):
        if state_B.shape[dim] > 1 and state_B.stride(dim) != dense:
            raise ValueError(
                f"{name} has strides {state_B.stride()}, the kernel needs the state of a block in one piece"
            )
        dense *= state_B.shape[dim]
    check_tensor("query_start", rows.query_start_R1, shape=(rows.num_rows + 1,), dtypes=(torch.int32,))
    for row_name, tensor in (("source", rows.source_R), ("target", rows.target_R)):
        check_tensor(row_name, tensor, shape=(rows.num_rows,), dtypes=(torch.int64,))
    check_tensor("is_fresh", rows.is_fresh_R, shape=(rows.num_rows,), dtypes=(torch.bool,))


@triton.jit
def load_state(
    state_ptr: tl.tensor,  # [B, ...]: the layer's pages
    stride_sb: tl.tensor,
    row: tl.tensor,
    source_ptr: tl.tensor,  # int64 [R]
    is_fresh_ptr: tl.tensor,  # bool [R]
    offsets: tl.tensor,  # of the program's part inside of a block
    mask: tl.tensor,
) -> tl.tensor:
    """The part in float32, zeros for a fresh row, whose source is not looked at."""
    is_old = tl.load(is_fresh_ptr + row) == 0
    block = tl.load(source_ptr + row, mask=is_old, other=0)
    return tl.load(state_ptr + block * stride_sb + offsets, mask=mask & is_old, other=0.0).to(tl.float32)


@triton.jit
def store_state(
    state_ptr: tl.tensor,  # [B, ...]
    stride_sb: tl.tensor,
    row: tl.tensor,
    target_ptr: tl.tensor,  # int64 [R]
    offsets: tl.tensor,
    mask: tl.tensor,
    state: tl.tensor,
) -> None:
    """Write the part to the row's target block, once every thread has read what it needs of it."""
    tl.debug_barrier()
    block = tl.load(target_ptr + row)
    tl.store(state_ptr + block * stride_sb + offsets, state.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit
def decay_between(
    sums: tl.tensor,  # float64 [S]: logarithms of decays, summed up to each token
    mask: tl.tensor,  # [S, S]
) -> tl.tensor:
    """[S, S] float32: the decay from token s (column) to token t (row) where the mask says so, else 0.

    Differences of sums may be small against the sums, hence float64; the matrix is made of the sums' two float32
    halves, for registers' sake.
    """
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    log_decay = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(mask, log_decay, float("-inf")))
