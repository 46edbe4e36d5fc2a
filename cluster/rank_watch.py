"""The watch over worker processes: reports those that end, and ends those of instances that were given up.

Owns the references of every rank's run() and one thread. What Ray says of processes becomes calls into the scheduler
loop; decides nothing about requests.

    run() of a rank ends -> report_failure      end(instance) -> kill every rank -> all are dead -> report_gone
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray

from blockferry.cluster.actor_calls import first_line, has_died

logger = logging.getLogger(__name__)

WATCH_S = 0.5  # how often Ray is asked whether a worker has died
CLOSE_TIMEOUT_S = 5.0


class Reports(Protocol):
    """The scheduler loop as the watch needs it; both may be called from any thread."""

    def report_failure(self, instance_id: str, reason: str) -> None:
        """A process of an instance has ended."""

    def report_gone(self, instance_id: str) -> None:
        """No process of a failed instance is left."""


class RankWatch:
    """Watches the ranks of a deployment from start() to close()."""

    def __init__(self) -> None:
        self._workers: dict[str, Sequence[Any]] = {}  # actor handles in rank order, by instance_id
        self._runs: dict[Any, tuple[str, int]] = {}  # run() references
        self._pings: dict[Any, tuple[str, int]] = {}  # calls to ranks that are being killed; they end with them
        self._wishes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the watch's thread
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, reports: Reports) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._run, args=(reports,), name="watch", daemon=True)
        self._thread.start()

    def add(self, instance_id: str, workers: Sequence[Any], runs: Mapping[Any, int]) -> None:
        """Watch an instance: actor handles in rank order, ranks by the references of their run(). Any thread."""

        def add() -> None:
            self._workers[instance_id] = workers
            self._runs.update({run: (instance_id, rank) for run, rank in runs.items()})

        self._wishes.put(add)

    def end(self, instance_id: str) -> None:
        """Kill every process of an instance, frozen ones too; report_gone() says when that is done. Any thread."""
        self._wishes.put(lambda: self._end(instance_id))

    def forget(self, instance_id: str) -> None:
        """An instance leaves: its processes may end, and are no longer reported but for end(). Any thread."""
        self._wishes.put(lambda: self._forget(instance_id))

    def close(self) -> None:
        """End the watch."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, reports: Reports) -> None:
        while not self._is_closed.is_set():
            while not self._wishes.empty():
                self._wishes.get()()
            pending = [*self._runs, *self._pings]
            if not pending:
                self._is_closed.wait(WATCH_S)
                continue
            done, _ = ray.wait(pending, timeout=WATCH_S)
            for reference in done:
                if reference in self._runs:
                    instance_id, rank = self._runs.pop(reference)
                    reports.report_failure(instance_id, f"rank {rank}: {_end_of(reference)}")
                else:
                    self._on_ping(reports, reference)

    def _end(self, instance_id: str) -> None:
        for rank in range(len(self._workers[instance_id])):
            self._kill(instance_id, rank)

    def _forget(self, instance_id: str) -> None:
        self._runs = {run: who for run, who in self._runs.items() if who[0] != instance_id}
        if not self._is_ending(instance_id):
            self._workers.pop(instance_id, None)

    def _is_ending(self, instance_id: str) -> bool:
        return any(one == instance_id for one, _ in self._pings.values())

    def _kill(self, instance_id: str, rank: int) -> None:
        worker = self._workers[instance_id][rank]
        logger.warning("killing rank %d of %s, which was given up", rank, instance_id)
        ray.kill(worker)  # takes up to 5 s for a process that does not answer
        self._pings[worker.place.remote()] = (instance_id, rank)

    def _on_ping(self, reports: Reports, reference: Any) -> None:
        instance_id, rank = self._pings.pop(reference)
        if not has_died(reference):  # it answered before it was killed
            self._is_closed.wait(WATCH_S)
            self._pings[self._workers[instance_id][rank].place.remote()] = (instance_id, rank)
        elif not self._is_ending(instance_id):
            del self._workers[instance_id]
            reports.report_gone(instance_id)


def _end_of(reference: Any) -> str:
    try:
        reason = ray.get(reference)
    except ray.exceptions.RayActorError as error:
        return f"its process has died ({first_line(error)})"
    except ray.exceptions.RayTaskError as error:
        return f"it failed: {first_line(error.cause or error)}"
    except ray.exceptions.RayError as error:  # its node, for one
        return f"it is lost ({first_line(error)})"
    return f"it stopped: {reason or 'no reason given'}"
