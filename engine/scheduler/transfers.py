"""Every hand-off of the deployment, from add to the last byte that may land. handoff.py draws the states.

Owns the hand-offs; issues TransferCommands through the connector and follows their outcomes. Moves no bytes,
and ends no request itself: requests that fail are returned. ferried.py says what of a prompt travels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blockferry.connectors.base import TransferCommand, TransferEvent, TransferState
from blockferry.connectors.pd_scheduler import PdScheduler, TransferOutcome
from blockferry.engine.scheduler.ferried import ferried_parts
from blockferry.engine.scheduler.handoff import Handoff, HandoffFailed, HandoffState, LoadFailurePolicy
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.sequence import LOCAL_LANE, Sequence, Ticket


class Handoffs:
    """The hand-offs of all requests. Called by CentralScheduler's thread; StepScheduler's gate."""

    def __init__(
        self, connector: PdScheduler, *, lease_s: float, transfer_timeout_s: float, policy: LoadFailurePolicy
    ) -> None:
        self._connector = connector
        self._lease_s = lease_s
        self._transfer_timeout_s = transfer_timeout_s
        self._policy = policy
        self._by_handle: dict[int, Handoff] = {}  # of requests that still depend on it
        self._fenced: list[Handoff] = []  # those that launch() looks at
        self._moving: dict[int, Handoff] = {}  # FERRYING and QUIESCING, by transfer_id
        self._commands: list[TransferCommand] = []
        self._cancels: list[tuple[str, int]] = []

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
        """The sequence was preempted on P: its D blocks go back until it is admitted again (HandoffGate)."""
        handoff = self._in_state(sequence, HandoffState.RESERVED)
        handoff.target.drop(handoff.target_sequence)
        handoff.state = HandoffState.WAITING

    def prompt_ready(self, sequence: Sequence, now_s: float) -> None:
        """P's last chunk has retired and the first token is known."""
        handoff = self._in_state(sequence, HandoffState.RESERVED)
        handoff.first_token_id = int(handoff.source.rows.tokens(handoff.source_row)[-1])
        handoff.lease_ends_s = now_s + self._lease_s
        handoff.state = HandoffState.FENCED
        self._fenced.append(handoff)

    # the transfer

    def launch(self, now_s: float) -> None:
        """Issue the commands of hand-offs whose fence has passed."""
        still_fenced = []
        for handoff in self._fenced:
            if self._by_handle.get(handoff.ticket.handle) is not handoff:
                continue  # it ended at the fence
            if handoff.target.retired_step >= handoff.fence_step:
                self._start(handoff, now_s)
            else:
                still_fenced.append(handoff)
        self._fenced = still_fenced

    def take_commands(self) -> list[tuple[str, TransferCommand]]:
        """(instance_id, command) to send to every rank of the instance, since the last take."""
        commands, self._commands = self._commands, []
        return [(command.executing_instance_id, command) for command in commands]

    def take_cancels(self) -> list[tuple[str, int]]:
        """(instance_id, transfer_id) that every rank of the instance should give up, since the last take."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def on_event(self, event: TransferEvent, now_s: float) -> list[HandoffFailed]:
        """A rank has reported; after the last one the hand-off is delivered, failed or gone."""
        outcome = self._connector.on_event(event, now_s=now_s)
        handoff = None if outcome is None else self._moving.get(outcome.transfer_id)
        if outcome is None or handoff is None:
            return []
        if not outcome.is_quiesced:
            # a dropped connection may still hold bytes of it: only time makes its blocks safe
            return [] if handoff.state is HandoffState.QUIESCING else self._abandon(handoff, _reason(outcome))
        del self._moving[outcome.transfer_id]
        if handoff.state is HandoffState.QUIESCING:
            handoff.give_back()
            return []
        handoff.ticket.transfer_s = outcome.elapsed_s
        handoff.ticket.transfer_bytes = outcome.num_bytes
        if outcome.state is TransferState.DONE:
            self._deliver(handoff)
            return []
        return self._fail(handoff, _reason(outcome))

    def expire(self, now_s: float) -> list[HandoffFailed]:
        """Apply leases and deadlines; to be called often against both durations."""
        failed: list[HandoffFailed] = []
        for outcome in self._connector.expire(now_s=now_s):
            handoff = self._moving.get(outcome.transfer_id)
            if handoff is not None and handoff.state is HandoffState.FERRYING:
                failed += self._abandon(handoff, _reason(outcome))
        for handoff in self._select(lambda one: now_s >= one.lease_ends_s):
            reason = f"its lease of {self._lease_s:g} s is over"
            if handoff.state is HandoffState.FENCED:
                failed += self._fail(handoff, reason)
            elif handoff.state is HandoffState.FERRYING:
                failed += self._abandon(handoff, reason)
        self._bury(now_s)
        return failed

    # endings from outside

    def close(self, ticket: Ticket) -> bool:
        """The request has ended or is aborted. False when it depends on no hand-off (any more).

        What no byte can reach is given back at once, the rest when the transfer has quiesced.
        """
        handoff = self._by_handle.pop(ticket.handle, None)
        if handoff is None:
            return False
        if handoff.state is HandoffState.FERRYING:
            ticket.num_output_tokens = 1
            self._quiesce(handoff)
        else:
            handoff.give_back()
        return True

    def lose_source(self, instance: Instance, reason: str) -> list[HandoffFailed]:
        """A prefill instance failed: prompts that it had computed follow the policy, others stay the caller's."""
        failed: list[HandoffFailed] = []
        for handoff in self._select(lambda one: one.source is instance):
            if handoff.state is HandoffState.FENCED:
                failed += self._fail(handoff, reason)
            elif handoff.state is HandoffState.FERRYING:
                failed += self._abandon(handoff, reason)
        return failed

    def handles_bound_for(self, instance: Instance) -> set[int]:
        """Handles of unfinished requests that wait to be handed over to an instance."""
        return {handle for handle, handoff in self._by_handle.items() if handoff.target is instance}

    def all(self) -> list[Handoff]:
        """Hand-offs of unfinished requests, and those that still quiesce."""
        quiescing = [one for one in self._moving.values() if one.state is HandoffState.QUIESCING]
        return [*self._by_handle.values(), *quiescing]

    # transitions

    def _start(self, handoff: Handoff, now_s: float) -> None:
        handoff.parts = ferried_parts(handoff)
        command = self._connector.begin(
            handoff.parts,
            src_instance_id=handoff.source.instance_id,
            dst_instance_id=handoff.target.instance_id,
            now_s=now_s,
        )
        handoff.transfer_id = command.transfer_id
        handoff.state = HandoffState.FERRYING
        self._moving[command.transfer_id] = handoff
        self._commands.append(command)

    def _deliver(self, handoff: Handoff) -> None:
        assert handoff.first_token_id is not None, handoff.state
        handoff.ticket.transfer_blocks = handoff.num_blocks
        del self._by_handle[handoff.ticket.handle]
        handoff.source.drop(handoff.source_sequence)
        handoff.target.activate(handoff.target_sequence, handoff.first_token_id)
        handoff.ticket.sequence = handoff.target_sequence

    def _fail(self, handoff: Handoff, reason: str) -> list[HandoffFailed]:
        """No byte will land any more, and not all of them have."""
        del self._by_handle[handoff.ticket.handle]
        handoff.give_back()
        return self._go_on_without(handoff, reason)

    def _abandon(self, handoff: Handoff, reason: str) -> list[HandoffFailed]:
        """Let the request go on without blocks that a byte may still reach."""
        del self._by_handle[handoff.ticket.handle]
        self._quiesce(handoff)
        return self._go_on_without(handoff, reason)

    def _go_on_without(self, handoff: Handoff, reason: str) -> list[HandoffFailed]:
        """End the request or, by policy, let it wait on D to be computed there."""
        assert handoff.first_token_id is not None, handoff.state
        ticket = handoff.ticket
        ticket.num_output_tokens = 1
        if self._policy is LoadFailurePolicy.FAIL:
            return [HandoffFailed(ticket=ticket, message=handoff.describe_failure(reason))]
        ticket.sequence = Sequence(
            ticket=ticket,
            instance_id=handoff.target.instance_id,
            limit=handoff.target_sequence.limit,
            lane=LOCAL_LANE,
            token_ids=np.append(ticket.request.prompt_token_ids, np.int32(handoff.first_token_id)),
            hashes=handoff.target_sequence.hashes,
        )
        handoff.target.queue.push(ticket.sequence)
        return []

    def _quiesce(self, handoff: Handoff) -> None:
        assert handoff.transfer_id is not None, handoff.state
        handoff.state = HandoffState.QUIESCING
        command = self._connector.command(handoff.transfer_id)
        if command is not None:
            self._cancels.append((command.executing_instance_id, handoff.transfer_id))

    def _bury(self, now_s: float) -> None:
        """Take back what quiescing hand-offs hold when lease and one timeout are over: nobody moves it any more."""
        for transfer_id, handoff in list(self._moving.items()):
            is_over = now_s >= handoff.lease_ends_s + self._transfer_timeout_s
            if handoff.state is HandoffState.QUIESCING and is_over:
                del self._moving[transfer_id]
                handoff.give_back()

    def _select(self, condition: Callable[[Handoff], bool]) -> list[Handoff]:
        """Hand-offs of unfinished requests whose prompt is computed and that meet a condition."""
        states = (HandoffState.FENCED, HandoffState.FERRYING)
        return [one for one in self._by_handle.values() if one.state in states and condition(one)]

    def _in_state(self, sequence: Sequence, state: HandoffState) -> Handoff:
        handoff = self._by_handle[sequence.ticket.handle]
        assert handoff.state is state, (handoff.ticket.handle, handoff.state, state)
        return handoff


def _reason(outcome: TransferOutcome) -> str:
    return outcome.reason or f"the transfer was {outcome.state}"
