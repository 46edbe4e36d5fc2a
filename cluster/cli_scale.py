"""`blockferry scale` and `blockferry restart`: changes of a deployment that another shell of this machine serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.control import ControlError, command
from blockferry.cluster.run_record import read_records
from blockferry.engine.config import Role
from blockferry.engine.errors import ConfigError

Deployment = Annotated[str, typer.Argument(metavar="DEPLOYMENT", help="Its name; see `blockferry status`.")]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        min=0.0,
        help="Seconds that requests on a leaving instance may go on there; then others take them over.",
    ),
]
DRAIN_TIMEOUT_S = 60.0


def scale(
    deployment: Deployment,
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=COUNT...", help="Such as prefill=2 decode=1.")],
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S,
) -> None:
    """Change how many instances of each role serve. New ones load first, leaving ones lose no request."""
    wanted = dict(_parse(text) for text in counts)
    _give(deployment, "scale", {"counts": wanted, "drain_timeout_s": drain_timeout})


def restart(deployment: Deployment, drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S) -> None:
    """Replace every instance by a fresh one, one at a time, without losing a request.

    Where there is no room for both, an instance is drained before its replacement starts.
    """
    _give(deployment, "restart", {"drain_timeout_s": drain_timeout})


def _parse(text: str) -> tuple[str, int]:
    role, _, count = text.partition("=")
    if role not in list(Role) or not count.isdecimal():
        raise ConfigError(text, f"is no ROLE=COUNT; write one of {', '.join(f'{one}=1' for one in Role)}")
    return role, int(count)


def _give(deployment: str, name: str, arguments: Mapping[str, Any]) -> None:
    records = {record.name: record for record in read_records()}
    record = records.get(deployment)
    if record is None:
        known = f"running here: {', '.join(records)}" if records else "none runs here"
        raise ControlError(f"no deployment is named {deployment!r}; {known}")
    if not record.control:
        raise ControlError(f"deployment {deployment!r} is not run by `blockferry serve`, which takes such commands")
    cli_output.print_line(command(Path(record.control), name, arguments, cli_output.note))
