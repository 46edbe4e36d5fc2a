"""Every hand-off of the deployment, from add to the last byte that may land. handoff.py draws the states.

Owns the hand-offs; issues TransferCommands through the connector and follows their outcomes. Moves no bytes,
and ends no request itself: requests that fail are returned. ferried.py says what of a prompt travels.

When a piece of a prompt may travel (P's steps; the fence on D apart):

    overlap layers   once P's step that computes it is planned; ranks move each layer when they have computed it
    overlap chunks   once that step has retired
    overlap none     once all of the prompt is computed
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from blockferry.connectors.base import Overlap, TransferCommand, TransferEvent, TransferMode, TransferState
from blockferry.connectors.pd_scheduler import PdScheduler, TransferOutcome
from blockferry.engine.scheduler.ferried import Piece, ferried_parts, part_bytes, piece_of, whole_bytes
from blockferry.engine.scheduler.handoff import (
    ComputedTo,
    Handoff,
    HandoffFailed,
    HandoffOptions,
    HandoffState,
    LoadFailurePolicy,
)
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.sequence import LOCAL_LANE, Sequence, Ticket


class Handoffs:
    """The hand-offs of all requests. Called by CentralScheduler's thread; StepScheduler's gate."""

    def __init__(self, connector: PdScheduler, options: HandoffOptions) -> None:
        self._connector = connector
        self._options = options
        self._by_handle: dict[int, Handoff] = {}  # of requests that still depend on it
        self._sending: list[Handoff] = []  # those that launch() looks at
        self._quiescing: list[Handoff] = []
        self._moving: dict[int, Handoff] = {}  # by transfer_id, of any state, until no byte can land any more
        self._lost: set[str] = set()  # failed instances
        self._gone_s: dict[str, float] = {}  # when the last process of a failed instance had ended
        self._commands: list[TransferCommand] = []
        self._cancels: list[tuple[str, int]] = []

    # instances

    def add_instance(self, instance: Instance) -> None:
        """Sequences may come from and go to an instance."""
        self._connector.add_instance(instance.instance_id, num_ranks=instance.num_ranks)

    def forget_instance(self, instance: Instance) -> None:
        """An instance that no hand-off involves has left."""
        assert not self.involve(instance), instance.instance_id
        instance_id = instance.instance_id
        # nobody is left to obey them, and nothing of what they name is under way
        self._commands = [one for one in self._commands if one.executing_instance_id != instance_id]
        self._cancels = [one for one in self._cancels if one[0] != instance_id]
        self._lost.discard(instance_id)
        self._gone_s.pop(instance_id, None)
        self._connector.remove_instance(instance_id)

    # from add to the computed prompt

    def open(self, handoff: Handoff) -> None:
        """Take charge of a new request that will be handed over."""
        self._by_handle[handoff.ticket.handle] = handoff

    def reserve(self, sequence: Sequence) -> bool:
        """Allocate the decode side; False when D has no room now (HandoffGate)."""
        handoff = self._in_state(sequence, HandoffState.WAITING)
        if not handoff.target.reserve(handoff.target_sequence):
            return False
        handoff.fence_step = handoff.target.fence_step
        handoff.state = HandoffState.RESERVED
        return True

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence was preempted on P: D's blocks go back, and are taken anew with its next admission."""
        handoff = self._in_state(sequence, HandoffState.RESERVED)
        self._by_handle[handoff.ticket.handle] = handoff.renewed()
        self._release_target(handoff)

    def computes(self, sequence: Sequence, computed_to: ComputedTo) -> None:
        """A step of P that computes a chunk of the prompt is planned (HandoffGate)."""
        handoff = self._in_state(sequence, HandoffState.RESERVED)
        if self._options.overlap is not Overlap.NONE:
            handoff.planned.append(computed_to)
            self._send_soon(handoff)

    def prompt_ready(self, sequence: Sequence, now_s: float) -> list[HandoffFailed]:
        """P's last chunk has retired and the first token is known."""
        handoff = self._in_state(sequence, HandoffState.RESERVED)
        handoff.first_token_id = int(handoff.source.rows.tokens(handoff.source_row)[-1])
        handoff.draft_token_ids = handoff.source.speculation.proposed(handoff.source_row)
        handoff.ready_s = now_s
        handoff.lease_ends_s = now_s + self._options.lease_s
        handoff.state = HandoffState.FERRYING
        if handoff.failure:
            return self._give_up(handoff, handoff.failure)
        if not handoff.planned and handoff.num_sent < handoff.ticket.num_given_tokens:
            handoff.planned.append(ComputedTo(handoff.source.retired_step, handoff.ticket.num_given_tokens))
        self._send_soon(handoff)
        return []

    # transfers

    def launch(self, now_s: float) -> None:
        """Issue the commands of what may travel by now, and deliver what needs none (any more)."""
        sending, self._sending = self._sending, []
        for handoff in sending:
            is_current = self._by_handle.get(handoff.ticket.handle) is handoff
            if not is_current or handoff.failure:
                continue
            if handoff.is_passable:
                self._send(handoff, now_s)
            if handoff.planned:
                self._sending.append(handoff)
            else:
                self._deliver_if_complete(handoff, now_s)

    def take_commands(self) -> list[tuple[str, TransferCommand]]:
        """(instance_id, command) to send to every rank of the instance, since the last take."""
        commands, self._commands = self._commands, []
        return [(command.executing_instance_id, command) for command in commands]

    def take_cancels(self) -> list[tuple[str, int]]:
        """(instance_id, transfer_id) that every rank of the instance should give up, since the last take."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def on_event(self, event: TransferEvent, now_s: float) -> list[HandoffFailed]:
        """A rank has reported; after the last one of the last transfer the hand-off is delivered, failed or gone."""
        outcome = self._connector.on_event(event, now_s=now_s)
        return [] if outcome is None else self._conclude(outcome, now_s)

    def expire(self, now_s: float) -> list[HandoffFailed]:
        """Apply leases and deadlines; to be called often against both durations."""
        failed: list[HandoffFailed] = []
        for outcome in self._connector.expire(now_s=now_s):
            failed += self._conclude(outcome, now_s)
        for handoff in self._ferrying(lambda one: now_s >= one.lease_ends_s):
            failed += self._give_up(handoff, f"its lease of {self._options.lease_s:g} s is over")
        self._bury(now_s)
        return failed

    # endings from outside

    def close(self, ticket: Ticket) -> bool:
        """The request has ended or is aborted. False when it depends on no hand-off (any more).

        What no byte can reach is given back at once, the rest when the transfers have quiesced.
        """
        handoff = self._by_handle.pop(ticket.handle, None)
        if handoff is None:
            return False
        if handoff.state is HandoffState.FERRYING:
            ticket.num_output_tokens = len(ticket.request.output_token_ids) + 1
        handoff.source.drop(handoff.source_sequence)
        self._release_target(handoff)
        return True

    def lose(self, instance: Instance) -> None:
        """An instance failed: nobody uses its blocks any more."""
        self._lost.add(instance.instance_id)
        for handoff in list(self._quiescing):
            self._release_if_quiet(handoff)

    def take_over(self, instance: Instance, reason: str) -> list[HandoffFailed]:
        """Of an instance that failed or leaves, prompts that it has computed for others follow the policy.

        The others stay the caller's.
        """
        failed: list[HandoffFailed] = []
        for handoff in self._ferrying(lambda one: one.source is instance):
            failed += self._give_up(handoff, reason)
        return failed

    def gone(self, instance: Instance, now_s: float) -> None:
        """No process of a failed instance is left: what it had posted is all that may still land."""
        self._gone_s[instance.instance_id] = now_s

    def involve(self, instance: Instance) -> bool:
        """Whether any hand-off comes from or goes to an instance, or bytes of one may still land."""
        return any(instance in (handoff.source, handoff.target) for handoff in self.all())

    def handles_bound_for(self, instance: Instance) -> set[int]:
        """Handles of unfinished requests that wait to be handed over to an instance."""
        return {handle for handle, handoff in self._by_handle.items() if handoff.target is instance}

    def all(self) -> list[Handoff]:
        """Hand-offs of unfinished requests, and those that still quiesce."""
        return [*self._by_handle.values(), *self._quiescing]

    # transitions

    def _send_soon(self, handoff: Handoff) -> None:
        if handoff not in self._sending:
            self._sending.append(handoff)

    def _send(self, handoff: Handoff, now_s: float) -> None:
        """Issue the next piece, as far as P's steps are planned or retired."""
        last_step = handoff.source.retired_step
        if self._options.overlap is Overlap.LAYERS:
            last_step = handoff.source.last_step
        computed_to: ComputedTo | None = None
        while handoff.planned and handoff.planned[0].step_id <= last_step:
            computed_to = handoff.planned.popleft()
        if computed_to is None:
            return
        piece = piece_of(handoff, computed_to.num_tokens)
        if piece.stop > piece.start:
            is_computed = computed_to.step_id <= handoff.source.retired_step
            self._begin(handoff, piece, now_s, after_step=None if is_computed else computed_to.step_id)

    def _begin(self, handoff: Handoff, piece: Piece, now_s: float, *, after_step: int | None) -> None:
        parts = ferried_parts(handoff, piece)
        handoff.num_sent = piece.stop
        if not parts:
            return
        command = self._connector.begin(
            parts,
            src_instance_id=handoff.source.instance_id,
            dst_instance_id=handoff.target.instance_id,
            now_s=now_s,
            after_step=after_step,
        )
        handoff.under_way[command.transfer_id] = parts
        handoff.num_blocks += sum({part.dst_group: len(part.dst_block_ids) for part in parts}.values())
        handoff.weight += sum(part_bytes(handoff, part) for part in parts)
        handoff.lease_ends_s = max(handoff.lease_ends_s, now_s + self._options.lease_s)
        self._moving[command.transfer_id] = handoff
        self._commands.append(command)

    def _conclude(self, outcome: TransferOutcome, now_s: float) -> list[HandoffFailed]:
        """A transfer has ended, in whatever state its hand-off is."""
        handoff = self._moving.get(outcome.transfer_id)
        if handoff is None:
            return []
        is_known = handoff.under_way.pop(outcome.transfer_id, None) is None
        if outcome.is_quiesced:
            handoff.late.pop(outcome.transfer_id, None)
            del self._moving[outcome.transfer_id]
        else:
            handoff.late[outcome.transfer_id] = math.inf if outcome.is_watched else now_s + self._options.hold_s
        if not is_known:
            handoff.num_bytes += outcome.num_bytes
        if handoff.state is HandoffState.QUIESCING:
            self._release_if_quiet(handoff)
            return []
        if outcome.state is not TransferState.DONE and not is_known:
            return self._break(handoff, outcome.reason or f"the transfer was {outcome.state}")
        self._deliver_if_complete(handoff, now_s)
        return []

    def _break(self, handoff: Handoff, reason: str) -> list[HandoffFailed]:
        """Not all of the prompt will arrive."""
        if handoff.state is HandoffState.FERRYING:
            return self._give_up(handoff, reason)
        if not handoff.failure:
            handoff.failure = reason
            self._cancel(handoff)
        return []

    def _deliver_if_complete(self, handoff: Handoff, now_s: float) -> None:
        if handoff.state is not HandoffState.FERRYING or not handoff.is_complete:
            return
        assert handoff.first_token_id is not None, handoff.state
        ticket = handoff.ticket
        ticket.transfer_s = now_s - handoff.ready_s
        ticket.transfer_bytes, ticket.transfer_blocks = handoff.num_bytes, handoff.num_blocks
        if handoff.weight:
            ticket.transfer_saved_bytes = round(handoff.num_bytes * (whole_bytes(handoff) / handoff.weight - 1.0))
        del self._by_handle[ticket.handle]
        handoff.source.drop(handoff.source_sequence)
        handoff.target.activate(handoff.target_sequence, handoff.first_token_id, handoff.draft_token_ids)
        ticket.sequence = handoff.target_sequence

    def _give_up(self, handoff: Handoff, reason: str) -> list[HandoffFailed]:
        """Go on without the blocks: end the request or, by policy, let it wait on D to be computed there."""
        assert handoff.first_token_id is not None, handoff.state
        ticket = handoff.ticket
        del self._by_handle[ticket.handle]
        handoff.source.drop(handoff.source_sequence)
        self._release_target(handoff)
        ticket.num_output_tokens = len(ticket.request.output_token_ids) + 1
        if self._options.load_failure_policy is LoadFailurePolicy.FAIL:
            return [HandoffFailed(ticket=ticket, message=handoff.describe_failure(reason))]
        ticket.sequence = Sequence(
            ticket=ticket,
            instance_id=handoff.target.instance_id,
            limit=handoff.target_sequence.limit,
            lane=LOCAL_LANE,
            token_ids=np.append(ticket.request.given_token_ids, np.int32(handoff.first_token_id)),
            hashes=handoff.target_sequence.hashes,
        )
        handoff.target.queue.push(ticket.sequence)
        return []

    def _release_target(self, handoff: Handoff) -> None:
        """Give D's blocks back, at once or when no byte can land in them any more. The hand-off has left."""
        handoff.state = HandoffState.QUIESCING
        self._quiescing.append(handoff)
        self._cancel(handoff)
        self._release_if_quiet(handoff)

    def _cancel(self, handoff: Handoff) -> None:
        for transfer_id in (*handoff.under_way, *handoff.late):
            command = self._connector.command(transfer_id)
            if command is not None:
                self._cancels.append((command.executing_instance_id, transfer_id))

    def _release_if_quiet(self, handoff: Handoff) -> None:
        is_quiet = not handoff.under_way and not handoff.late
        if is_quiet or handoff.target.instance_id in self._lost:  # nobody uses a lost instance's blocks
            self._release(handoff)

    def _release(self, handoff: Handoff) -> None:
        self._quiescing.remove(handoff)
        for transfer_id in (*handoff.under_way, *handoff.late):
            del self._moving[transfer_id]
            self._connector.forget(transfer_id)
        handoff.target.drop(handoff.target_sequence)

    def _bury(self, now_s: float) -> None:
        """Take back what quiescing hand-offs hold where nobody is left to say that no byte can land."""
        for handoff in list(self._quiescing):
            if now_s >= self._safe_s(handoff):
                self._release(handoff)

    def _safe_s(self, handoff: Handoff) -> float:
        """When no byte of a hand-off's transfers can land any more; infinite while somebody may tell, or may move."""
        executing = handoff.target if self._connector.mode is TransferMode.PULL else handoff.source
        gone_s = self._gone_s.get(executing.instance_id, math.inf) + self._options.hold_s
        return max(
            [*(gone_s for _ in handoff.under_way), *(min(safe_s, gone_s) for safe_s in handoff.late.values())],
            default=0.0,
        )

    def _ferrying(self, condition: Callable[[Handoff], bool]) -> list[Handoff]:
        """Hand-offs of unfinished requests whose prompt is computed and that meet a condition."""
        return [one for one in self._by_handle.values() if one.state is HandoffState.FERRYING and condition(one)]

    def _in_state(self, sequence: Sequence, state: HandoffState) -> Handoff:
        handoff = self._by_handle[sequence.ticket.handle]
        assert handoff.state is state, (handoff.ticket.handle, handoff.state, state)
        return handoff
