"""Recurrent layers between their linear layers: the seam behind which a device puts its own kernels.

A layer's states lie in ledger pages. A step reads each row's state from one block, runs the recurrence over the row's
tokens and writes the state to another block, or to the same one while the row stays inside of it; blocks are never
read by anybody else in the step that writes them.

Legend: T tokens of the step, rows one after the other; R rows; B blocks; C channels; W taps of a convolution.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateMetadata:
    """One state group's view of one step. Decode rows (one token each) come first, then prefill rows."""

    num_rows: int
    num_decode_rows: int
    num_tokens: int
    query_start_R1: torch.Tensor  # int32 [R+1], offsets into T
    source_R: torch.Tensor  # int64, block that holds the row's state before the step; of no meaning where fresh
    target_R: torch.Tensor  # int64, block that takes the row's state after the step
    is_fresh_R: torch.Tensor  # bool, the sequence starts in this step: its state before is zero
    query_lens: list[int]  # host copies, so that CPU paths need no sync
    is_fresh: list[bool]


class StateOps(Protocol):
    """Recurrences over paged states. One thread calls it. Inputs are contiguous unless said otherwise."""

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        *,
        state_BCw: torch.Tensor,  # view [B, C, W - 1] of the layer's pages: the last inputs, oldest first
        metadata: StateMetadata,
    ) -> torch.Tensor:
        """Depthwise causal convolution of each row, [T, C]; no activation. Updates the state."""
