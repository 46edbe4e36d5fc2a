"""Jobs of an instance's tiers: their numbers, their order, and which ranks have still to report them.

Owns nothing else: what a job is for, stores and loads know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job has ended on all ranks. No byte of it moves any more."""

    kind: CopyKind
    is_done: bool  # everywhere
    num_bytes: int  # of all ranks
    duration_s: float  # of the slowest rank
    reason: str


@dataclasses.dataclass(slots=True, kw_only=True)
class _Job:
    """A job under way. Mutated by Jobs only."""

    command: CopyCommand
    on_end: Callable[[JobOutcome], None]
    events: dict[int, CopyEvent] = dataclasses.field(default_factory=dict)  # by rank


@dataclasses.dataclass(slots=True, kw_only=True)
class KindTotals:
    """Jobs of one kind that have ended, since the start."""

    num_done: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0


class Jobs:
    """All jobs of one instance. Called by its Tiers."""

    def __init__(self, *, num_ranks: int) -> None:
        self.totals = {kind: KindTotals() for kind in CopyKind}
        self._num_ranks = num_ranks
        self._jobs: dict[int, _Job] = {}
        self._commands: list[CopyCommand] = []
        self._last_id = 0

    def begin(
        self, kind: CopyKind, parts: Sequence[CopyPart], *, after_step: int, on_end: Callable[[JobOutcome], None]
    ) -> int:
        """Number a job; on_end is called once, when all ranks have reported it."""
        self._last_id += 1
        command = CopyCommand(job_id=self._last_id, kind=kind, after_step=after_step, parts=tuple(parts))
        self._jobs[command.job_id] = _Job(command=command, on_end=on_end)
        self._commands.append(command)
        return command.job_id

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def is_under_way(self, job_id: int) -> bool:
        """Whether some rank has still to report it."""
        return job_id in self._jobs

    def num_under_way(self, kind: CopyKind) -> int:
        """Jobs of a kind that have not ended."""
        return sum(job.command.kind is kind for job in self._jobs.values())

    def take_commands(self) -> list[CopyCommand]:
        """Jobs begun since the last take, in order."""
        commands, self._commands = self._commands, []
        return commands

    def on_event(self, event: CopyEvent) -> None:
        """Count a rank's report; repeated and unknown ones are ignored."""
        job = self._jobs.get(event.job_id)
        if job is None:
            return
        job.events.setdefault(event.rank, event)
        if len(job.events) < self._num_ranks:
            return
        del self._jobs[event.job_id]
        outcome = _outcome(job)
        totals = self.totals[outcome.kind]
        totals.num_done += outcome.is_done
        totals.num_failed += not outcome.is_done
        totals.num_bytes += outcome.num_bytes
        totals.busy_s += outcome.duration_s
        job.on_end(outcome)

    def forget(self) -> None:
        """No rank will report any more."""
        self._jobs.clear()
        self._commands.clear()


def _outcome(job: _Job) -> JobOutcome:
    events = list(job.events.values())
    return JobOutcome(
        kind=job.command.kind,
        is_done=all(event.is_done for event in events),
        num_bytes=sum(event.num_bytes for event in events),
        duration_s=max(event.duration_s for event in events),
        reason="; ".join(sorted({f"rank {event.rank}: {event.reason}" for event in events if event.reason})),
    )
