"""CentralScheduler: every instance's scheduler and every hand-off between them, behind one object.

Owns the tickets of unfinished requests. One thread calls it. Knows no sockets, no Ray and no text.

    add(request, route)      -> checks, queue of the prefill instance       abort(handle), fail_instance(...)
    plan(P) / plan(D)        -> StepPlan, or None                                  |
    commit(P|D, result)      -> tokens and ends, StepOutput  <---------------------+
    take_transfers()         -> commands for the ranks that move blocks
    on_transfer(event), tick() -> hand-offs go on, fail or expire, StepOutput
    take_copies(), on_copy(event) -> the same for what instances keep in tiers outside of their pools
    add_instance, drain, remove_instance -> instances come and go, see membership.py
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from blockferry.connectors.base import TransferCommand, TransferEvent, TransferMode
from blockferry.connectors.offload_base import CopyCommand, CopyEvent
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.errors import RequestRejected
from blockferry.engine.request import FinishReason, Request
from blockferry.engine.scheduler import audit, reports
from blockferry.engine.scheduler.acceptance import check_route, token_limit
from blockferry.engine.scheduler.ferried import check_ferriable
from blockferry.engine.scheduler.handoff import Handoff, HandoffFailed, HandoffOptions
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.membership import FCFS, Member, Membership, MemberState
from blockferry.engine.scheduler.newcomer import Newcomer
from blockferry.engine.scheduler.offload_seam import LoadsEnded
from blockferry.engine.scheduler.outputs import Finished, InstanceLoad, Route, StepOutput
from blockferry.engine.scheduler.sequence import LOCAL_LANE, Rank, Sequence, Ticket, resolve_seed
from blockferry.engine.scheduler.transfers import Handoffs
from blockferry.engine.scheduler.update import Ended, apply_result
from blockferry.engine.wire import StepPlan, StepResult


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

        Raises what add_instance() raises.
        """
        self.members = Membership()  # changed here only; for others to read
        self._can_ferry = connector is not None
        handoffs = handoffs or HandoffOptions()
        self._handoffs = Handoffs(
            connector or PdScheduler(mode=TransferMode.PUSH, transfer_timeout_s=handoffs.transfer_timeout_s), handoffs
        )
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._num_added = 0
        self._removed: list[str] = []
        for instance in instances:
            self.add_instance(instance)

    # instances

    def add_instance(self, instance: Instance) -> None:
        """Take an instance in; it may be routed to at once.

        Raises ValueError for an id that this deployment has or had, or an unknown order of requests; ConfigError where
        sequences are ferried and its layers differ from the others' or cannot be ferried.
        """
        self.members.check_new(instance)
        if self._can_ferry:
            check_ferriable(instance, self.members.instances.values())
        self.members.add(instance)
        self._handoffs.add_instance(instance)

    def drain(self, instance_id: str, deadline_s: float) -> None:
        """Accept nothing for an instance any more; what is still there in deadline_s seconds ends as resumable.

        Told again, the new deadline counts. Raises ValueError for an unknown instance or a negative time.
        """
        if deadline_s < 0:
            raise ValueError(f"deadline_s={deadline_s} is negative; use 0 to end at once what runs there")
        self.members.drain(self.members.find(instance_id), drain_s=deadline_s, now_s=self._clock())

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance that is drained, or that has failed and of which no byte can be on its way any more.

        A failed one is forgotten by a later tick(), if it must be waited for: until then it is listed, and blocks of
        others that its processes may still write are held. take_removed() says when it is forgotten. Raises ValueError
        with its state while it is neither drained nor failed, LedgerCorrupted when it kept something.
        """
        self.members.ask_to_leave(self.members.find(instance_id))
        self._let_go()

    def take_removed(self) -> list[str]:
        """Ids of instances that were forgotten since the last take."""
        removed, self._removed = self._removed, []
        return removed

    # requests

    @property
    def num_unfinished(self) -> int:
        """Accepted requests whose Finished has not been returned."""
        return len(self._tickets)

    def meet(self, request: Request) -> Newcomer:
        """What the router may ask of a request that is about to be added; changes nothing."""
        return Newcomer(request, self.members.instances)

    def add(self, request: Request, route: Route, newcomer: Newcomer | None = None) -> None:
        """Accept a request. Raises RequestRejected when it could never run (QueueFull: not now).

        `newcomer` is what meet() gave for it, whose hashes are used again.
        """
        newcomer = newcomer or self.meet(request)
        source, target = (self.members.serving(one, request) for one in (route.prefill, route.decode))
        self._check(request, source, target)
        limit = token_limit(request, source, target)
        prefill_limit = request.num_given_tokens + 1
        is_ferried = source is not target and limit > prefill_limit
        ticket = self._open_ticket(request, route, source)
        sequence = _sequence(
            ticket,
            source,
            newcomer,
            limit=prefill_limit if is_ferried else limit,
            lane=target.instance_id if is_ferried else LOCAL_LANE,
        )
        ticket.sequence = sequence
        if is_ferried:
            target_sequence = _sequence(ticket, target, newcomer, limit=limit, lane=LOCAL_LANE)
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
        member = self.members.find(instance_id)
        if member.state is MemberState.FAILED:
            return None
        now_s = self._clock()
        plan = member.stepper.schedule(now_s, self._handoffs)
        self._handoffs.launch(now_s)
        return plan

    def commit(self, instance_id: str, result: StepResult) -> StepOutput:
        """Apply the result of the instance's oldest step in flight; a failed step fails the instance.

        Raises ValueError for another step's result or one of the wrong length.
        """
        member = self.members.find(instance_id)
        if member.state is MemberState.FAILED:
            return StepOutput()
        if result.error:
            return self.fail_instance(instance_id, result.error)
        now_s = self._clock()
        update = apply_result(member.instance, result, now_s)
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
            (member.instance_id, command)
            for member in self.members
            if member.state is not MemberState.FAILED
            for command in member.instance.tiers.take_commands()
        ]

    def on_copy(self, event: CopyEvent) -> StepOutput:
        """A rank has ended its part of a copy from or to a tier."""
        member = self.members.find(event.instance_id)
        if member.state is MemberState.FAILED:
            return StepOutput()
        return StepOutput(finished=self._end_loads(member.instance.tiers.on_event(event, self._clock())))

    def tick(self) -> StepOutput:
        """Apply leases and deadlines, and let go of instances that leave. To be called at least every 100 ms."""
        now_s = self._clock()
        finished = self._finish_failed(self._handoffs.expire(now_s)).finished
        for member in self.members:
            finished += self._end_loads(member.instance.tiers.expire(now_s))
            if member.state is MemberState.DRAINING:
                finished += self._go_on_draining(member, now_s)
        self._let_go()
        return StepOutput(finished=finished)

    def fail_instance(self, instance_id: str, reason: str) -> StepOutput:
        """Give an instance up: its requests end as resumable, but for prompts that a decode instance can take over."""
        member = self.members.find(instance_id)
        if member.state is MemberState.FAILED:
            return StepOutput()
        self.members.fail(member, reason)
        instance = member.instance
        self._handoffs.lose(instance)
        finished = self._clear(instance, f"instance {instance_id} failed: {reason}")
        instance.kv.take_copies()  # no step will do them: what they hold goes back
        instance.tiers.close()
        return StepOutput(finished=finished)

    def instance_gone(self, instance_id: str) -> None:
        """No process of a failed instance is left, so that nothing new is on its way from it."""
        member = self.members.find(instance_id)
        member.is_gone = True
        self._handoffs.gone(member.instance, self._clock())

    # reports

    def load(self, instance_id: str) -> InstanceLoad:
        """How busy an instance is, for the router."""
        return reports.load(self.members.find(instance_id).instance)

    def status(self) -> dict[str, Any]:
        """Everything worth showing, as plain ints and strings."""
        return {
            "num_unfinished": self.num_unfinished,
            "instances": [reports.status(member) for member in self.members],
            "prefix_cache": reports.count_prefix_hits(self.members.instances.values()),
            "handoffs": reports.count_handoffs(self._handoffs.all()),
        }

    def check_integrity(self) -> None:
        """Prove that ledgers, rows, queues and hand-offs agree. Raises LedgerCorrupted. Cost: O(pools + rows)."""
        for member in self.members:
            audit.check_member(member)
        audit.check_tickets(self._tickets.values(), self.members.instances)
        audit.check_handoffs(self._handoffs.all(), self.members.instances)

    # steps of the above

    def _check(self, request: Request, source: Instance, target: Instance) -> None:
        if request.handle in self._tickets:
            raise RequestRejected(request.request_id, f"handle {request.handle} is in use; choose another")
        if source is not target and not self._can_ferry:
            raise ValueError(f"no connector joins {source.instance_id} and {target.instance_id}; route to one instance")
        check_route(request, source, target)

    def _open_ticket(self, request: Request, route: Route, source: Instance) -> Ticket:
        priority = 0 if source.config.policy == FCFS else request.priority
        rank = Rank(priority=priority, arrival_s=request.arrival_s, order=self._num_added)
        self._num_added += 1
        num_output_tokens = len(request.output_token_ids)
        ticket = Ticket(
            request=request,
            sampling=resolve_seed(request.sampling),
            route=route,
            rank=rank,
            num_output_tokens=num_output_tokens,
            # the prompt's had been delivered with the first token
            num_prompt_logprobs_sent=len(request.prompt_token_ids) - 1 if num_output_tokens else 0,
        )
        self._tickets[request.handle] = ticket
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        """Take an unfinished request off whatever holds it."""
        if self._handoffs.close(ticket):
            return
        assert ticket.sequence is not None, ticket.handle
        self.members.find(ticket.sequence.instance_id).instance.drop(ticket.sequence)

    def _go_on_draining(self, member: Member, now_s: float) -> tuple[Finished, ...]:
        """End what has outstayed a drain, and see whether anything is left."""
        finished: tuple[Finished, ...] = ()
        if now_s >= member.drain_ends_s:
            message = (
                f"instance {member.instance_id} is drained and the {member.drain_s:g} s for what ran there are over"
            )
            finished = self._clear(member.instance, message)
        if member.instance.is_idle and not self._handoffs.involve(member.instance):
            self.members.mark_drained(member)
        return finished

    def _clear(self, instance: Instance, message: str) -> tuple[Finished, ...]:
        """End as resumable all that depends on an instance, but for prompts that a decode instance can take over."""
        failed = [
            self._finish_resumable(one.ticket, one.message) for one in self._handoffs.take_over(instance, message)
        ]
        targeted = self._handoffs.handles_bound_for(instance)
        doomed = [
            ticket
            for ticket in self._tickets.values()
            if _is_on(ticket, instance.instance_id) or ticket.handle in targeted
        ]
        for ticket in doomed:
            self._leave(ticket)
        return (*failed, *(self._finish_resumable(ticket, message) for ticket in doomed))

    def _let_go(self) -> None:
        """Forget the instances that are to leave and that nothing reaches any more."""
        for member in [one for one in self.members if one.is_leaving]:
            is_quiet = member.state is MemberState.DRAINED or member.is_gone
            if not is_quiet or self._handoffs.involve(member.instance):
                continue
            audit.check_member(member)
            self._handoffs.forget_instance(member.instance)
            self.members.forget(member)
            self._removed.append(member.instance_id)

    def _finish_resumable(self, ticket: Ticket, message: str) -> Finished:
        return dataclasses.replace(self._finish(ticket, FinishReason.ERROR, message=message), is_resumable=True)

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


def _sequence(ticket: Ticket, instance: Instance, newcomer: Newcomer, *, limit: int, lane: str) -> Sequence:
    return Sequence(
        ticket=ticket,
        instance_id=instance.instance_id,
        limit=limit,
        lane=lane,
        token_ids=newcomer.token_ids,
        hashes=newcomer.take_hashes(instance.kv),
        num_expected_tokens=newcomer.num_known_tokens(instance.instance_id),
    )


def _is_on(ticket: Ticket, instance_id: str) -> bool:
    return ticket.sequence is not None and ticket.sequence.instance_id == instance_id
