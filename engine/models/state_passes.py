"""StateOps of any device for steps that verify drafts: one pass after another, each of which is a step to the kernels.

Owns no state and computes nothing itself. As every pass but the first has one token per row, a draft's result is what
the decode step of that token would have yielded, bit for bit.

Legend: see state_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from blockferry.engine.models.state_ops import DeltaInputs, SelectiveInputs, SsdInputs, StateMetadata, StateOps


class StateOpsInPasses(StateOps):
    """See StateOps. A step without drafts goes to the kernels as it is."""

    def __init__(self, ops: StateOps) -> None:
        self._ops = ops

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
        if metadata.tokens_t is None:
            return self._ops.causal_conv(x_TC, weight_CW, bias_C, state_BCw=state_BCw, metadata=metadata)
        return _in_passes(
            lambda one, tokens_t: self._ops.causal_conv(
                x_TC[tokens_t], weight_CW, bias_C, state_BCw=state_BCw, metadata=one
            ),
            len(x_TC),
            metadata,
        )

    def selective_scan(
        self, inputs: SelectiveInputs, *, state_BCN: torch.Tensor, metadata: StateMetadata
    ) -> torch.Tensor:
        """See StateOps."""
        if metadata.tokens_t is None:
            return self._ops.selective_scan(inputs, state_BCN=state_BCN, metadata=metadata)
        return _in_passes(
            lambda one, tokens_t: self._ops.selective_scan(inputs.at(tokens_t), state_BCN=state_BCN, metadata=one),
            len(inputs.x_TC),
            metadata,
        )

    def ssd_scan(self, inputs: SsdInputs, *, state_BHPN: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """See StateOps."""
        if metadata.tokens_t is None:
            return self._ops.ssd_scan(inputs, state_BHPN=state_BHPN, metadata=metadata)
        return _in_passes(
            lambda one, tokens_t: self._ops.ssd_scan(inputs.at(tokens_t), state_BHPN=state_BHPN, metadata=one),
            len(inputs.x_THP),
            metadata,
        )

    def gated_delta(self, inputs: DeltaInputs, *, state_BHKV: torch.Tensor, metadata: StateMetadata) -> torch.Tensor:
        """See StateOps."""
        if metadata.tokens_t is None:
            return self._ops.gated_delta(inputs, state_BHKV=state_BHKV, metadata=metadata)
        return _in_passes(
            lambda one, tokens_t: self._ops.gated_delta(inputs.at(tokens_t), state_BHKV=state_BHKV, metadata=one),
            len(inputs.v_THV),
            metadata,
        )


def _in_passes(
    run: Callable[[StateMetadata, torch.Tensor], torch.Tensor], num_tokens: int, metadata: StateMetadata
) -> torch.Tensor:
    """Outputs [T, ...] of a step; run(metadata, tokens_t) yields those of one pass."""
    out_T: torch.Tensor | None = None
    for one in (metadata, *metadata.later_passes):
        assert one.tokens_t is not None, one
        out_t = run(one, one.tokens_t)
        if out_T is None:
            out_T = out_t.new_empty((num_tokens, *out_t.shape[1:]))
        out_T[one.tokens_t] = out_t
    assert out_T is not None
    return out_T
