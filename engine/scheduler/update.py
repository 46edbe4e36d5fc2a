"""What a step's result means: tokens are appended, filled blocks cached, ends found.

All rows at once in vector operations; per sequence only where a prefill or a request ended. Decides no hand-over:
a ferried sequence whose prompt is computed is reported and keeps its row (PARKED).

    result --> rows still in use? --> append --> cache filled blocks --> stop id / limit?
                    | no                                                  | yes
                    v                                                     v
               token dropped                          ended, or (ferried, at its limit) prompt ready
"""

from __future__ import annotations

import dataclasses

import numpy as np

from blockferry.engine.request import FinishReason, Int32Array, Int64Array
from blockferry.engine.scheduler.batch import Phase
from blockferry.engine.scheduler.instance import Instance, StepRecord
from blockferry.engine.scheduler.sequence import Sequence
from blockferry.engine.wire import RowLogprobs, StepResult


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A sequence that reached its end in a step; it has left the instance already."""

    sequence: Sequence
    reason: FinishReason
    stop_token_id: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """What became of a step."""

    handles: Int64Array  # [T]
    token_ids: Int32Array  # [T]
    logprobs: tuple[tuple[int, RowLogprobs], ...]
    ended: tuple[Ended, ...]
    prompt_ready: tuple[Sequence, ...]  # ferried, parked, first token known


def apply_result(instance: Instance, result: StepResult, now_s: float) -> StepUpdate:
    """Apply the result of the oldest step in flight. Raises ValueError for any other step or a wrong length."""
    record = _take_record(instance, result)
    batch = instance.batch
    rows, token_ids = record.sample_rows, result.token_ids
    batch.num_in_flight[rows] -= 1
    logprobs = _logprobs_by_handle(instance, result.logprobs)
    phase = batch.phase[rows]
    is_live = phase != Phase.ENDED
    if not is_live.all():
        rows, token_ids, phase = rows[is_live], token_ids[is_live], phase[is_live]
    instance.rows.append(rows, token_ids)
    instance.kv.cache_filled(rows[phase != Phase.DRAINING] if batch.num_draining else rows)
    handles = batch.handle[rows]
    for sequence in record.prefilled:
        sequence.ticket.mark_prefilled(now_s)
    ended, prompt_ready = _find_ends(instance, record, rows, token_ids)
    _settle(instance, record.step_id)
    return StepUpdate(handles=handles, token_ids=token_ids, logprobs=logprobs, ended=ended, prompt_ready=prompt_ready)


def _take_record(instance: Instance, result: StepResult) -> StepRecord:
    if not instance.in_flight or instance.in_flight[0].step_id != result.step_id:
        expected = instance.in_flight[0].step_id if instance.in_flight else None
        raise ValueError(
            f"instance {instance.instance_id} got the result of step {result.step_id}, but step {expected} is the "
            "oldest in flight; commit results in the order of their plans"
        )
    record = instance.in_flight[0]
    if len(result.token_ids) != len(record.sample_rows):
        raise ValueError(
            f"step {result.step_id} of instance {instance.instance_id} samples {len(record.sample_rows)} rows, but its "
            f"result has {len(result.token_ids)} tokens; return one token per sampling row of the plan"
        )
    return instance.in_flight.popleft()


def _logprobs_by_handle(instance: Instance, logprobs: tuple[RowLogprobs, ...]) -> tuple[tuple[int, RowLogprobs], ...]:
    """Address log probabilities by request; those of ended rows and repeated prompt positions are dropped."""
    addressed = []
    for entry in logprobs:
        sequence = instance.batch.sequences[entry.row]
        if sequence is None:
            continue
        unsent = sequence.ticket.unsent(entry) if entry.is_prompt else entry
        if unsent is not None:
            addressed.append((sequence.ticket.handle, unsent))
    return tuple(addressed)


def _find_ends(
    instance: Instance, record: StepRecord, rows: Int32Array, token_ids: Int32Array
) -> tuple[tuple[Ended, ...], tuple[Sequence, ...]]:
    batch = instance.batch
    num_tokens = instance.rows.num_tokens[rows]
    is_stop = batch.find_stops(rows, token_ids, num_tokens)
    is_end = is_stop | (num_tokens >= batch.limit[rows])
    ended: list[Ended] = []
    prompt_ready: list[Sequence] = []
    for index in np.flatnonzero(is_end):
        sequence = batch.sequences[rows[index]]
        assert sequence is not None, rows[index]
        if is_stop[index]:
            stop_token_id = int(token_ids[index])
            ended.append(Ended(sequence=sequence, reason=FinishReason.STOP, stop_token_id=stop_token_id))
        elif sequence.is_ferried:
            prompt_ready.append(sequence)
        else:
            ended.append(Ended(sequence=sequence, reason=FinishReason.LENGTH, stop_token_id=None))
    ended += [
        Ended(sequence=sequence, reason=FinishReason.LENGTH, stop_token_id=None)
        for sequence in record.prefilled
        if _ends_unsampled(sequence)
    ]
    for end in ended:
        instance.drop(end.sequence)
    return tuple(ended), tuple(prompt_ready)


def _ends_unsampled(sequence: Sequence) -> bool:
    """True for a request of max_tokens 0 whose prompt is computed."""
    return sequence.row is not None and sequence.limit == sequence.ticket.num_prompt_tokens


def _settle(instance: Instance, step_id: int) -> None:
    """The step has retired: free the rows that waited for it, requeue preempted ones that have all their tokens."""
    instance.retired_step = step_id
    if instance.batch.num_draining:
        for row in instance.batch.rows_in(Phase.DRAINING):
            sequence = instance.batch.sequences[row]
            if sequence is not None and not instance.batch.num_in_flight[row]:
                instance.requeue(sequence)
    instance.batch.retire(step_id)
