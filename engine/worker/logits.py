"""Edits of logits before a token is drawn: biases, stop tokens below min_tokens, penalties. In vLLM's order.

Owns no state: counts come from the rows' own tokens, so resuming a row needs nothing rebuilt. What counts are the
tokens before the position that is drawn, drafts among them: a row may be here several times, at several positions.

Legend: S places where a token is drawn, P penalised ones, L tokens before the furthest of these, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from blockferry.engine.request import Float32Array, Int32Array, Int64Array
from blockferry.engine.rows import RowTable
from blockferry.engine.worker.sampling_state import SamplingState


def edit_logits(
    logits_SV: torch.Tensor, rows_S: Int32Array, positions_S: Int32Array, *, state: SamplingState, table: RowTable
) -> None:
    """Apply every edit that a row asks for to float32 logits, in place; positions_S are those that are drawn."""
    for index in np.flatnonzero(state.is_edited[rows_S]):
        row = int(rows_S[index])
        num_output_tokens = int(positions_S[index] - table.num_prompt_tokens[row])
        _edit_row(logits_SV[index], row, state, num_output_tokens=num_output_tokens)
    penalised = np.flatnonzero(state.is_penalised[rows_S])
    if len(penalised):
        rows_P, positions_P = rows_S[penalised], positions_S[penalised]
        _penalise(logits_SV, penalised, rows_P=rows_P, positions_P=positions_P, state=state, table=table)


def _edit_row(logits_V: torch.Tensor, row: int, state: SamplingState, *, num_output_tokens: int) -> None:
    bias_ids, biases = state.bias_token_ids[row], state.biases[row]
    is_token = (bias_ids >= 0) & (bias_ids < len(logits_V))  # what no vocabulary entry means has no effect
    _add(logits_V, bias_ids[is_token], biases[is_token])
    if num_output_tokens < state.min_tokens[row]:
        stop_ids = state.stop_token_ids[row]
        stop_ids = stop_ids[(stop_ids >= 0) & (stop_ids < len(logits_V))]
        _add(logits_V, stop_ids, np.full(len(stop_ids), -np.inf, np.float32))


def _add(logits_V: torch.Tensor, token_ids: Int32Array, values: Float32Array) -> None:
    device = logits_V.device
    logits_V[torch.from_numpy(token_ids).to(device).long()] += torch.from_numpy(values).to(device)


def _penalise(
    logits_SV: torch.Tensor,
    places_P: Int64Array,
    *,
    rows_P: Int32Array,
    positions_P: Int32Array,
    state: SamplingState,
    table: RowTable,
) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalties over output.

    Repetition: positive logits are divided by it, negative ones multiplied (Keskar et al., CTRL, section 4.1).
    Only logits of tokens that occurred are touched; a token that occurred twice is written twice, alike.
    """
    device = logits_SV.device
    num_tokens_P1, num_prompt_P1 = positions_P[:, None], table.num_prompt_tokens[rows_P, None]
    position_L = np.arange(int(num_tokens_P1.max()), dtype=np.int32)
    is_known_PL = position_L < num_tokens_P1
    # beyond a row's end stands its first token again
    tokens_PL = np.where(is_known_PL, table.token_ids[rows_P, : len(position_L)], table.token_ids[rows_P, :1])
    is_output_PL = torch.from_numpy(is_known_PL & (position_L >= num_prompt_P1)).to(device)
    tokens = torch.from_numpy(tokens_PL.astype(np.int64)).to(device)
    counts_PV = logits_SV.new_zeros(len(rows_P), logits_SV.shape[1]).scatter_add_(1, tokens, is_output_PL.float())
    counts_PL = counts_PV.gather(1, tokens)

    def column(values: Float32Array) -> torch.Tensor:
        return torch.from_numpy(values[rows_P, None]).to(device)

    places = torch.from_numpy(places_P[:, None]).to(device)
    logits_PL = logits_SV[places, tokens]
    repetition = column(state.repetition_penalty)
    logits_PL = torch.where(logits_PL > 0, logits_PL / repetition, logits_PL * repetition)
    logits_PL -= column(state.frequency_penalty) * counts_PL
    logits_PL -= column(state.presence_penalty) * (counts_PL > 0)
    logits_SV[places, tokens] = logits_PL
