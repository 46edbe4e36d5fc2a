"""Tiers without memory: copies between a simulated cache and its tiers, in any order that worker halves may choose."""

from __future__ import annotations

import collections
import dataclasses

from support.sim_cache import GARBAGE, SimCache

from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart


@dataclasses.dataclass(slots=True, eq=False)
class SimJob:
    """A copy, done once; then each rank reports it."""

    command: CopyCommand
    ranks_left: list[int]
    is_done: bool = True


class SimTiers:
    """What all ranks of one instance keep outside of their pool."""

    def __init__(self, cache: SimCache, *, instance_id: str, num_ranks: int) -> None:
        self._cache = cache
        self._instance_id = instance_id
        self._num_ranks = num_ranks
        self._memory: dict[int, object] = {}  # by unit
        self._disk: dict[int, object] = {}
        self._stores: collections.deque[CopyCommand] = collections.deque()
        self._loads: list[CopyCommand] = []
        self._on_disk: collections.deque[CopyCommand] = collections.deque()
        self._reports: list[SimJob] = []

    def start(self, command: CopyCommand) -> None:
        if command.kind is CopyKind.STORE:
            self._stores.append(command)
        elif command.kind is CopyKind.LOAD:
            self._loads.append(command)
        else:
            self._on_disk.append(command)

    @property
    def has_work(self) -> bool:
        return bool(self._stores or self._loads or self._on_disk or self._reports)

    def wait_stored(self, job_id: int, last_step: int) -> None:
        """What a step waits for happens now at the latest."""
        while self._stores and self._stores[0].job_id <= job_id:
            assert self._stores[0].after_step <= last_step, "a step waits for a store that waits for the step"
            self._run(self._stores.popleft(), fails=False)

    def may_run(self, last_step: int) -> list[CopyCommand]:
        """Jobs that some thread of the worker half could do next."""
        first_store = self._stores[0].job_id if self._stores else 1 << 60
        ready = [one for one in list(self._stores)[:1] if one.after_step <= last_step]
        ready += [one for one in self._loads if one.after_step <= last_step and one.job_id < first_store]
        for one in list(self._on_disk)[:1]:
            is_free = one.kind is CopyKind.DEMOTE or (one.after_step <= last_step and one.job_id < first_store)
            ready += [one] if is_free else []
        return ready

    def run(self, command: CopyCommand, *, fails: bool = False) -> None:
        for jobs in (self._stores, self._loads, self._on_disk):
            if command in jobs:
                jobs.remove(command)
        self._run(command, fails=fails)

    def report(self, index: int = 0) -> CopyEvent | None:
        """One rank reports one of the jobs that are done."""
        if not self._reports:
            return None
        job = self._reports[index % len(self._reports)]
        rank = job.ranks_left.pop()
        if not job.ranks_left:
            self._reports.remove(job)
        return CopyEvent(
            job_id=job.command.job_id,
            instance_id=self._instance_id,
            rank=rank,
            is_done=job.is_done,
            num_bytes=1,
            duration_s=0.001,
            reason="" if job.is_done else "the simulator said so",
        )

    def forget(self) -> None:
        for jobs in (self._stores, self._loads, self._on_disk, self._reports):
            jobs.clear()

    # copies

    def _run(self, command: CopyCommand, *, fails: bool) -> None:
        copy = {
            CopyKind.STORE: self._store,
            CopyKind.LOAD: self._load,
            CopyKind.DEMOTE: self._demote,
            CopyKind.FETCH: self._fetch,
        }[command.kind]
        for part in command.parts:
            if not fails:
                copy(part)
            elif command.kind.is_into_pool:
                for block_id in part.block_ids.tolist():
                    self._fill(part.group, block_id, (GARBAGE, part.group))
        self._reports.append(SimJob(command, list(range(self._num_ranks)), is_done=not fails))

    def _store(self, part: CopyPart) -> None:
        cache, group = self._cache, part.group
        for block_id, units in zip(part.block_ids.tolist(), part.units.tolist(), strict=True):
            page = [(group, block_id)] * cache.parts_per_page[group]
            parts = cache.parts(group, block_id)
            found = [(*one,) for one in cache.page_of_part[parts.start : parts.stop].tolist()]
            assert found == page, "a block is stored whose memory is another group's by now"
            _put(self._memory, units, (cache.content[group][block_id].copy(), cache.writer[group][block_id].copy()))

    def _load(self, part: CopyPart) -> None:
        for block_id, units in zip(part.block_ids.tolist(), part.units.tolist(), strict=True):
            self._fill(part.group, block_id, _get(self._memory, units))

    def _demote(self, part: CopyPart) -> None:
        for units, disk_units in zip(part.units.tolist(), part.disk_units.tolist(), strict=True):
            _put(self._disk, disk_units, _get(self._memory, units))

    def _fetch(self, part: CopyPart) -> None:
        for block_id, units in zip(part.block_ids.tolist(), part.disk_units.tolist(), strict=True):
            self._fill(part.group, block_id, _get(self._disk, units))

    def _fill(self, group: int, block_id: int, content) -> None:
        assert block_id > 0, "something is loaded into the null block"
        self._cache.claim(group, [block_id])
        self._cache.content[group][block_id], self._cache.writer[group][block_id] = content


def _put(units: dict[int, object], mine: list[int], content) -> None:
    for number, unit in enumerate(mine):
        units[unit] = (number, content)


def _get(units: dict[int, object], mine: list[int]):
    """The content that all units of a block are of."""
    found = [units[unit] for unit in mine]
    assert [number for number, _ in found] == list(range(len(mine))), "units of a block are in disorder"
    contents = {id(content): content for _, content in found}
    assert len(contents) == 1, "a unit was written over while its block could be read"
    return next(iter(contents.values()))
