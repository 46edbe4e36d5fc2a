"""Transfers under way on one rank: posting, reaping, deadlines and the one event that ends each.

Used by the transfer thread only; never waits. Owned by PdWorker, which owns the links as well.

    start() -> POSTING ------- all batches landed -----------------------------> DONE
                  | cancel()                    -> QUIESCING -- flushed -------> CANCELLED
                  | error, deadline, bad blocks -> QUIESCING -- flushed -------> FAILED
                                                       | quiesce_timeout_s     ^
                                                       v                       |
                                          FAILED, not quiesced: LATE -- flushed, or (reads) the connection failed

LATE: a network or a frozen peer holds what was posted. The connection is left open for it alone, new transfers make a
new one. To close it instead would lose the knowledge of when the bytes have landed; and UCX aborts a process that
wakes and finds the connection gone on which it owes an answer.

Commands and reports may be lost, repeated or overtake each other. A transfer number is used once: a command that
comes again, or after its cancel, is dropped, or old bytes would land in blocks that have other owners by then. A
cancel is always answered by the one event, so that it is also the way to ask for a report that was lost.

A transfer with after_step moves what of the source's layers is computed, wave by wave: a batch waits for the last
layer that has bytes in it.

A transfer is cut into batches of batch_bytes, of which num_batches_in_flight are posted and not yet flushed per
peer, so that memory, cancellation and other transfers never wait for more than that. Of all transfers together
max_bytes_in_flight are, and half of it towards one peer, lest a frozen one take all; who posted last posts last.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from blockferry.connectors.base import (
    ConnectorError,
    CorruptedBytes,
    EventSink,
    PoolEndpoint,
    TransferCommand,
    TransferEvent,
    TransferMode,
    TransferState,
    TransportError,
)
from blockferry.connectors.compute_progress import ComputeProgress, StepMark
from blockferry.connectors.pd_links import Link, choose_shares, exactly, in_whole_blocks, make_batches
from blockferry.connectors.pd_parts import Budget, Part

logger = logging.getLogger(__name__)

NUM_ENDED_KEPT = 4096  # reports that can be asked for again


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """How much of a transfer may be under way, and how long its end may take."""

    batch_bytes: int = 32 << 20
    num_batches_in_flight: int = 2
    max_bytes_in_flight: int = 128 << 20  # of a rank; a single batch may be larger
    are_checked: bool = False  # whether both ends compare checksums of every batch that has landed
    num_layer_waves: int = 4  # of transfers that start while the source's layers compute
    quiesce_timeout_s: float = 2.0  # after a deadline: how long to wait for what was posted before the link is closed


@dataclasses.dataclass(slots=True, kw_only=True)
class _Transfer:
    """One transfer's progress."""

    command: TransferCommand
    started_s: float
    parts: list[Part] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    ending: TransferState | None = None  # quiescing, to be reported as this
    reason: str = ""
    quiesce_deadline_s: float = 0.0
    is_quiesced: bool = True

    def awaited(self, part: Part) -> StepMark | None:
        """The layer that a part's next batch waits for; None: no layer, or no batch is left."""
        if self.command.after_step is None or part.num_posted == len(part.batches):
            return None
        return StepMark(self.command.after_step, part.batches.last_layer_ids[part.num_posted])

    @property
    def deadline_s(self) -> float:
        return self.quiesce_deadline_s if self.ending else self.started_s + self.command.deadline_s

    @property
    def is_pending(self) -> bool:
        """Whether anything that was posted may still land, as far as is known."""
        return any(part.flushes for part in self.parts)

    def drop(self, part: Part) -> None:
        """Close a connection that failed; other transfers over it fail at their next poll."""
        has_posted = bool(part.flushes) or part.is_posting
        if has_posted and self.command.mode is TransferMode.PUSH and not part.peer.is_direct:
            self.is_quiesced = False
        part.forget()
        part.link.drop(part.peer)


class Transfers:
    """Every transfer of a rank that has not been reported. start() and cancel() once, advance() again and again."""

    def __init__(
        self,
        *,
        own: PoolEndpoint,
        rank: int,
        links: Mapping[str, Sequence[Link]],  # by instance; read at every start
        on_event: EventSink,
        limits: TransferLimits,
        progress: ComputeProgress,
    ) -> None:
        self._own = own
        self._rank = rank
        self._links = links
        self._on_event = on_event
        self._limits = limits
        self._progress = progress
        self.num_corrupted = 0  # batches whose checksums differed
        self._budget = Budget(limits.max_bytes_in_flight)
        self._active: dict[int, _Transfer] = {}  # in the order in which they may post
        self._late: list[_Transfer] = []  # reported as not quiesced, and watched until they are
        self._ended: dict[int, TransferEvent] = {}  # the last NUM_ENDED_KEPT reports, oldest first

    def __len__(self) -> int:
        return len(self._active)

    def next_deadline_s(self) -> float:
        """The earliest deadline, on time.monotonic(); infinite when there is none."""
        return min((transfer.deadline_s for transfer in self._active.values()), default=float("inf"))

    def next_mark(self) -> StepMark | None:
        """The first layer that a transfer waits for."""
        active = [transfer for transfer in self._active.values() if transfer.ending is None]
        marks = [mark for one in active for part in one.parts if (mark := one.awaited(part)) is not None]
        return min((mark for mark in marks if not self._progress.has_reached(mark)), default=None)

    def start(self, command: TransferCommand, *, received_s: float) -> None:
        """Begin a transfer; a command that cannot work ends at the next advance()."""
        if command.transfer_id in self._active or command.transfer_id in self._ended:
            logger.warning(
                "transfer %d has been begun or cancelled before; its command is dropped", command.transfer_id
            )
            return
        transfer = _Transfer(command=command, started_s=received_s)
        self._active[command.transfer_id] = transfer
        try:
            transfer.parts = self._make_parts(command)
        except (ValueError, TransportError) as error:
            self._end(transfer, TransferState.FAILED, f"start with {command.peer_instance_id}: {error}")

    def cancel(self, transfer_id: int) -> None:
        """Post no more of a transfer; one that has ended is reported again, one that never began as cancelled."""
        transfer = self._active.get(transfer_id)
        if transfer is not None:
            self._end(transfer, TransferState.CANCELLED, "cancelled")
        elif transfer_id in self._ended:
            self._on_event(self._ended[transfer_id])
        else:
            self._tell(self._event(transfer_id, TransferState.CANCELLED, "cancelled before it began"))

    def cancel_all(self, reason: str) -> None:
        """Post no more of any."""
        for transfer in self._active.values():
            self._end(transfer, TransferState.CANCELLED, reason)

    @property
    def are_settled(self) -> bool:
        """Whether no byte of any transfer can land any more, those that were reported too."""
        return not self._active and not self._late

    def forget(self) -> None:
        """Forget how transfers ended, so that their numbers may come again. Only when all are settled."""
        assert self.are_settled, (list(self._active), len(self._late))
        self._ended.clear()

    def fail_all(self, reason: str) -> None:
        """Report every transfer as failed at once; the caller closes the links."""
        for transfer in list(self._active.values()):
            for part in transfer.parts:
                transfer.drop(part)
            self._report(transfer, TransferState.FAILED, reason)

    def advance(self) -> bool:
        """Reap and post what is possible without waiting; True when anything moved or ended."""
        has_moved = False
        for step in (self._reap, self._post):  # all that has landed makes room for who waits longest
            for transfer in list(self._active.values()):
                for part in transfer.parts:
                    has_moved |= self._attempt(step, transfer, part)
        for transfer in list(self._active.values()):
            has_moved |= self._finish(transfer)
        for transfer in list(self._late):
            has_moved |= self._advance_late(transfer)
        return has_moved

    def _make_parts(self, command: TransferCommand) -> list[Part]:
        if command.executing_instance_id != self._own.instance_id:
            raise ValueError(
                f"{command.mode} is executed by {command.executing_instance_id}, not by {self._own.instance_id}"
            )
        links = self._links.get(command.peer_instance_id)
        if links is None:
            raise TransportError(f"{self._own.instance_id} is not connected to it; connect() comes first")
        return [
            Part(
                link=share.link,
                peer=share.link.peer(),
                budget=self._budget,
                are_checked=self._limits.are_checked,
                batches=make_batches(
                    command,
                    share.pairs,
                    batch_bytes=self._limits.batch_bytes,
                    cut=exactly if self._limits.are_checked else in_whole_blocks,
                    num_waves=1 if command.after_step is None else self._limits.num_layer_waves,
                ),
            )
            for share in choose_shares(self._own, links, command.mode)
        ]

    def _attempt(self, step: Callable[[_Transfer, Part], bool], transfer: _Transfer, part: Part) -> bool:
        """Do a step of a part; True when it moved or failed."""
        failure: ConnectorError
        try:
            return step(transfer, part)
        except CorruptedBytes as error:  # the connection works: let what was posted land
            self.num_corrupted += 1
            failure = error
        except TransportError as error:
            transfer.drop(part)
            failure = error
        self._end(transfer, TransferState.FAILED, f"{transfer.command.mode} with {part.link.name}: {failure}")
        return True

    def _reap(self, _transfer: _Transfer, part: Part) -> bool:
        return part.reap()

    def _post(self, transfer: _Transfer, part: Part) -> bool:
        if not self._may_post(transfer, part):
            return False
        transfer.num_bytes += part.post(transfer.command.mode)
        self._active[transfer.command.transfer_id] = self._active.pop(transfer.command.transfer_id)  # others come first
        return True

    def _may_post(self, transfer: _Transfer, part: Part) -> bool:
        has_room = len(part.flushes) < self._limits.num_batches_in_flight
        if transfer.ending is not None or part.num_posted == len(part.batches) or not has_room:
            return False
        mark = transfer.awaited(part)
        is_computed = mark is None or self._progress.has_reached(mark)
        return is_computed and self._budget.has_room(part.link, part.batches.num_bytes(part.num_posted))

    def _finish(self, transfer: _Transfer) -> bool:
        """Report what has ended, end what is late; True when it did either."""
        if transfer.ending is None and all(part.is_done for part in transfer.parts):
            self._report(transfer, TransferState.DONE, "")
        elif transfer.ending is not None and not transfer.is_pending:
            self._report(transfer, transfer.ending, transfer.reason)
        elif time.monotonic() < transfer.deadline_s:
            return False
        elif transfer.ending is None:
            command = transfer.command
            late = ", ".join(part.link.name for part in transfer.parts if not part.is_done)
            reason = f"{command.mode} with {late}: not done within {command.deadline_s:g} s"
            self._end(transfer, TransferState.FAILED, reason)
        else:
            self._give_up(transfer)
        return True

    def _give_up(self, transfer: _Transfer) -> None:
        """What was posted does not end: leave its connections to it, and go on without."""
        for part in transfer.parts:
            if part.flushes:
                transfer.reason += f"; connection to {part.link.name} dropped, it did not quiesce"
                if part.peer.is_direct:
                    transfer.drop(part)
                else:
                    part.write_off()
                    part.link.retire(part.peer)
        self._report(transfer, TransferState.FAILED, transfer.reason)
        if transfer.is_pending:
            self._late.append(transfer)

    def _advance_late(self, transfer: _Transfer) -> bool:
        """Look whether the last bytes of a reported transfer have landed; True once it is known what became of them."""
        for part in transfer.parts:
            try:
                part.reap()
            except TransportError:
                transfer.drop(part)
        if transfer.is_pending:
            return False
        self._late.remove(transfer)
        in_use = [part.peer for one in (*self._active.values(), *self._late) for part in one.parts]
        for part in transfer.parts:
            if part.peer not in in_use:
                part.link.drop(part.peer)
        event = self._ended.get(transfer.command.transfer_id)
        if event is not None:
            self._tell(dataclasses.replace(event, is_quiesced=transfer.is_quiesced, is_watched=False))
        return True

    def _end(self, transfer: _Transfer, state: TransferState, reason: str) -> None:
        """Post no more; report once what was posted has landed or its link is closed."""
        if transfer.ending is None:
            transfer.ending, transfer.reason = state, reason
            transfer.quiesce_deadline_s = time.monotonic() + self._limits.quiesce_timeout_s

    def _report(self, transfer: _Transfer, state: TransferState, reason: str) -> None:
        del self._active[transfer.command.transfer_id]
        if state is TransferState.FAILED:
            logger.warning("transfer %d failed on rank %d: %s", transfer.command.transfer_id, self._rank, reason)
        event = self._event(transfer.command.transfer_id, state, reason)
        self._tell(
            dataclasses.replace(
                event,
                num_bytes=transfer.num_bytes,
                num_runs=sum(len(part.batches.lengths) for part in transfer.parts),
                duration_s=time.monotonic() - transfer.started_s,
                is_quiesced=transfer.is_quiesced and not transfer.is_pending,
                is_watched=transfer.is_pending,
            )
        )

    def _event(self, transfer_id: int, state: TransferState, reason: str) -> TransferEvent:
        """The report of a transfer that has moved nothing."""
        return TransferEvent(
            transfer_id=transfer_id,
            instance_id=self._own.instance_id,
            rank=self._rank,
            state=state,
            num_bytes=0,
            num_runs=0,
            duration_s=0.0,
            reason=reason,
        )

    def _tell(self, event: TransferEvent) -> None:
        self._ended[event.transfer_id] = event
        if len(self._ended) > NUM_ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        self._on_event(event)
