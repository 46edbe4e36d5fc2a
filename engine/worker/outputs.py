"""The end of a step: from hidden states to sampled tokens and the log probabilities that rows asked for.

Owns the rows' sampling parameters; reads the rows' tokens, never writes them.

Legend: T tokens of the step, S sampling rows, E hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from blockferry.engine.request import Int32Array, Int64Array, TokenLogprobs
from blockferry.engine.rows import RowTable
from blockferry.engine.wire import RowLogprobs, StepPlan
from blockferry.engine.worker.inputs import StepInputs
from blockferry.engine.worker.logprobs import token_logprobs
from blockferry.engine.worker.model_runner import ModelRunner
from blockferry.engine.worker.sampler import sample
from blockferry.engine.worker.sampling_state import NO_LOGPROBS, SamplingState

# Logits of a whole chunk would take vocab_size * 4 bytes a token; prompt logprobs are made this many at a time.
_PROMPT_SLICE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Tokens and log probabilities of a step; zeros and none where this rank does not sample."""

    token_ids: Int32Array  # [S], in plan order
    logprobs: tuple[RowLogprobs, ...] = ()


NOTHING = StepOutcome(token_ids=np.empty(0, np.int32))


def num_sampled(plan: StepPlan) -> int:
    """Rows of the plan that yield a token."""
    return int(np.count_nonzero(plan.sample))


class OutputStage:
    """Runs on every rank of the last stage; only its rank 0 has logits and samples."""

    def __init__(self, runner: ModelRunner, table: RowTable, sampling: SamplingState) -> None:
        self._runner = runner
        self._table = table
        self._sampling = sampling

    def finish(self, plan: StepPlan, inputs: StepInputs, hidden_TE: torch.Tensor) -> StepOutcome:
        """Sample the plan's sampling rows."""
        logprobs = self._prompt_logprobs(plan, inputs, hidden_TE)
        token_ids_S = np.zeros(num_sampled(plan), np.int32)
        if len(token_ids_S):
            logits_SV = self._runner.logits(hidden_TE, inputs.last_token_R[plan.sample])
            if logits_SV is not None:
                rows_S = plan.rows[plan.sample]
                positions_S = plan.num_computed[plan.sample] + plan.num_scheduled[plan.sample]
                token_ids_S = sample(logits_SV, rows_S, positions_S, state=self._sampling, table=self._table)
                logprobs += self._sampled_logprobs(logits_SV, rows_S, positions_S, token_ids_S)
        return StepOutcome(token_ids=token_ids_S, logprobs=tuple(logprobs))

    def _sampled_logprobs(
        self, logits_SV: torch.Tensor, rows_S: Int32Array, positions_S: Int32Array, token_ids_S: Int32Array
    ) -> list[RowLogprobs]:
        num_top_S = self._sampling.num_logprobs[rows_S]
        chosen = np.flatnonzero(num_top_S != NO_LOGPROBS)
        if not len(chosen):
            return []
        logits = logits_SV[torch.from_numpy(chosen).to(logits_SV.device)]
        entries = token_logprobs(logits, token_ids_S[chosen], num_top_S[chosen])
        return [
            RowLogprobs(row=int(rows_S[i]), first_position=int(positions_S[i]), is_prompt=False, entries=(entry,))
            for i, entry in zip(chosen, entries, strict=True)
        ]

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden_TE: torch.Tensor) -> list[RowLogprobs]:
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
