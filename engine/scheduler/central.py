"""CentralScheduler: every instance's scheduler and every hand-off between them, behind one object.

Owns the tickets of unfinished requests. One thread calls it. Knows no sockets, no Ray and no text.

    add(request, route)      -> checks, queue of the prefill instance       abort(handle), fail_instance(...)
    plan(P) / plan(D)        -> StepPlan, or None                                  |
    commit(P|D, result)      -> tokens and ends, StepOutput  <---------------------+
    take_transfers()         -> commands for the ranks that move blocks
    on_transfer(event), tick() -> hand-offs go on, fail or expire, StepOutput
    take_copies(), on_copy(event) -> the same for what instances keep in tiers outside of their pools
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from blockferry.connectors.base import TransferCommand, TransferEvent, TransferMode
from blockferry.connectors.offload_base import CopyCommand, CopyEvent
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.errors import RequestRejected
from blockferry.engine.kv.block_hash import encoder_key
from blockferry.engine.request import FinishReason, Request
from blockferry.engine.scheduler import admission, audit, reports
from blockferry.engine.scheduler.ferried import check_ferriable
from blockferry.engine.scheduler.handoff import Handoff, HandoffFailed, HandoffOptions
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.offload_seam import LoadsEnded
from blockferry.engine.scheduler.outputs import Finished, InstanceLoad, Route, StepOutput
from blockferry.engine.scheduler.schedule import StepScheduler
from blockferry.engine.scheduler.sequence import LOCAL_LANE, Rank, Sequence, Ticket, resolve_seed
from blockferry.engine.scheduler.transfers import Handoffs
from blockferry.engine.scheduler.update import Ended, apply_result
from blockferry.engine.wire import StepPlan, StepResult

FCFS = "fcfs"
POLICIES = (FCFS, "priority")


class CentralScheduler:
    """Schedules all instances of a deployment. Called by one thread."""

    def __init__(
        self,
        instances: Iterable[Instance],
        *,
        connector: PdScheduler | None = None,
        handoffs: HandoffOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connector` may be None when no route names two instances; every instance is declared to it here.

        Raises ValueError for an unknown order of requests, ConfigError for a connector between ledgers whose layers
        differ or cannot be ferried.
        """
        self._instances = {instance.instance_id: instance for instance in instances}
        self._steppers = {instance_id: StepScheduler(one) for instance_id, one in self._instances.items()}
        for instance in self._instances.values():
            if instance.config.policy not in POLICIES:
                raise ValueError(f"policy={instance.config.policy!r} is unknown; use one of {', '.join(POLICIES)}")
            if connector is not None:
                connector.add_instance(instance.instance_id, num_ranks=instance.num_ranks)
        if connector is not None:
            check_ferriable(self._instances.values())
        self._can_ferry = connector is not None
        handoffs = handoffs or HandoffOptions()
        self._handoffs = Handoffs(
            connector or PdScheduler(mode=TransferMode.PUSH, transfer_timeout_s=handoffs.transfer_timeout_s), handoffs
        )
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._failures: dict[str, str] = {}  # reason by instance_id
        self._num_added = 0

    # requests

    @property
    def num_unfinished(self) -> int:
        """Accepted requests whose Finished has not been returned."""
        return len(self._tickets)

    def add(self, request: Request, route: Route) -> None:
        """Accept a request. Raises RequestRejected when it could never run (QueueFull: not now)."""
        source, target = self._live(request, route.prefill), self._live(request, route.decode)
        self._check(request, source, target)
        limit = _limit(request, source, target)
        prefill_limit = len(request.prompt_token_ids) + 1
        is_ferried = source is not target and limit > prefill_limit
        ticket = self._open_ticket(request, route, source)
        sequence = _sequence(
            ticket,
            source,
            limit=prefill_limit if is_ferried else limit,
            lane=target.instance_id if is_ferried else LOCAL_LANE,
        )
        ticket.sequence = sequence
        if is_ferried:
            target_sequence = _sequence(ticket, target, limit=limit, lane=LOCAL_LANE)
            self._handoffs.open(
                Handoff(
                    ticket=ticket,
                    source=source,
                    source_sequence=sequence,
                    target=target,
                    target_sequence=target_sequence,
                )
            )
        source.queue.push(sequence)

    def abort(self, handle: int) -> StepOutput:
        """End a request in whatever state it is; blocks that bytes may still reach stay held. Unknown: no-op."""
        ticket = self._tickets.get(handle)
        if ticket is None:
            return StepOutput()
        self._leave(ticket)
        return StepOutput(finished=(self._finish(ticket, FinishReason.ABORT),))

    # steps

    def plan(self, instance_id: str) -> StepPlan | None:
        """The instance's next step; None when there is nothing to do now or enough steps are in flight."""
        if instance_id in self._failures:
            return None
        now_s = self._clock()
        plan = self._steppers[instance_id].schedule(now_s, self._handoffs)
        self._handoffs.launch(now_s)
        return plan

    def commit(self, instance_id: str, result: StepResult) -> StepOutput:
        """Apply the result of the instance's oldest step in flight; a failed step fails the instance.

        Raises ValueError for another step's result or one of the wrong length.
        """
        if instance_id in self._failures:
            return StepOutput()
        if result.error:
            return self.fail_instance(instance_id, result.error)
        now_s = self._clock()
        update = apply_result(self._instances[instance_id], result, now_s)
        failed = [one for sequence in update.prompt_ready for one in self._handoffs.prompt_ready(sequence, now_s)]
        finished = tuple(self._finish_ended(ended) for ended in update.ended)
        self._handoffs.launch(now_s)
        return StepOutput(
            handles=update.handles,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            finished=finished + self._finish_failed(failed).finished,
        )

    # transfers and time

    def take_transfers(self) -> list[tuple[str, TransferCommand]]:
        """(instance_id, command): to be sent to every rank of the instance, out of band, since the last take."""
        return self._handoffs.take_commands()

    def take_cancels(self) -> list[tuple[str, int]]:
        """(instance_id, transfer_id): every rank of the instance should give that transfer up."""
        return self._handoffs.take_cancels()

    def on_transfer(self, event: TransferEvent) -> StepOutput:
        """A rank has reported the end of its part of a transfer."""
        return self._finish_failed(self._handoffs.on_event(event, self._clock()))

    def take_copies(self) -> list[tuple[str, CopyCommand]]:
        """(instance_id, command): to be sent to every rank of the instance, in order, since the last take."""
        return [
            (instance_id, command)
            for instance_id, instance in self._instances.items()
            if instance_id not in self._failures
            for command in instance.tiers.take_commands()
        ]

    def on_copy(self, event: CopyEvent) -> StepOutput:
        """A rank has ended its part of a copy from or to a tier."""
        if event.instance_id in self._failures:
            return StepOutput()
        tiers = self._instances[event.instance_id].tiers
        return StepOutput(finished=self._end_loads(tiers.on_event(event, self._clock())))

    def tick(self) -> StepOutput:
        """Apply leases and deadlines. To be called at least every 100 ms."""
        now_s = self._clock()
        output = self._finish_failed(self._handoffs.expire(now_s))
        ended = [self._end_loads(instance.tiers.expire(now_s)) for instance in self._instances.values()]
        return StepOutput(finished=output.finished + tuple(itertools.chain(*ended)))

    def fail_instance(self, instance_id: str, reason: str) -> StepOutput:
        """Give an instance up: its requests end with ERROR, but for prompts that a decode instance can take over."""
        if instance_id in self._failures:
            return StepOutput()
        self._failures[instance_id] = reason
        instance = self._instances[instance_id]
        message = f"instance {instance_id} failed: {reason}"
        output = self._finish_failed(self._handoffs.lose(instance, message))
        targeted = self._handoffs.handles_bound_for(instance)
        doomed = [
            ticket for ticket in self._tickets.values() if _is_on(ticket, instance_id) or ticket.handle in targeted
        ]
        for ticket in doomed:
            self._leave(ticket)
        instance.kv.take_copies()  # no step will do them: what they hold goes back
        instance.tiers.close()
        errors = tuple(self._finish(ticket, FinishReason.ERROR, message=message) for ticket in doomed)
        return StepOutput(finished=output.finished + errors)

    def instance_gone(self, instance_id: str) -> None:
        """No process of a failed instance is left, so that nothing new is on its way from it."""
        self._handoffs.gone(self._instances[instance_id], self._clock())

    # reports

    def load(self, instance_id: str) -> InstanceLoad:
        """How busy an instance is, for the router."""
        return reports.load(self._instances[instance_id], is_failed=instance_id in self._failures)

    def status(self) -> dict[str, Any]:
        """Everything worth showing, as plain ints and strings."""
        return {
            "num_unfinished": self.num_unfinished,
            "instances": [reports.status(one, self._failures.get(one.instance_id)) for one in self._instances.values()],
            "handoffs": reports.count_handoffs(self._handoffs.all()),
        }

    def check_integrity(self) -> None:
        """Prove that ledgers, rows, queues and hand-offs agree. Raises LedgerCorrupted. Cost: O(pools + rows)."""
        for instance in self._instances.values():
            audit.check_instance(instance)
        audit.check_tickets(self._tickets.values(), self._instances)
        audit.check_handoffs(self._handoffs.all())

    # steps of the above

    def _live(self, request: Request, instance_id: str) -> Instance:
        reason = self._failures.get(instance_id)
        if reason is not None:
            raise RequestRejected(request.request_id, f"instance {instance_id} has failed: {reason}; retry elsewhere")
        instance = self._instances.get(instance_id)
        if instance is None:
            known = ", ".join(self._instances)
            raise ValueError(f"instance {instance_id!r} is unknown; route to one of {known}")
        return instance

    def _check(self, request: Request, source: Instance, target: Instance) -> None:
        if request.handle in self._tickets:
            raise RequestRejected(request.request_id, f"handle {request.handle} is in use; choose another")
        if source is not target and not self._can_ferry:
            raise ValueError(f"no connector joins {source.instance_id} and {target.instance_id}; route to one instance")
        admission.check_encoder_input(request, max_num_encoder_tokens=source.kv.max_num_encoder_tokens)
        admission.check_lengths(request, max_model_len=_max_model_len(source, target))
        num_prompt_tokens = len(request.prompt_token_ids)
        admission.check_fits_pool(request, source.kv, num_tokens=num_prompt_tokens, instance_id=source.instance_id)
        num_stored = max(num_prompt_tokens, _limit(request, source, target) - 1)
        admission.check_fits_pool(request, target.kv, num_tokens=num_stored, instance_id=target.instance_id)
        admission.check_queue(
            request,
            num_waiting=len(source.queue),
            max_queue_len=source.config.max_queue_len,
            instance_id=source.instance_id,
        )

    def _open_ticket(self, request: Request, route: Route, source: Instance) -> Ticket:
        priority = 0 if source.config.policy == FCFS else request.priority
        rank = Rank(priority=priority, arrival_s=request.arrival_s, order=self._num_added)
        self._num_added += 1
        ticket = Ticket(request=request, sampling=resolve_seed(request.sampling), route=route, rank=rank)
        self._tickets[request.handle] = ticket
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        """Take an unfinished request off whatever holds it."""
        if self._handoffs.close(ticket):
            return
        assert ticket.sequence is not None, ticket.handle
        self._instances[ticket.sequence.instance_id].drop(ticket.sequence)

    def _finish(
        self, ticket: Ticket, reason: FinishReason, *, stop_token_id: int | None = None, message: str = ""
    ) -> Finished:
        del self._tickets[ticket.handle]
        return Finished(
            handle=ticket.handle,
            reason=reason,
            stop_token_id=stop_token_id,
            stats=ticket.stats(self._clock()),
            message=message,
        )

    def _finish_ended(self, ended: Ended) -> Finished:
        ticket = ended.sequence.ticket
        self._handoffs.close(ticket)
        return self._finish(ticket, ended.reason, stop_token_id=ended.stop_token_id)

    def _end_loads(self, ended: LoadsEnded) -> tuple[Finished, ...]:
        for sequence in ended.restarted:
            if sequence.is_ferried:
                self._handoffs.withdraw(sequence)
        for one in ended.failed:
            self._leave(one.sequence.ticket)
        return tuple(self._finish(one.sequence.ticket, FinishReason.ERROR, message=one.message) for one in ended.failed)

    def _finish_failed(self, failed: list[HandoffFailed]) -> StepOutput:
        return StepOutput(
            finished=tuple(self._finish(one.ticket, FinishReason.ERROR, message=one.message) for one in failed)
        )


def _max_model_len(source: Instance, target: Instance) -> int:
    return min(source.rows.max_model_len, target.rows.max_model_len)


def _limit(request: Request, source: Instance, target: Instance) -> int:
    return admission.token_limit(request, max_model_len=_max_model_len(source, target))


def _sequence(ticket: Ticket, instance: Instance, *, limit: int, lane: str) -> Sequence:
    request = ticket.request
    return Sequence(
        ticket=ticket,
        instance_id=instance.instance_id,
        limit=limit,
        lane=lane,
        token_ids=request.prompt_token_ids,
        hashes=instance.kv.hash_prompt(
            request.prompt_token_ids,
            cache_salt=request.cache_salt,
            extra_keys=encoder_key(request.encoder_token_ids),
        ),
    )


def _is_on(ticket: Ticket, instance_id: str) -> bool:
    return ticket.sequence is not None and ticket.sequence.instance_id == instance_id
