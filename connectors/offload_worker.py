"""Worker half of the offload connector: copies blocks between a rank's pool, its memory tier and its disk.

Owns two threads. The copier alone touches the pool, one job after the other: stores in the order they were given, loads
after the stores given before them, so that a block whose bytes are stored can be loaded into. The disk thread reads
and writes the file; what it has read and checked, the copier puts into the pool.

    model thread     executed(step)                 wait_stored(job): before a step writes blocks that are being stored
    any thread       start(command) --+--> copier:  STORE, LOAD  ------------------------+--> CopyEvent
                                      +--> disk:    DEMOTE;  FETCH --staged--> copier ---+

A job touches the pool only once the step that it names has been executed: the last one that could write its blocks
otherwise.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from blockferry.connectors.base import ByteArray, ConnectorError, Int64Array, RankIdentity
from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart, CopySink, OffloadError
from blockferry.connectors.offload_pages import PageRuns
from blockferry.connectors.offload_stores import RecordName, TierDisk, TierMemory
from blockferry.connectors.transport import native_loops

logger = logging.getLogger(__name__)

_STAGED_BYTES = 8 << 20  # of what is read from disk, before the copier takes it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankTiers:
    """Where a rank's bytes lie."""

    pool: ByteArray
    pages: PageRuns
    memory: TierMemory
    disk: TierDisk | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTiming:
    """Limits of waits, in seconds."""

    store_timeout_s: float = 60.0  # of a step for blocks that are being stored
    close_timeout_s: float = 10.0


class _Closed(Exception):
    """The worker is closing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PoolJob:
    """Something that the copier has to do."""

    job_id: int
    after_step: int
    run: Callable[[], None]


class _PoolJobs:
    """What the copier has to do, and in which order it may.

    Stores go in their order. A load waits for all stores given before it, which may read the blocks that it fills;
    stores given later may pass it, as nothing that they read or write is its own. So a store that a step waits for
    never waits for a load that waits for that very step.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._stores: collections.deque[_PoolJob] = collections.deque()
        self._loads: list[_PoolJob] = []
        self._executed_step = -1
        self._is_closed = False

    def put_store(self, job: _PoolJob) -> None:
        with self._condition:
            self._stores.append(job)
            self._condition.notify()

    def put_load(self, job: _PoolJob) -> None:
        with self._condition:
            self._loads.append(job)
            self._condition.notify()

    def executed(self, step_id: int) -> None:
        with self._condition:
            self._executed_step = max(self._executed_step, step_id)
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def take(self) -> _PoolJob:
        """The next job that may run. Raises _Closed."""
        with self._condition:
            while not self._is_closed:
                job = self._find()
                if job is not None:
                    return job
                self._condition.wait()  # for close() at the latest, which ends with the instance
            raise _Closed

    def _find(self) -> _PoolJob | None:
        stores = self._stores
        if stores and stores[0].after_step <= self._executed_step:
            return stores.popleft()
        for place, load in enumerate(self._loads):
            is_behind = bool(stores) and stores[0].job_id < load.job_id
            if load.after_step <= self._executed_step and not is_behind:
                return self._loads.pop(place)
        return None


class OffloadWorker:
    """A rank's end of every copy. start() from any thread; executed() and wait_stored() from the model thread."""

    def __init__(
        self, own: RankIdentity, tiers: RankTiers, on_event: CopySink, timing: OffloadTiming = OffloadTiming()
    ) -> None:
        """`on_event` is called on this worker's threads and must return at once. Takes over memory and disk."""
        self._own = own
        self._tiers = tiers
        self._on_event = on_event
        self._timing = timing
        self._stored = threading.Condition()
        self._stored_job = 0  # last STORE that has ended
        self._pool_jobs = _PoolJobs()
        self._disk_jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._copies: dict[CopyKind, Callable[[CopyCommand], int]] = {
            CopyKind.STORE: self._store,
            CopyKind.LOAD: self._load,
            CopyKind.DEMOTE: self._demote,
            CopyKind.FETCH: self._fetch,
        }
        name = f"{own.instance_id}-{own.rank}"
        self._threads = [
            threading.Thread(target=self._run_copier, name=f"offload-{name}", daemon=True),
            threading.Thread(target=self._run_disk, name=f"offload-disk-{name}", daemon=True),
        ]
        nothing = np.empty(0, np.int64)
        native_loops.stream_runs(0, 0, nothing, nothing, nothing)  # compiled now rather than for the first request
        for thread in self._threads:
            thread.start()

    # any thread

    def start(self, command: CopyCommand) -> None:
        """Begin a job; exactly one event reports its end, unless the worker is closed before."""
        if command.kind.is_on_disk:
            self._disk_jobs.put(lambda: self._do(command))
            return
        put = self._pool_jobs.put_store if command.kind is CopyKind.STORE else self._pool_jobs.put_load
        put(_PoolJob(job_id=command.job_id, after_step=command.after_step, run=lambda: self._do(command)))

    def close(self) -> None:
        """End both threads and let go of memory and disk. Jobs under way are finished, others forgotten. Idempotent."""
        self._pool_jobs.close()
        self._disk_jobs.put(_stop)
        for thread in self._threads:
            thread.join(self._timing.close_timeout_s)
            if thread.is_alive():
                logger.warning("%s does not end; it is left behind", thread.name)
                return
        self._tiers.memory.close()
        if self._tiers.disk is not None:
            self._tiers.disk.close()

    def remove(self) -> None:
        """close(), and nobody will find the bytes again."""
        self.close()
        self._tiers.memory.remove()
        if self._tiers.disk is not None:
            self._tiers.disk.remove()

    # model thread

    def executed(self, step_id: int) -> None:
        """The rank has executed its steps up to here."""
        self._pool_jobs.executed(step_id)

    def wait_stored(self, job_id: int) -> None:
        """Return once stores up to this job have ended; 0 is none. Raises ConnectorError when they do not."""
        with self._stored:
            if not self._stored.wait_for(lambda: self._stored_job >= job_id, self._timing.store_timeout_s):
                raise ConnectorError(
                    f"store {job_id} of {self._own.instance_id}[rank {self._own.rank}] has not ended within "
                    f"{self._timing.store_timeout_s:g} s; its thread hangs, restart the instance"
                )

    # both threads

    def _run_copier(self) -> None:
        with contextlib.suppress(_Closed):
            while True:
                self._pool_jobs.take().run()

    def _run_disk(self) -> None:
        with contextlib.suppress(_Closed):
            while True:
                self._disk_jobs.get()()

    def _do(self, command: CopyCommand) -> None:
        started_s, num_bytes, reason = time.monotonic(), 0, ""
        try:
            num_bytes = self._copies[command.kind](command)
        except (OffloadError, ValueError, IndexError) as error:
            reason = str(error)
            logger.warning("copy %d (%s) failed: %s", command.job_id, command.kind, reason)
        if command.kind is CopyKind.STORE:
            with self._stored:
                self._stored_job = command.job_id
                self._stored.notify_all()
        self._on_event(
            CopyEvent(
                job_id=command.job_id,
                instance_id=self._own.instance_id,
                rank=self._own.rank,
                is_done=not reason,
                num_bytes=num_bytes,
                duration_s=time.monotonic() - started_s,
                reason=reason,
            )
        )

    # copier

    def _store(self, command: CopyCommand) -> int:
        tiers, num_bytes = self._tiers, 0
        for part in command.parts:
            runs = tiers.pages.of(part.group, part.block_ids, part.units)
            _copy(tiers.memory.view, tiers.pool, runs.tier_offsets, runs.pool_offsets, runs.lengths)
            num_bytes += runs.num_bytes
        return num_bytes

    def _load(self, command: CopyCommand) -> int:
        tiers, num_bytes = self._tiers, 0
        for part in command.parts:
            runs = tiers.pages.of(part.group, part.block_ids, part.units)
            _copy(tiers.pool, tiers.memory.view, runs.pool_offsets, runs.tier_offsets, runs.lengths)
            num_bytes += runs.num_bytes
        return num_bytes

    # disk thread

    def _demote(self, command: CopyCommand) -> int:
        disk, memory, pages = self._need_disk(), self._tiers.memory.view, self._tiers.pages
        num_bytes = 0
        for part in command.parts:
            lengths = pages.unit_lengths(part.group)
            for block in range(part.num_blocks):
                for number, length in enumerate(lengths):
                    start = int(part.units[block, number]) * pages.shape.unit_bytes
                    name = RecordName(group=part.group, digest=part.digest(block), number=number)
                    disk.write(int(part.disk_units[block, number]), memory[start : start + length], name)
                    num_bytes += length
        return num_bytes

    def _fetch(self, command: CopyCommand) -> int:
        """Read and check some blocks, let the copier put them into the pool, go on."""
        num_bytes = 0
        for part in command.parts:
            pages = self._tiers.pages
            num_units = pages.shape.units_per_block[part.group]
            step = max(1, _STAGED_BYTES // (num_units * pages.shape.unit_bytes))
            for first in range(0, part.num_blocks, step):
                some = slice(first, min(first + step, part.num_blocks))
                num_bytes += self._fetch_some(command, part, some)
        return num_bytes

    def _fetch_some(self, command: CopyCommand, part: CopyPart, some: slice) -> int:
        disk, pages = self._need_disk(), self._tiers.pages
        num_units, unit_bytes = pages.shape.units_per_block[part.group], pages.shape.unit_bytes
        staged: ByteArray = np.empty((some.stop - some.start) * num_units * unit_bytes, np.uint8)
        units = np.arange((some.stop - some.start) * num_units, dtype=np.int32).reshape(-1, num_units)
        for block in range(some.start, some.stop):
            for number, length in enumerate(pages.unit_lengths(part.group)):
                start = int(units[block - some.start, number]) * unit_bytes
                name = RecordName(group=part.group, digest=part.digest(block), number=number)
                disk.read(int(part.disk_units[block, number]), staged[start : start + length], name)
        runs = pages.of(part.group, part.block_ids[some], units)
        is_copied = threading.Event()

        def copy() -> None:
            _copy(self._tiers.pool, staged, runs.pool_offsets, runs.tier_offsets, runs.lengths)
            is_copied.set()

        self._pool_jobs.put_load(_PoolJob(job_id=command.job_id, after_step=command.after_step, run=copy))
        while not is_copied.wait(1.0):
            if not self._threads[0].is_alive():
                raise _Closed
        return runs.num_bytes

    def _need_disk(self) -> TierDisk:
        if self._tiers.disk is None:
            raise OffloadError("a copy names the disk, but this rank has none; give every rank the same tiers")
        return self._tiers.disk


def _copy(
    target: ByteArray, source: ByteArray, target_offsets: Int64Array, source_offsets: Int64Array, lengths: Int64Array
) -> None:
    """Copy runs between two regions. Raises ValueError where one reaches beyond its region."""
    for name, region, offsets in (("target", target, target_offsets), ("source", source, source_offsets)):
        if len(offsets) and (int(offsets.min()) < 0 or int((offsets + lengths).max()) > region.nbytes):
            raise ValueError(f"a copy reaches beyond its {name} of {region.nbytes} bytes; block ids or units are wrong")
    native_loops.stream_runs(target.ctypes.data, source.ctypes.data, target_offsets, source_offsets, lengths)


def _stop() -> None:
    raise _Closed
