"""What a step's result means: tokens are appended, filled blocks cached, ends found.

All rows at once in vector operations; per sequence only where a prefill or a request ended. Decides no hand-over:
a ferried sequence whose prompt is computed is reported and keeps its row (PARKED).

    result --> rows still in use? --> append, up to a stop id --> cache filled blocks --> stop id / limit?
                    | no                  | drafts did not hold         proposals kept       | yes
                    v                     v                                                  v
               tokens dropped   computed counts go back         ended, or (ferried, at its limit) prompt ready
"""

from __future__ import annotations

import dataclasses

from blockferry.engine.request import FinishReason, Int32Array, Int64Array
from blockferry.engine.scheduler.batch import Phase
from blockferry.engine.scheduler.instance import Instance, StepRecord
from blockferry.engine.scheduler.new_tokens import Drawn, NewTokens, append, describe_mismatch
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

    handles: Int64Array  # [T], one as often as it got tokens
    token_ids: Int32Array  # [T]
    logprobs: tuple[tuple[int, RowLogprobs], ...]
    ended: tuple[Ended, ...]
    prompt_ready: tuple[Sequence, ...]  # ferried, parked, first token known


def apply_result(instance: Instance, result: StepResult, now_s: float) -> StepUpdate:
    """Apply the result of the oldest step in flight.

    Raises ValueError for any other step, and for tokens or proposals that the step cannot have; nothing has changed.
    """
    record = _take_record(instance, result)
    new = _append(instance, record, result)
    logprobs = _logprobs_by_handle(instance, result.logprobs) if result.logprobs else ()
    for sequence in record.prefilled:
        sequence.ticket.mark_prefilled(now_s)
    ended, prompt_ready = _find_ends(instance, new)
    ended += _end_unsampled(record)
    for end in ended:
        instance.drop(end.sequence)
    _settle(instance, record.step_id)
    return StepUpdate(
        handles=new.handles,
        token_ids=new.token_ids,
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
    mismatch = describe_mismatch(
        result,
        num_sampled=len(record.sampled.rows),
        num_drafts=record.num_drafts,
        num_proposals=record.num_proposals,
    )
    if mismatch:
        raise ValueError(f"step {result.step_id} of instance {instance.instance_id} {mismatch}")
    return instance.in_flight.popleft()


def _append(instance: Instance, record: StepRecord, result: StepResult) -> NewTokens:
    """Append a result's tokens to the rows that are still in use, cache what they fill, keep what was proposed."""
    batch = instance.batch
    drawn = Drawn(
        view=record.sampled,
        token_ids=result.token_ids,
        counts=result.num_tokens,
        num_drafts=record.num_drafts,
        proposals=result.proposals,
    )
    if batch.num_ended != record.num_ended:
        drawn = drawn.keep(batch.phase.take(record.sampled.rows) != Phase.ENDED)
    new = append(instance.rows, drawn)
    rows = new.view.rows
    has_blocks = batch.phase.take(rows) != Phase.DRAINING if batch.num_draining else None  # None: all of them
    instance.kv.cache_filled(rows if has_blocks is None else rows[has_blocks])
    instance.speculation.learn(drawn, new.num_tokens, has_blocks)
    return new


def _logprobs_by_handle(instance: Instance, logprobs: tuple[RowLogprobs, ...]) -> tuple[tuple[int, RowLogprobs], ...]:
    """Address log probabilities by request, without those of ended rows, cut tokens and repeated prompt positions."""
    addressed = []
    for entry in logprobs:
        sequence = instance.batch.sequences[entry.row]
        if sequence is None:
            continue
        num_tokens = int(instance.rows.num_tokens[entry.row])
        unsent = sequence.ticket.unsent(entry) if entry.is_prompt else _up_to(entry, num_tokens)
        if unsent is not None:
            addressed.append((sequence.ticket.handle, unsent))
    return tuple(addressed)


def _up_to(logprobs: RowLogprobs, num_tokens: int) -> RowLogprobs | None:
    """Those of tokens that the row has kept."""
    num_kept = num_tokens - logprobs.first_position
    if num_kept >= len(logprobs.entries):
        return logprobs
    return dataclasses.replace(logprobs, entries=logprobs.entries[:num_kept]) if num_kept > 0 else None


def _find_ends(instance: Instance, new: NewTokens) -> tuple[tuple[Ended, ...], tuple[Sequence, ...]]:
    is_end = new.num_tokens >= new.view.limits
    is_end |= new.is_stop
    ended: list[Ended] = []
    prompt_ready: list[Sequence] = []
    for index in is_end.nonzero()[0].tolist():
        sequence = instance.batch.sequences[new.view.rows[index]]
        assert sequence is not None, new.view.rows[index]
        if new.is_stop[index]:
            stop_token_id = int(instance.rows.tokens(new.view.rows[index])[-1])
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
