"""Who gives signs of life: heartbeats of ranks, and what was transferred. Pure bookkeeping on a given clock.

Watching processes is the actors' part, acting on silence the scheduler loop's; the state of instances is that of
engine/scheduler/membership.py.
"""

from __future__ import annotations

import dataclasses

from blockferry.connectors.base import TransferEvent, TransferState


@dataclasses.dataclass(slots=True, kw_only=True)
class TransferTotals:
    """Transfers since the start, counted per executing rank. Owned by the scheduler loop's thread."""

    num_done: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0  # sum of durations
    last_failure: str = ""

    def count(self, event: TransferEvent) -> None:
        """Add one rank's report."""
        self.num_done += event.state is TransferState.DONE
        self.num_failed += event.state is TransferState.FAILED
        self.num_cancelled += event.state is TransferState.CANCELLED
        self.num_bytes += event.num_bytes
        self.busy_s += event.duration_s
        if event.state is TransferState.FAILED:
            self.last_failure = event.reason


class HealthBoard:
    """Heartbeats of every rank of a deployment. Owned by the scheduler loop's thread."""

    def __init__(self, *, silence_limit_s: float) -> None:
        self._silence_limit_s = silence_limit_s
        self._num_ranks: dict[str, int] = {}  # by instance_id; replaced when it changes, as other threads read it
        self._last_seen: dict[tuple[str, int], float] = {}

    def add(self, instance_id: str, *, num_ranks: int) -> None:
        """Expect the ranks of an instance."""
        self._num_ranks = self._num_ranks | {instance_id: num_ranks}

    def remove(self, instance_id: str) -> None:
        """An instance has left."""
        for rank in range(self._num_ranks[instance_id]):
            self._last_seen.pop((instance_id, rank), None)
        self._num_ranks = {one: num_ranks for one, num_ranks in self._num_ranks.items() if one != instance_id}

    def beat(self, instance_id: str, rank: int, *, now_s: float) -> None:
        """A sign of life of one rank."""
        if rank < self._num_ranks.get(instance_id, 0):
            self._last_seen[instance_id, rank] = now_s

    def silent(self, *, now_s: float) -> list[tuple[str, str]]:
        """Instances of which a rank was heard of and has been silent too long since, with what to say of it."""
        return [
            (instance_id, f"rank {rank} was silent for {now_s - seen_s:.1f} s (limit {self._silence_limit_s:g} s)")
            for (instance_id, rank), seen_s in self._last_seen.items()
            if now_s - seen_s > self._silence_limit_s
        ]

    def has_all_ranks(self, instance_id: str) -> bool:
        """Whether every rank of an instance has been heard of, so that it can be given work."""
        return all((instance_id, rank) in self._last_seen for rank in range(self._num_ranks[instance_id]))

    @property
    def is_complete(self) -> bool:
        """Whether every rank of every instance has been heard of. Any thread."""
        num_ranks = self._num_ranks
        return all((one, rank) in self._last_seen for one, number in num_ranks.items() for rank in range(number))

    def silent_s(self, instance_id: str, *, now_s: float) -> float | None:
        """How long the rank that was silent longest has been so; None before any was heard of."""
        seen = [at for (owner, _), at in self._last_seen.items() if owner == instance_id]
        return round(now_s - min(seen), 3) if seen else None
