"""Recurrent layers between their linear layers: the seam behind which a device puts its own kernels.

A layer's states lie in ledger pages. A step reads each row's state from one block, runs the recurrence over the row's
tokens and writes the state to another block, or to the same one while the row stays inside of it; blocks are never
read by anybody else in the step that writes them.

A row whose drafts are verified needs the state after each of them, as any may be the last one accepted. So the step is
computed in passes (state_passes.py), which kernels see as a step each: first all tokens that are known, then the first
draft of every row that has one, and so on, each written to a block of its own.

Legend: T tokens of the step, rows one after the other; R rows; B blocks; C channels; W taps of a convolution; H heads;
P channels of a head; N state size of a channel; G groups of heads that share b and c; K key dim; V value dim.
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
    # where drafts are verified: of the step's tokens, those of the first pass, and what is left for later ones
    tokens_t: torch.Tensor | None = None  # int64, places in T; None: all of them, in order
    later_passes: tuple[StateMetadata, ...] = ()  # each reads states that the one before wrote; their tokens_t are set


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveInputs:
    """What Mamba-1 feeds its recurrence with. x, b and c share a dtype; dt, a and d are float32 (or all float64)."""

    x_TC: torch.Tensor
    dt_TC: torch.Tensor  # step sizes, after bias and softplus
    a_CN: torch.Tensor  # negative
    b_TN: torch.Tensor
    c_TN: torch.Tensor
    d_C: torch.Tensor

    def tokens(self, begin: int, end: int) -> SelectiveInputs:
        """Those of tokens begin to end, as views."""
        return self.at(slice(begin, end))

    def at(self, places: slice | torch.Tensor) -> SelectiveInputs:
        """Those of tokens at these places: views of a slice, copies for int64 indices."""
        return SelectiveInputs(
            x_TC=self.x_TC[places],
            dt_TC=self.dt_TC[places],
            a_CN=self.a_CN,
            b_TN=self.b_TN[places],
            c_TN=self.c_TN[places],
            d_C=self.d_C,
        )

    def cast(self, dtype: torch.dtype) -> SelectiveInputs:
        """The same in one dtype."""
        return SelectiveInputs(
            x_TC=self.x_TC.to(dtype),
            dt_TC=self.dt_TC.to(dtype),
            a_CN=self.a_CN.to(dtype),
            b_TN=self.b_TN.to(dtype),
            c_TN=self.c_TN.to(dtype),
            d_C=self.d_C.to(dtype),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SsdInputs:
    """What Mamba-2 feeds its recurrence with. x, b and c share a dtype; dt, a and d are float32 (or all float64)."""

    x_THP: torch.Tensor
    dt_TH: torch.Tensor  # step sizes, after bias, softplus and clamp
    a_H: torch.Tensor  # negative
    b_TGN: torch.Tensor  # head h reads group h // (H / G)
    c_TGN: torch.Tensor
    d_H: torch.Tensor

    def tokens(self, begin: int, end: int) -> SsdInputs:
        """Those of tokens begin to end, as views."""
        return self.at(slice(begin, end))

    def at(self, places: slice | torch.Tensor) -> SsdInputs:
        """Those of tokens at these places: views of a slice, copies for int64 indices."""
        return SsdInputs(
            x_THP=self.x_THP[places],
            dt_TH=self.dt_TH[places],
            a_H=self.a_H,
            b_TGN=self.b_TGN[places],
            c_TGN=self.c_TGN[places],
            d_H=self.d_H,
        )

    def cast(self, dtype: torch.dtype) -> SsdInputs:
        """The same in one dtype."""
        return SsdInputs(
            x_THP=self.x_THP.to(dtype),
            dt_TH=self.dt_TH.to(dtype),
            a_H=self.a_H.to(dtype),
            b_TGN=self.b_TGN.to(dtype),
            c_TGN=self.c_TGN.to(dtype),
            d_H=self.d_H.to(dtype),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """What a gated delta net feeds its recurrence with. q, k, v share a dtype; the others are float32 (or all float64).

    H counts value heads; the caller has repeated q and k where one of theirs serves several.
    """

    q_THK: torch.Tensor  # l2-normalised, then scaled
    k_THK: torch.Tensor  # l2-normalised
    v_THV: torch.Tensor
    log_decay_TH: torch.Tensor  # at most 0
    beta_TH: torch.Tensor  # how much of the value a key finds is replaced, in 0..1

    def tokens(self, begin: int, end: int) -> DeltaInputs:
        """Those of tokens begin to end, as views."""
        return self.at(slice(begin, end))

    def at(self, places: slice | torch.Tensor) -> DeltaInputs:
        """Those of tokens at these places: views of a slice, copies for int64 indices."""
        return DeltaInputs(
            q_THK=self.q_THK[places],
            k_THK=self.k_THK[places],
            v_THV=self.v_THV[places],
            log_decay_TH=self.log_decay_TH[places],
            beta_TH=self.beta_TH[places],
        )

    def cast(self, dtype: torch.dtype) -> DeltaInputs:
        """The same in one dtype."""
        return DeltaInputs(
            q_THK=self.q_THK.to(dtype),
            k_THK=self.k_THK.to(dtype),
            v_THV=self.v_THV.to(dtype),
            log_decay_TH=self.log_decay_TH.to(dtype),
            beta_TH=self.beta_TH.to(dtype),
        )


class StateOps(Protocol):
    """Recurrences over paged states. One thread calls it. Inputs are contiguous unless said otherwise.

    States are views of pages, strided over blocks, float32 or bfloat16 whatever the inputs are. All compute in float32
    and round the state once, when they write it back; only what goes into a matrix unit may be rounded to the dtype of
    the inputs. Outputs have the dtype of x (of v).
    """

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        *,
        state_BCw: torch.Tensor,  # view [B, C, W - 1] of the layer's pages: the last inputs, oldest first
        metadata: StateMetadata,
    ) -> torch.Tensor:
        """Depthwise causal convolution of each row, [T, C]; no activation. Updates the state.

        x may have strided rows.
        """

    def selective_scan(
        self, inputs: SelectiveInputs, *, state_BCN: torch.Tensor, metadata: StateMetadata
    ) -> torch.Tensor:
        """Mamba-1: state' = exp(dt a) state + dt x b; y = state' . c + d x, [T, C]. Updates the state.

        x, dt, b and c may have strided rows.
        """

    def ssd_scan(self, inputs: SsdInputs, *, state_BHPN: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """Mamba-2, one decay per head: state' = exp(dt a) state + dt x b; y = state' . c + d x, [T, H, P].

        Updates the state. Only the last dims of x, b and c need be contiguous.
        """

    def gated_delta(self, inputs: DeltaInputs, *, state_BHKV: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """Gated delta rule: decay the state S, replace beta of what k finds in it by v, read it with q; [T, H, V].

        S' = exp(log_decay) S; S'' = S' + k (x) beta (v - k . S'); o = q . S''. Updates the state. Only the last dims of
        q, k and v need be contiguous.
        """
