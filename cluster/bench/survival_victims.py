"""A deployment that is served by `blockferry serve` on this machine, and its processes: to be killed, and missed.

Owns the serving process that it started, and ends it. Looks at it from outside only, as another shell does: its note,
its scheduler's status, the titles that Ray gives to processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from blockferry.cluster.bench.survival import Victim
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.run_record import RunRecord, find_record
from blockferry.cluster.status import deployments_here
from blockferry.engine.errors import BlockferryError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_STATUS_TIMEOUT_S = 3.0
_LOG_LINES = 5  # shown of a deployment that does not come up
SCHEDULER, API = "scheduler", "api"
_TITLES = {SCHEDULER: "ray::SchedulerActor", API: "ray::ApiActor"}


class NotServed(BlockferryError):
    """A deployment that was to be broken is not up."""


@contextlib.contextmanager
def served(config: Path, name: str, log: Path) -> Iterator[Served]:
    """Run `blockferry serve CONFIG` until the end of the body; what it says goes to `log`. Raises NotServed."""
    if find_record(name) is not None:
        raise NotServed(f"deployment {name!r} runs here already; stop it, or change `name`")
    with log.open("wb") as out:
        command = [sys.executable, "-c", "from blockferry.cluster.cli import main; main()", "serve", str(config)]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            yield Served(_note_of(name, process, log), process.pid)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            if process.poll() is None:
                process.kill()
                process.wait()


def _note_of(name: str, process: subprocess.Popen[bytes], log: Path) -> RunRecord:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (record := find_record(name)) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            last = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise NotServed(f"deployment {name!r} did not come up: {' | '.join(last)}")
        time.sleep(0.1)
    return record


class Served:
    """One served deployment."""

    def __init__(self, record: RunRecord, pid: int) -> None:
        self._name = record.name
        self._pid = pid
        self.url = record.url

    def victims(self, kinds: Sequence[str]) -> Iterator[Victim]:
        """The first instance of a role, SCHEDULER or API; each is looked up when it is its turn."""
        for kind in kinds:
            yield self._service(kind) if kind in _TITLES else self._worker(kind)

    def status(self) -> dict[str, Any] | None:
        """What the scheduler says of itself; None while there is none."""
        record = find_record(self._name)
        if record is None:
            raise NotServed(f"deployment {self._name!r} is not served any more")
        with contextlib.suppress(BlockferryError, OSError, TimeoutError):
            return asyncio.run(_status(record))
        return None

    def pids(self, kinds: Sequence[str]) -> dict[str, int]:
        """Processes of SCHEDULER and API. Raises NotServed where one is missing."""
        return {kind: self._service_pid(kind) for kind in kinds}

    def is_whole(self) -> bool:
        """Whether every wanted instance serves, and the HTTP server is there."""
        status = self.status()
        return status is not None and bool(status["healthy"]) and self._pid_of(API) is not None

    def _service(self, kind: str) -> Victim:
        pid = self._service_pid(kind)
        return Victim(
            name=kind,
            kill=lambda: os.kill(pid, signal.SIGKILL),
            is_replaced=lambda: self._pid_of(kind) not in {None, pid} and self.is_whole(),
        )

    def _worker(self, role: str) -> Victim:
        (here,) = [one for one in deployments_here() if one["deployment"] == self._name]
        instances = [one["instance_id"] for one in here["instances"] if one["role"] == role]
        if not instances:
            raise NotServed(f"deployment {self._name!r} has no instance of role {role}")
        victim = instances[0]
        pid = next(one["pid"] for one in here["workers"] if one["instance_id"] == victim)
        return Victim(
            name=f"{role} worker",
            kill=lambda: os.kill(pid, signal.SIGKILL),
            is_replaced=lambda: self._is_gone(victim) and self.is_whole(),
        )

    def _is_gone(self, instance_id: str) -> bool:
        status = self.status()
        return status is not None and all(one["instance_id"] != instance_id for one in status["instances"])

    def _service_pid(self, kind: str) -> int:
        pid = self._pid_of(kind)
        if pid is None:
            raise NotServed(f"no process {_TITLES[kind]} belongs to deployment {self._name!r}")
        return pid

    def _pid_of(self, kind: str) -> int | None:
        for process in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "".join(process.cmdline()[:1]).startswith(_TITLES[kind]) and process.is_running():
                    return int(process.pid)
        return None


async def _status(record: RunRecord) -> dict[str, Any]:
    client = ZmqEngineClient(record.client)
    await client.connect(timeout_s=_STATUS_TIMEOUT_S)
    try:
        return await client.status()
    finally:
        client.close()
