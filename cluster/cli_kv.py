"""`blockferry kv ...`: the KV ledger from the command line. Reads files and prints; the ledger's own code replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from blockferry.cluster import cli_output
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.engine.kv.replay_checks import check_traces
from blockferry.engine.kv.replay_planning import replay_planning
from blockferry.engine.kv.replay_planning_checks import check_cases
from blockferry.engine.kv.replay_report import CaseOutcome, ReplayReport, summarize
from blockferry.engine.kv.replay_traces import ReplayLevel, replay_trace

app = typer.Typer(help="Look into the KV ledger.", no_args_is_help=True)

_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {"traces": check_traces, "cases": check_cases}


_HELP_END = (
    "--json prints one document: file, level, note (null, or what the level means for this file), cases, matched, "
    'families (name: cases, matched) and first_mismatch (null, or "NAME, ...: FIELD is X, recorded Y").\n\n'
    "Exits with 0 if all agree, with 1 if any case differs, and with 2 if the file is not a recording."
)


@app.command("replay", epilog=_HELP_END)
def replay(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Recorded traces or planning cases, as JSON."),
    ],
    level: Annotated[
        ReplayLevel,
        typer.Option(
            help="contract: decisions and counts; strict: block ids, keys and events too. "
            "Planning cases know contract only."
        ),
    ] = ReplayLevel.CONTRACT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
    ] = False,
) -> None:
    """Replay recorded cases against the ledger or the uniform planner; exits with 1 if any differs."""
    try:
        document = _read(file)
        with cli_output.progress_bar() as progress:
            report = _replay(document, file, level, progress)
    except ValueError as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="'FILE'") from None
    if as_json:
        cli_output.print_json(report.as_json())
    else:
        _print(report)
    if report.matched < report.cases:
        raise typer.Exit(1)


def _read(file: Path) -> dict[str, Any]:
    """The file's document, checked. Raises ValueError for what is not a recording."""
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply; no recording is nested more than 10 deep") from None
    kinds = [kind for kind in _CHECKS if isinstance(document, dict) and kind in document]
    if len(kinds) != 1:
        raise ValueError('it must have either a list "traces" or a list "cases"; give a recording of one or the other')
    _CHECKS[kinds[0]](document)
    return dict(document)


def _replay(document: dict[str, Any], file: Path, level: ReplayLevel, progress: Report) -> ReplayReport:
    if "traces" not in document:
        return replay_planning(document, file=str(file))
    outcomes = []
    for number, trace in enumerate(document["traces"]):
        family = str(trace["id"]).rpartition("-")[0]
        progress(Progress(phase=family, done=number, total=len(document["traces"])))
        outcomes.append(CaseOutcome(family=family, mismatch=replay_trace(trace, level)))
    return summarize(outcomes, file=str(file), level=level.value)


def _print(report: ReplayReport) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("family")
    for heading in ("cases", "matched"):
        table.add_column(heading, justify="right")
    for family, count in report.families.items():
        table.add_row(
            family, str(count.cases), str(count.matched), style="red" if count.matched < count.cases else None
        )
    table.add_section()
    table.add_row("all", str(report.cases), str(report.matched))
    cli_output.show(table)
    if report.note is not None:
        cli_output.print_line(f"\nlevel {report.level}: {report.note}")
    if report.first_mismatch is not None:
        cli_output.print_line(f"\nfirst mismatch at level {report.level}: {report.first_mismatch}")
