"""Edits of logits before a token is drawn: biases, stop tokens below min_tokens, penalties. In vLLM's order.

Owns no state: counts come from the rows' own tokens, so resuming a row needs nothing rebuilt.

Legend: S sampling rows, P penalised rows of them, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from blockferry.engine.request import Float32Array, Int32Array
from blockferry.engine.rows import RowTable
from blockferry.engine.worker.sampling_state import SamplingState


def edit_logits(logits_SV: torch.Tensor, rows_S: Int32Array, state: SamplingState, table: RowTable) -> None:
    """Apply every edit that a row asks for to float32 logits, in place."""
    for index in np.flatnonzero(state.is_edited[rows_S]):
        _edit_row(logits_SV[index], int(rows_S[index]), state, table)
    penalised = np.flatnonzero(state.is_penalised[rows_S])
    if len(penalised):
        chosen = torch.from_numpy(penalised).to(logits_SV.device)
        logits_SV[chosen] = penalise(logits_SV[chosen], rows_S[penalised], state, table)


def _edit_row(logits_V: torch.Tensor, row: int, state: SamplingState, table: RowTable) -> None:
    bias_ids = torch.from_numpy(state.bias_token_ids[row]).to(logits_V.device).long()
    logits_V[bias_ids] += torch.from_numpy(state.biases[row]).to(logits_V.device)
    num_output_tokens = int(table.num_tokens[row] - table.num_prompt_tokens[row])
    if num_output_tokens < state.min_tokens[row]:
        logits_V[torch.from_numpy(state.stop_token_ids[row]).to(logits_V.device).long()] = -torch.inf


def penalise(logits_PV: torch.Tensor, rows_P: Int32Array, state: SamplingState, table: RowTable) -> torch.Tensor:
    """Repetition penalty over prompt and output, then frequency and presence penalties over output.

    Repetition: positive logits are divided by it, negative ones multiplied (Keskar et al., CTRL, section 4.1).
    """
    device = logits_PV.device
    num_tokens_P1, num_prompt_P1 = table.num_tokens[rows_P, None], table.num_prompt_tokens[rows_P, None]
    longest = int(num_tokens_P1.max())
    position = np.arange(longest, dtype=np.int32)
    is_known = position < num_tokens_P1
    tokens = torch.from_numpy(np.where(is_known, table.token_ids[rows_P, :longest], 0).astype(np.int64)).to(device)
    is_output = torch.from_numpy(is_known & (position >= num_prompt_P1)).to(device)
    seen_PV = torch.zeros_like(logits_PV).scatter_add_(1, tokens, torch.from_numpy(is_known).to(device).float())
    counts_PV = torch.zeros_like(logits_PV).scatter_add_(1, tokens, is_output.float())

    def column(values: Float32Array) -> torch.Tensor:
        return torch.from_numpy(values[rows_P, None]).to(device)

    repetition = column(state.repetition_penalty)
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition, logits_PV * repetition)
    logits_PV = torch.where(seen_PV > 0, repeated_PV, logits_PV)
    logits_PV = logits_PV - column(state.frequency_penalty) * counts_PV
    return logits_PV - column(state.presence_penalty) * (counts_PV > 0)
