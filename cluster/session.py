"""Deployments from start to end as one context: Ray, launch, the note for other shells, and taking it all down.

Used by the commands that need a deployment; leaves no process, no file and no reservation behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from blockferry.cluster import launch, ray_session, run_record
from blockferry.cluster.check import check_machine, check_weights
from blockferry.cluster.deployment import Deployment
from blockferry.cluster.interrupt import stop_signals
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.listen import bind
from blockferry.cluster.placement import name_instances, total_resources
from blockferry.cluster.ray_session import RaySession
from blockferry.cluster.run_record import RunRecord
from blockferry.cluster.running import Running
from blockferry.connectors.transport.hosts import Hosts
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
    with deployed_together([wish], report) as (running,):
        yield running


@contextlib.contextmanager
def deployed_together(wishes: Sequence[Wish], report: Report) -> Iterator[list[Running]]:
    """Several deployments on one Ray session, that of the first wish's address. Raises as deployed() does."""
    for wish in wishes:
        existing = run_record.find_record(wish.deployment.config.name)
        if existing is not None:
            raise AlreadyRunningError(
                f"deployment {existing.name!r} already runs here (process {existing.pid}{_at(existing.url)}); "
                "stop that one, or change `name`"
            )
    opened = _Opened()
    try:
        with stop_signals.noted():
            _open(wishes, report, opened)
            stop_signals.check()
        yield opened.running
    finally:
        with stop_signals.noted():  # every wait of a clean-up has a limit: let it finish
            opened.close()
            stop_signals.forget()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Opened:
    """What has to be closed, in order of opening. Owned by deployed_together()."""

    session: RaySession | None = None
    running: list[Running] = dataclasses.field(default_factory=list)
    records: list[Path] = dataclasses.field(default_factory=list)

    def close(self) -> None:
        for record in self.records:
            record.unlink(missing_ok=True)
        for running in reversed(self.running):
            running.close("the deployment is being stopped")
        if self.session is not None:
            self.session.close()


def _open(wishes: Sequence[Wish], report: Report, opened: _Opened) -> None:
    # what can be known at once is reported before the half minute that everything else takes
    for wish in wishes:
        _check(wish)
    address = wishes[0].address
    report(Progress(phase="starting Ray" if address is None else "connecting to Ray", done=0, total=1))
    if address is not None:
        opened.session = ray_session.connect(address)
    else:
        placed = [instance for wish in wishes for instance in name_instances(wish.deployment.config)]
        opened.session = ray_session.start_local(total_resources(placed))
    stop_signals.renew()  # Ray's core has put a handler that aborts
    # nobody else joins a cluster of our own
    hosts = Hosts.ONE if opened.session.is_local else Hosts.MANY
    for wish in wishes:
        stop_signals.check()
        running = launch.launch(wish.deployment, report, hosts=hosts, with_api=wish.with_api)
        opened.running.append(running)
        opened.records.append(_record(wish, running, opened.session))


def _check(wish: Wish) -> None:
    config = wish.deployment.config
    if wish.with_api:
        bind(config.api.host, config.api.port).close()
    findings = [*check_weights(config.model.path)]
    if wish.address is None:  # all of it runs here
        findings += check_machine(wish.deployment)
    for finding in findings:
        if finding.is_error:
            raise ConfigError(finding.subject, finding.message)


def _record(wish: Wish, running: Running, session: RaySession) -> Path:
    config = wish.deployment.config
    return run_record.write_record(
        RunRecord(
            name=config.name,
            config_file=str(wish.file.resolve()),
            model_path=str(config.model.path),
            ray_address=session.address,
            ray_auth_mode=session.auth_mode,
            client_endpoint=running.client_endpoint.url,
            secret=running.client_endpoint.secret.text,
            url=running.url,
            pid=os.getpid(),
        )
    )


def _at(url: str) -> str:
    return f", {url}" if url else ""
