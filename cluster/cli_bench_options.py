"""What several `blockferry bench` commands share: where results go, refusals as one line, a deployment of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockferry.cluster import cli_output
from blockferry.connectors.base import ConnectorError
from blockferry.engine.errors import ConfigError

if TYPE_CHECKING:
    from blockferry.cluster.deployment import Deployment
    from blockferry.cluster.running import Running

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def check_json_target(target: str | None) -> str | None:
    """Refuse a --json FILE that cannot be written, before anything is measured."""
    if target not in {None, "-"}:
        _check_writable(Path(str(target)))
    return target


def check_plot_file(file: Path | None) -> Path | None:
    """Refuse a --plot FILE that cannot be drawn, before anything is measured."""
    if file is None:
        return None
    _check_writable(file)
    if file.suffix.lower() not in PICTURE_SUFFIXES:
        raise typer.BadParameter(f"{file} does not end in one of {', '.join(PICTURE_SUFFIXES)}; name a picture")
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("drawing needs matplotlib; install blockferry[plot]")
    return file


def _check_writable(file: Path) -> None:
    """Try it where the file does not exist, and leave nothing behind."""
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a directory; name a file in it")
    if file.exists():
        if not os.access(file, os.W_OK):
            raise typer.BadParameter(f"{file} cannot be written; name another file")
        return
    try:
        file.touch()
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}; name another file") from None
    file.unlink()


JsonTarget = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        callback=check_json_target,
        help="Write results as JSON to FILE; without FILE, to stdout.",
    ),
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", callback=check_plot_file, help="Draw the results.")
]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A benchmark's refusal of its options, or of the moment, as an error of the command."""
    try:
        yield
    except (ValueError, ConnectorError) as error:
        raise ConfigError("", str(error)) from None


def number_or_text(value: str) -> int | str:
    """A size as yaml_reader.parse_size takes it: a bare number of bytes, or text with a unit."""
    return int(value) if value.isdigit() else value


@contextlib.contextmanager
def own_deployment(deployment: Deployment, file: Path) -> Iterator[Running]:
    """A deployment of a benchmark's own, with its HTTP server, for as long as it runs."""
    from blockferry.cluster.session import Wish, deployed

    with contextlib.ExitStack() as stack:
        with cli_output.progress_bar() as report:
            wish = Wish(deployment=deployment, file=file, address=None, with_api=True)
            running = stack.enter_context(deployed(wish, report))
        yield running
