"""Transfers under way on one rank: posting, reaping, deadlines and the one event that ends each.

Used by the transfer thread only; never waits. Owned by PdWorker, which owns the links as well.

    start() -> POSTING ------- all batches landed -----------------------------> DONE
                  | cancel()                    -> QUIESCING -- flushed -------> CANCELLED
                  | error, deadline, bad blocks -> QUIESCING -- flushed or ----> FAILED
                                                   link closed after quiesce_timeout_s

A transfer with after_step moves what of the source's layers is computed, wave by wave: a batch waits for the last
layer that has bytes in it.

A transfer is cut into batches of batch_bytes, of which num_batches_in_flight are posted and not yet flushed per
peer, so that memory, cancellation and other transfers never wait for more than that. Of all transfers together
max_bytes_in_flight are, and half of it towards one peer, lest a frozen one take all; who posted last posts last.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from blockferry.connectors.base import (
    Checksum,
    ConnectorError,
    CorruptedBytes,
    EventSink,
    Flush,
    Peer,
    PoolEndpoint,
    TransferCommand,
    TransferEvent,
    TransferMode,
    TransferState,
    TransportError,
)
from blockferry.connectors.compute_progress import ComputeProgress, StepMark
from blockferry.connectors.pd_links import Batches, Link, choose_shares, exactly, in_whole_blocks, make_batches

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """How much of a transfer may be under way, and how long its end may take."""

    batch_bytes: int = 8 << 20
    num_batches_in_flight: int = 2
    max_bytes_in_flight: int = 128 << 20  # of a rank; a single batch may be larger
    are_checked: bool = False  # whether both ends compare checksums of every batch that has landed
    num_layer_waves: int = 4  # of transfers that start while the source's layers compute
    quiesce_timeout_s: float = 2.0  # after a deadline: how long to wait for what was posted before the link is closed


class _Budget:
    """Bytes that are posted and have not landed, of all transfers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_bytes = 0
        self._of_link: collections.Counter[Link] = collections.Counter()

    def has_room(self, link: Link, num_bytes: int) -> bool:
        """Whether so many bytes may be posted towards a peer."""
        towards = self._of_link[link]
        fits_link = towards == 0 or towards + num_bytes <= self._limit // 2
        return self._num_bytes == 0 or (fits_link and self._num_bytes + num_bytes <= self._limit)

    def add(self, link: Link, num_bytes: int) -> None:
        """Count bytes as posted, or as landed where num_bytes is negative."""
        self._num_bytes += num_bytes
        self._of_link[link] += num_bytes
        if not self._of_link[link]:
            del self._of_link[link]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Posted:
    """A batch on its way."""

    batch: int
    flush: Flush
    num_bytes: int
    has_landed: bool = False
    checksum: Checksum | None = None  # of the far end's bytes, once they have landed
    far_sum: int | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class _Part:
    """One peer's share of a transfer."""

    link: Link
    peer: Peer
    batches: Batches
    budget: _Budget
    are_checked: bool
    num_posted: int = 0  # batches
    flushes: collections.deque[_Posted] = dataclasses.field(default_factory=collections.deque)

    @property
    def is_done(self) -> bool:
        return self.num_posted == len(self.batches) and not self.flushes

    def reap(self) -> bool:
        """Forget batches that have landed; True when there was one. Raises TransportError, CorruptedBytes."""
        has_moved = False
        while self.flushes and self._has_landed(self.flushes[0]):
            posted = self.flushes.popleft()
            self.budget.add(self.link, -posted.num_bytes)
            has_moved = True
            if self.are_checked:
                self._compare(posted)
        return has_moved

    def post(self, mode: TransferMode) -> int:
        """Post the next batch; returns its bytes. Raises TransportError."""
        num_bytes = self.batches.post(self.peer, mode, self.num_posted)
        self.flushes.append(_Posted(batch=self.num_posted, flush=self.peer.flush(), num_bytes=num_bytes))
        self.num_posted += 1
        self.budget.add(self.link, num_bytes)
        return num_bytes

    def _has_landed(self, posted: _Posted) -> bool:
        """Whether all of a batch is there, and where it is checked also its far end's checksum here."""
        posted.has_landed = posted.has_landed or posted.flush.poll()
        if not posted.has_landed or not self.are_checked:
            return posted.has_landed
        if posted.checksum is None:
            runs = self.batches.runs_of(posted.batch)
            posted.checksum = self.peer.checksum(self.batches.remote_offsets[runs], self.batches.lengths[runs])
        posted.far_sum = posted.checksum.poll()
        return posted.far_sum is not None

    def _compare(self, posted: _Posted) -> None:
        runs = self.batches.runs_of(posted.batch)
        offsets, lengths = self.batches.local_offsets[runs], self.batches.lengths[runs]
        if self.link.own_checksum(offsets, lengths) != posted.far_sum:
            raise CorruptedBytes(
                f"corrupted: batch {posted.batch + 1} of {len(self.batches)} has another checksum there than here; "
                f"{posted.num_bytes} bytes in {len(lengths)} runs between offsets {int(offsets.min())} and "
                f"{int((offsets + lengths).max())} of this rank's pool"
            )

    def forget(self) -> None:
        """Wait for nothing any more."""
        while self.flushes:
            self.budget.add(self.link, -self.flushes.popleft().num_bytes)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Transfer:
    """One transfer's progress."""

    command: TransferCommand
    started_s: float
    parts: list[_Part] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    ending: TransferState | None = None  # quiescing, to be reported as this
    reason: str = ""
    quiesce_deadline_s: float = 0.0
    is_quiesced: bool = True

    def awaited(self, part: _Part) -> StepMark | None:
        """The layer that a part's next batch waits for; None: no layer, or no batch is left."""
        if self.command.after_step is None or part.num_posted == len(part.batches):
            return None
        return StepMark(self.command.after_step, part.batches.last_layer_ids[part.num_posted])

    @property
    def deadline_s(self) -> float:
        return self.quiesce_deadline_s if self.ending else self.started_s + self.command.deadline_s

    def drop(self, part: _Part) -> None:
        """Close a connection that failed; other transfers over it fail at their next poll."""
        if part.flushes and self.command.mode is TransferMode.PUSH and not part.peer.is_direct:
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
        self._budget = _Budget(limits.max_bytes_in_flight)
        self._active: dict[int, _Transfer] = {}  # in the order in which they may post

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
        if command.transfer_id in self._active:
            logger.warning("transfer %d is already under way; the second command is dropped", command.transfer_id)
            return
        transfer = _Transfer(command=command, started_s=received_s)
        self._active[command.transfer_id] = transfer
        try:
            transfer.parts = self._make_parts(command)
        except (ValueError, TransportError) as error:
            self._end(transfer, TransferState.FAILED, f"start with {command.peer_instance_id}: {error}")

    def cancel(self, transfer_id: int) -> None:
        """Post no more of a transfer. Unknown ids are ignored."""
        transfer = self._active.get(transfer_id)
        if transfer is not None:
            self._end(transfer, TransferState.CANCELLED, "cancelled")

    def cancel_all(self, reason: str) -> None:
        """Post no more of any."""
        for transfer in self._active.values():
            self._end(transfer, TransferState.CANCELLED, reason)

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
        return has_moved

    def _make_parts(self, command: TransferCommand) -> list[_Part]:
        if command.executing_instance_id != self._own.instance_id:
            raise ValueError(
                f"{command.mode} is executed by {command.executing_instance_id}, not by {self._own.instance_id}"
            )
        links = self._links.get(command.peer_instance_id)
        if links is None:
            raise TransportError(f"{self._own.instance_id} is not connected to it; connect() comes first")
        return [
            _Part(
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

    def _attempt(self, step: Callable[[_Transfer, _Part], bool], transfer: _Transfer, part: _Part) -> bool:
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

    def _reap(self, _transfer: _Transfer, part: _Part) -> bool:
        return part.reap()

    def _post(self, transfer: _Transfer, part: _Part) -> bool:
        if not self._may_post(transfer, part):
            return False
        transfer.num_bytes += part.post(transfer.command.mode)
        self._active[transfer.command.transfer_id] = self._active.pop(transfer.command.transfer_id)  # others come first
        return True

    def _may_post(self, transfer: _Transfer, part: _Part) -> bool:
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
        elif transfer.ending is not None and not any(part.flushes for part in transfer.parts):
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
        """What was posted does not end: drop the connections that hold it."""
        for part in transfer.parts:
            if part.flushes:
                transfer.reason += f"; connection to {part.link.name} dropped, it did not quiesce"
                transfer.drop(part)
        self._report(transfer, TransferState.FAILED, transfer.reason)

    def _end(self, transfer: _Transfer, state: TransferState, reason: str) -> None:
        """Post no more; report once what was posted has landed or its link is closed."""
        if transfer.ending is None:
            transfer.ending, transfer.reason = state, reason
            transfer.quiesce_deadline_s = time.monotonic() + self._limits.quiesce_timeout_s

    def _report(self, transfer: _Transfer, state: TransferState, reason: str) -> None:
        del self._active[transfer.command.transfer_id]
        if state is TransferState.FAILED:
            logger.warning("transfer %d failed on rank %d: %s", transfer.command.transfer_id, self._rank, reason)
        self._on_event(
            TransferEvent(
                transfer_id=transfer.command.transfer_id,
                instance_id=self._own.instance_id,
                rank=self._rank,
                state=state,
                num_bytes=transfer.num_bytes,
                num_runs=sum(len(part.batches.lengths) for part in transfer.parts),
                duration_s=time.monotonic() - transfer.started_s,
                reason=reason,
                is_quiesced=transfer.is_quiesced,
            )
        )
