"""Scheduler half of the P/D connector: numbers transfers, counts the ranks that reported, watches deadlines.

Pure bookkeeping: knows block ids, never requests; has no clock (callers pass now_s, monotonic seconds) and no
thread (one caller at a time: the scheduler's loop).

    begin() -> ACTIVE --- every rank reported ----------------> outcome, is_quiesced if every rank was
                 |------- deadline and grace passed ----------> outcome FAILED, not quiesced: keep the blocks' lease
    an outcome that is_watched comes again, once every rank knows what became of the bytes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from blockferry.connectors.base import TransferCommand, TransferEvent, TransferMode, TransferPart, TransferState

# The worst rank decides: bytes are missing when any failed, a cancelled rank outranks one that was done.
_SEVERITY = {TransferState.DONE: 0, TransferState.CANCELLED: 1, TransferState.FAILED: 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferOutcome:
    """How a transfer ended over all ranks. Only is_quiesced allows its blocks to be reused at once.

    Where it is not, time must make them safe; with is_watched the outcome comes again first.
    """

    transfer_id: int
    state: TransferState
    num_bytes: int
    num_runs: int
    duration_s: float  # of the slowest rank, from its receipt of the command
    elapsed_s: float  # from begin() to the last report
    is_quiesced: bool
    is_watched: bool
    reason: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Active:
    """A transfer that some rank has not reported yet. Mutated by PdScheduler only."""

    command: TransferCommand
    begun_s: float
    num_ranks: int
    events: dict[int, TransferEvent] = dataclasses.field(default_factory=dict)  # by rank

    def outcome(self, now_s: float) -> TransferOutcome:
        """The outcome once every rank has reported."""
        events = list(self.events.values())
        worst = max(events, key=lambda event: _SEVERITY[event.state])
        return TransferOutcome(
            transfer_id=self.command.transfer_id,
            state=worst.state,
            num_bytes=sum(event.num_bytes for event in events),
            num_runs=sum(event.num_runs for event in events),
            duration_s=max(event.duration_s for event in events),
            elapsed_s=now_s - self.begun_s,
            is_quiesced=all(event.is_quiesced for event in events),
            is_watched=any(event.is_watched for event in events),
            reason=worst.reason,
        )

    def overdue(self, now_s: float, reason: str) -> TransferOutcome:
        """The outcome while some rank is silent; it can still be asked, by a cancel."""
        return TransferOutcome(
            transfer_id=self.command.transfer_id,
            state=TransferState.FAILED,
            num_bytes=sum(event.num_bytes for event in self.events.values()),
            num_runs=sum(event.num_runs for event in self.events.values()),
            duration_s=now_s - self.begun_s,
            elapsed_s=now_s - self.begun_s,
            is_quiesced=False,
            is_watched=True,
            reason=reason,
        )


class PdScheduler:
    """Follows every transfer of a deployment from begin() to one TransferOutcome."""

    def __init__(self, *, mode: TransferMode, transfer_timeout_s: float, grace_s: float = 5.0) -> None:
        """`grace_s`: how long after its deadline a rank may still take to quiesce and report."""
        self.mode = mode
        self.transfer_timeout_s = transfer_timeout_s
        self.grace_s = grace_s
        self._num_ranks: dict[str, int] = {}
        self._active: dict[int, _Active] = {}
        self._late: dict[int, _Active] = {}  # with an outcome that is watched
        self._next_id = 1

    def add_instance(self, instance_id: str, *, num_ranks: int) -> None:
        """Declare an instance, before any transfer that involves it."""
        self._num_ranks[instance_id] = num_ranks

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance that no transfer involves any more."""
        del self._num_ranks[instance_id]

    def begin(
        self,
        parts: Sequence[TransferPart],
        *,
        src_instance_id: str,
        dst_instance_id: str,
        now_s: float,
        after_step: int | None = None,
    ) -> TransferCommand:
        """Number a transfer and follow it. Send the command to every rank of command.executing_instance_id.

        `after_step`: of the source; what it has not computed by then travels as it does. Raises ValueError for an
        instance that add_instance() does not know, and for a pull that is to wait for a step.
        """
        if after_step is not None and self.mode is not TransferMode.PUSH:
            raise ValueError(f"after_step={after_step} with mode {self.mode}: who reads cannot see steps; use push")
        command = TransferCommand(
            transfer_id=self._next_id,
            mode=self.mode,
            src_instance_id=src_instance_id,
            dst_instance_id=dst_instance_id,
            parts=tuple(parts),
            deadline_s=self.transfer_timeout_s,
            after_step=after_step,
        )
        for instance_id in (src_instance_id, dst_instance_id):
            if instance_id not in self._num_ranks:
                raise ValueError(f"instance {instance_id!r} is unknown to the connector; call add_instance() first")
        self._next_id += 1
        num_ranks = self._num_ranks[command.executing_instance_id]
        self._active[command.transfer_id] = _Active(command=command, begun_s=now_s, num_ranks=num_ranks)
        return command

    def on_event(self, event: TransferEvent, *, now_s: float) -> TransferOutcome | None:
        """Count a rank's report; the outcome when it was the last one, and again when nothing is watched any more."""
        transfer_id = event.transfer_id
        active = self._active.get(transfer_id) or self._late.get(transfer_id)
        if active is None or event.instance_id != active.command.executing_instance_id:
            return None
        known = active.events.get(event.rank)
        if known is None or known.is_watched:
            active.events[event.rank] = event
        if len(active.events) < active.num_ranks:
            return None
        outcome = active.outcome(now_s)
        if transfer_id in self._active:
            del self._active[transfer_id]
            if outcome.is_watched:
                self._late[transfer_id] = active
            return outcome
        if outcome.is_watched:
            return None
        del self._late[transfer_id]
        return outcome

    def expire(self, *, now_s: float) -> tuple[TransferOutcome, ...]:
        """End transfers whose ranks are silent past deadline and grace. Call it every 100 ms or so."""
        limit_s = self.transfer_timeout_s + self.grace_s
        over = [active for active in self._active.values() if now_s - active.begun_s > limit_s]
        for active in over:
            del self._active[active.command.transfer_id]
            self._late[active.command.transfer_id] = active
        reason = f"no report within {limit_s:g} s (transfer_timeout_s={self.transfer_timeout_s:g} and grace)"
        return tuple(active.overdue(now_s, reason) for active in over)

    def command(self, transfer_id: int) -> TransferCommand | None:
        """The command of a transfer that is active or watched. A cancel goes to the same ranks."""
        active = self._active.get(transfer_id) or self._late.get(transfer_id)
        return active.command if active else None

    def forget(self, transfer_id: int) -> None:
        """Nobody wants to know any more what becomes of a transfer."""
        self._active.pop(transfer_id, None)
        self._late.pop(transfer_id, None)

    @property
    def num_active(self) -> int:
        """Transfers without an outcome."""
        return len(self._active)
