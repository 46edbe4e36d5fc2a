"""StateOps on a GPU: recurrences as Triton kernels that read and write the states where they lie.

Owns no state; launches only.

Legend: T tokens, R rows, B blocks, C channels, W taps, w = W - 1, H heads, P channels of a head, N state size, K key
dim, V value dim.
"""

from __future__ import annotations

import torch

from blockferry.engine.models.state_ops import DeltaInputs, SelectiveInputs, SsdInputs, StateMetadata, StateOps
from blockferry.kernels import causal_conv, gated_delta, selective_scan, ssd_scan
from blockferry.kernels.state_rows import StateRows


class TritonStateOps(StateOps):
    """See StateOps. Takes no float64. Called by the worker's model thread."""

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        *,
        state_BCw: torch.Tensor,
        metadata: StateMetadata,
    ) -> torch.Tensor:
        """See StateOps."""
        return causal_conv.causal_conv(x_TC, weight_CW, bias_C, state_BCw=state_BCw, rows=_rows(metadata))

    def selective_scan(
        self, inputs: SelectiveInputs, *, state_BCN: torch.Tensor, metadata: StateMetadata
    ) -> torch.Tensor:
        """See StateOps."""
        tensors = (inputs.x_TC, inputs.dt_TC, inputs.a_CN, inputs.b_TN, inputs.c_TN, inputs.d_C)
        return selective_scan.selective_scan(*tensors, state_BCN=state_BCN, rows=_rows(metadata))

    def ssd_scan(self, inputs: SsdInputs, *, state_BHPN: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """See StateOps."""
        tensors = (inputs.x_THP, inputs.dt_TH, inputs.a_H, inputs.b_TGN, inputs.c_TGN, inputs.d_H)
        return ssd_scan.ssd_scan(*tensors, state_BHPN=state_BHPN, rows=_rows(metadata))

    def gated_delta(self, inputs: DeltaInputs, *, state_BHKV: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """See StateOps."""
        tensors = (inputs.q_THK, inputs.k_THK, inputs.v_THV, inputs.log_decay_TH, inputs.beta_TH)
        return gated_delta.gated_delta(*tensors, state_BHKV=state_BHKV, rows=_rows(metadata))


def _rows(metadata: StateMetadata) -> StateRows:
    return StateRows(
        num_rows=metadata.num_rows,
        num_decode_rows=metadata.num_decode_rows,
        max_query_len=max(metadata.query_lens, default=0),
        query_start_R1=metadata.query_start_R1,
        source_R=metadata.source_R,
        target_R=metadata.target_R,
        is_fresh_R=metadata.is_fresh_R,
    )
