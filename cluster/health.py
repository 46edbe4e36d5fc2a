"""Who is alive: heartbeats of ranks and the verdict on every instance. Pure bookkeeping on a given clock.

An instance fails once and for good. Watching processes is the actors' part, acting on a failure the scheduler
loop's.

    starting --hello of every rank--> serving --silence, trouble, lost connection, dead actor--> failed
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
    """State of every instance of a deployment. Owned by the scheduler loop's thread."""

    def __init__(self, num_ranks: dict[str, int], *, silence_limit_s: float) -> None:
        self._num_ranks = num_ranks
        self._silence_limit_s = silence_limit_s
        self._last_seen: dict[tuple[str, int], float] = {}
        self._failures: dict[str, str] = {}

    def beat(self, instance_id: str, rank: int, *, now_s: float) -> None:
        """A sign of life of one rank."""
        if instance_id in self._num_ranks:
            self._last_seen[instance_id, rank] = now_s

    def fail(self, instance_id: str, reason: str) -> bool:
        """Declare an instance failed; False when it is unknown or had failed before."""
        if instance_id not in self._num_ranks or instance_id in self._failures:
            return False
        self._failures[instance_id] = reason
        return True

    def silent(self, *, now_s: float) -> list[tuple[str, str]]:
        """Instances not yet failed of which a rank has been silent too long, with the reason."""
        return [
            (instance_id, f"rank {rank} was silent for {now_s - seen_s:.1f} s (limit {self._silence_limit_s:g} s)")
            for (instance_id, rank), seen_s in self._last_seen.items()
            if instance_id not in self._failures and now_s - seen_s > self._silence_limit_s
        ]

    def is_alive(self, instance_id: str) -> bool:
        """Whether an instance may be given work: every rank has said hello and nothing failed."""
        return instance_id not in self._failures and self._has_all_ranks(instance_id)

    @property
    def is_complete(self) -> bool:
        """Whether every rank of every instance has been seen."""
        return all(self._has_all_ranks(instance_id) for instance_id in self._num_ranks)

    @property
    def reason(self) -> str:
        """Why the deployment is not healthy; empty when it is."""
        return "; ".join(f"instance {instance_id}: {reason}" for instance_id, reason in self._failures.items())

    def status(self, instance_id: str, *, now_s: float) -> dict[str, Any]:
        """Plain values for `status` and /health."""
        seen = [at for (owner, _), at in self._last_seen.items() if owner == instance_id]
        failure = self._failures.get(instance_id, "")
        state = "failed" if failure else "serving" if self._has_all_ranks(instance_id) else "starting"
        return {"state": state, "reason": failure, "last_beat_s": round(now_s - min(seen), 3) if seen else None}

    def _has_all_ranks(self, instance_id: str) -> bool:
        return all((instance_id, rank) in self._last_seen for rank in range(self._num_ranks[instance_id]))
