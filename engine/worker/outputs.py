"""The end of a step: from hidden states to drawn tokens and the log probabilities that rows asked for.

Owns the rows' sampling parameters; reads the rows' tokens, never writes them.

Legend: T tokens of the step, N places where a token is drawn, E hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from blockferry.engine.request import Int32Array, Int64Array, TokenLogprobs
from blockferry.engine.rows import RowTable
from blockferry.engine.spec_decode.acceptance import Accepted, Targets
from blockferry.engine.wire import RowLogprobs, StepPlan
from blockferry.engine.worker.inputs import StepInputs
from blockferry.engine.worker.logprobs import token_logprobs
from blockferry.engine.worker.model_runner import ModelRunner
from blockferry.engine.worker.sampler import sample
from blockferry.engine.worker.sampling_state import NO_LOGPROBS, SamplingState

# Logits of a whole chunk would take vocab_size * 4 bytes a token; prompt logprobs are made this many at a time.
_PROMPT_SLICE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A token for every place of a step, and what it was drawn from."""

    token_ids_N: Int32Array  # zeros where this rank does not sample
    logits_NV: torch.Tensor | None = None  # only where it does


class OutputStage:
    """Runs on every rank of the last stage; only its rank 0 has logits and samples."""

    def __init__(self, runner: ModelRunner, table: RowTable, sampling: SamplingState) -> None:
        self._runner = runner
        self._table = table
        self._sampling = sampling

    def draw(self, targets: Targets, hidden_TE: torch.Tensor) -> Drawn:
        """A token for every place, whether it will count or not. At least one place."""
        logits_NV = self._runner.logits(hidden_TE, targets.tokens_N)
        if logits_NV is None:
            return nothing_drawn(targets)
        rows_N, positions_N = targets.rows_N, targets.positions_N
        token_ids_N = sample(logits_NV, rows_N, positions_N, state=self._sampling, table=self._table)
        return Drawn(token_ids_N=token_ids_N, logits_NV=logits_NV)

    def drawn_logprobs(self, targets: Targets, drawn: Drawn, accepted: Accepted) -> list[RowLogprobs]:
        """Of the tokens that count; empty where this rank does not sample. One per row."""
        if drawn.logits_NV is None:
            return []
        num_top_N = self._sampling.num_logprobs[targets.rows_N]
        chosen = np.flatnonzero((num_top_N != NO_LOGPROBS) & accepted.is_kept_N)
        if not len(chosen):
            return []
        logits = drawn.logits_NV[torch.from_numpy(chosen).to(drawn.logits_NV.device)]
        entries = token_logprobs(logits, drawn.token_ids_N[chosen], num_top_N[chosen])
        rows, positions = targets.rows_N[chosen], targets.positions_N[chosen]
        starts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()  # a row's places follow each other
        return [
            RowLogprobs(
                row=int(rows[start]),
                first_position=int(positions[start]),
                is_prompt=False,
                entries=tuple(entries[start:stop]),
            )
            for start, stop in zip(starts, [*starts[1:], len(entries)])
        ]

    def prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden_TE: torch.Tensor) -> list[RowLogprobs]:
        """What each chunk's positions say of the prompt tokens that follow them."""
        results = []
        for index in np.flatnonzero(self._sampling.num_prompt_logprobs[plan.rows] != NO_LOGPROBS):
            row, first = int(plan.rows[index]), int(plan.num_computed[index])
            last = min(first + int(plan.num_scheduled[index]), int(self._table.num_prompt_tokens[row]) - 1)
            if last <= first:
                continue
            tokens = np.arange(last - first) + inputs.first_token_R[index]
            entries = self._describe(hidden_TE, tokens, self._table.token_ids[row, first + 1 : last + 1], row)
            if entries:
                results.append(RowLogprobs(row=row, first_position=first + 1, is_prompt=True, entries=tuple(entries)))
        return results

    def _describe(
        self, hidden_TE: torch.Tensor, tokens: Int64Array, next_token_ids: Int32Array, row: int
    ) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for start in range(0, len(tokens), _PROMPT_SLICE):
            part = slice(start, start + _PROMPT_SLICE)
            logits = self._runner.logits(hidden_TE, tokens[part])
            if logits is not None:
                num_top = np.full(len(logits), self._sampling.num_prompt_logprobs[row], np.int32)
                entries += token_logprobs(logits, next_token_ids[part], num_top)
        return entries


def nothing_drawn(targets: Targets) -> Drawn:
    """What a rank has that does not sample."""
    return Drawn(token_ids_N=np.zeros(len(targets), np.int32))
