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

from blockferry.engine.request import FinishReason, Int32Array, Int64Array
from blockferry.engine.scheduler.batch import Phase, RowView
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
    logprobs = _logprobs_by_handle(instance, result.logprobs) if result.logprobs else ()
    view, token_ids = record.sampled, result.token_ids
    if instance.batch.num_ended != record.num_ended:
        is_live = instance.batch.phase.take(view.rows) != Phase.ENDED
        view, token_ids = view.keep(is_live), token_ids[is_live]
    num_tokens = instance.rows.append(view.rows, token_ids)
    instance.kv.cache_filled(_rows_with_blocks(instance, view.rows))
    for sequence in record.prefilled:
        sequence.ticket.mark_prefilled(now_s)
    ended, prompt_ready = _find_ends(instance, view, token_ids, num_tokens)
    ended += _end_unsampled(record)
    for end in ended:
        instance.drop(end.sequence)
    _settle(instance, record.step_id)
    return StepUpdate(
        handles=view.handles,
        token_ids=token_ids,
        logprobs=logprobs,
        ended=ended,
        prompt_ready=prompt_ready,
    )


def _take_record(instance: Instance, result: StepResult) -> StepRecord:
    if not instance.in_flight or instance.in_flight[0].step_id != result.step_id:
        expected = instance.in_flight[0].step_id if instance.in_flight else None
        raise ValueError(
            f"instance {instance.instance_id} got the result of step {result.step_id}, but step {expected} is the "
            "oldest in flight; commit results in the order of their plans"
        )
    record = instance.in_flight[0]
    if len(result.token_ids) != len(record.sampled.rows):
        raise ValueError(
            f"step {result.step_id} of instance {instance.instance_id} samples {len(record.sampled.rows)} rows, but "
            f"its result has {len(result.token_ids)} tokens; return one token per sampling row of the plan"
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


def _rows_with_blocks(instance: Instance, rows: Int32Array) -> Int32Array:
    """Those of rows that were not preempted since they were planned."""
    if not instance.batch.num_draining:
        return rows
    with_blocks: Int32Array = rows[instance.batch.phase.take(rows) != Phase.DRAINING]
    return with_blocks


def _find_ends(
    instance: Instance, view: RowView, token_ids: Int32Array, num_tokens: Int32Array
) -> tuple[tuple[Ended, ...], tuple[Sequence, ...]]:
    is_stop = view.find_stops(token_ids, num_tokens)
    is_end = num_tokens >= view.limits
    is_end |= is_stop
    ended: list[Ended] = []
    prompt_ready: list[Sequence] = []
    for index in is_end.nonzero()[0].tolist():
        sequence = instance.batch.sequences[view.rows[index]]
        assert sequence is not None, view.rows[index]
        if is_stop[index]:
            stop_token_id = int(token_ids[index])
            ended.append(Ended(sequence=sequence, reason=FinishReason.STOP, stop_token_id=stop_token_id))
        elif sequence.is_ferried:
            prompt_ready.append(sequence)
        else:
            ended.append(Ended(sequence=sequence, reason=FinishReason.LENGTH, stop_token_id=None))
    return tuple(ended), tuple(prompt_ready)


def _end_unsampled(record: StepRecord) -> tuple[Ended, ...]:
    """Requests that may have no token more than they came with, once that is computed: of max_tokens 0, mostly."""
    return tuple(
        Ended(sequence=sequence, reason=FinishReason.LENGTH, stop_token_id=None)
        for sequence in record.prefilled
        if sequence.row is not None and sequence.limit == sequence.ticket.num_given_tokens
    )


def _settle(instance: Instance, step_id: int) -> None:
    """The step has retired: free the rows that waited for it, requeue preempted ones that have all their tokens."""
    instance.retired_step = step_id
    if instance.batch.num_draining:
        for row in instance.batch.rows_in(Phase.DRAINING):
            sequence = instance.batch.sequences[row]
            if sequence is not None and not instance.num_in_flight(row):
                instance.requeue(sequence)
    instance.batch.retire(step_id)
