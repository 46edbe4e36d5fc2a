"""A deployment from start to end as one context: Ray, launch, the note for other shells, and taking it all down.

Used by the commands that need a deployment; leaves no process, no file and no reservation behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from blockferry.cluster import launch, ray_session, run_record
from blockferry.cluster.check import check_machine, check_weights
from blockferry.cluster.deployment import Deployment
from blockferry.cluster.interrupt import stop_signals
from blockferry.cluster.launch import Running
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.listen import bind
from blockferry.cluster.placement import name_instances, total_resources
from blockferry.cluster.ray_session import RaySession
from blockferry.cluster.run_record import RunRecord
from blockferry.engine.errors import BlockferryError, ConfigError


class AlreadyRunningError(BlockferryError):
    """A deployment of this name runs on this machine already."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to bring up."""

    deployment: Deployment
    file: Path
    address: str | None  # of a running Ray cluster; None: start a local one
    with_api: bool


@contextlib.contextmanager
def deployed(wish: Wish, report: Report) -> Iterator[Running]:
    """A running deployment; everything is stopped at the end, also after a signal.

    Raises AlreadyRunningError, ConfigError, ListenError, RaySessionError, PlacementError, LaunchError.
    """
    config = wish.deployment.config
    existing = run_record.find_record(config.name)
    if existing is not None:
        raise AlreadyRunningError(
            f"deployment {config.name!r} already runs here (process {existing.pid}{_at(existing.url)}); "
            "stop that one, or change `name`"
        )
    opened = _Opened()
    try:
        with stop_signals.noted():
            _open(wish, report, opened)
            stop_signals.check()
        assert opened.running is not None
        yield opened.running
    finally:
        with stop_signals.noted():  # every wait of a clean-up has a limit: let it finish
            opened.close()
            stop_signals.forget()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Opened:
    """What has to be closed, in order of opening. Owned by deployed()."""

    session: RaySession | None = None
    running: Running | None = None
    record: Path | None = None

    def close(self) -> None:
        if self.record is not None:
            self.record.unlink(missing_ok=True)
        if self.running is not None:
            self.running.close("the deployment is being stopped")
        if self.session is not None:
            self.session.close()


def _open(wish: Wish, report: Report, opened: _Opened) -> None:
    config = wish.deployment.config
    # what can be known at once is reported before the half minute that everything else takes
    if wish.with_api:
        bind(config.api.host, config.api.port).close()
    findings = [*check_weights(config.model.path)]
    if wish.address is None:  # all of it runs here
        findings += check_machine(wish.deployment)
    for finding in findings:
        if finding.is_error:
            raise ConfigError(finding.subject, finding.message)
    report(Progress(phase="starting Ray" if wish.address is None else "connecting to Ray", done=0, total=1))
    opened.session = _open_session(wish)
    stop_signals.renew()  # Ray's core has put a handler that aborts
    stop_signals.check()
    opened.running = launch.launch(wish.deployment, report, with_api=wish.with_api)
    opened.record = run_record.write_record(
        RunRecord(
            name=config.name,
            config_file=str(wish.file.resolve()),
            model_path=str(config.model.path),
            ray_address=opened.session.address,
            ray_auth_mode=opened.session.auth_mode,
            client_endpoint=opened.running.client_endpoint,
            url=opened.running.url,
            pid=os.getpid(),
        )
    )


def _open_session(wish: Wish) -> RaySession:
    if wish.address is not None:
        return ray_session.connect(wish.address)
    return ray_session.start_local(total_resources(name_instances(wish.deployment.config)))


def _at(url: str) -> str:
    return f", {url}" if url else ""
