"""`blockferry bench survival`: its options, turned into a served deployment whose processes are killed in turn."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.cli_bench_options import JsonTarget, one_line_errors
from blockferry.cluster.launch_progress import Progress
from blockferry.cluster.shipped import find_config

SURVIVAL_HELP_END = (
    "Brings the deployment up with `blockferry serve`, asks every prompt once for its fault-free text, then kills "
    "(SIGKILL) one process at a time in the middle of streams, and waits until it is replaced.\n\n"
    "--json writes one document: command, version, machine and results, each with name, params, value, unit and "
    "runs.\n\n"
    "Names: streams_exact, streams_error (an error that says so), streams_cut (the connection ended), streams_hung, "
    "streams_wrong; answering and whole, seconds from the kill until a new request was answered and until every "
    "instance served again; longest_pause, within a stream that ended exactly. Params: victim."
)


def bench_survival(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: Annotated[Path, typer.Option(help="Deployment to break; or a shipped one.")],
    victims: Annotated[
        list[str] | None,
        typer.Option("--kill", help="A role, scheduler or api; repeat for more. Default: each role, then both."),
    ] = None,
    num_streams: Annotated[int, typer.Option("--streams", help="At the same time, under every kill.")] = 24,
    prompt_tokens: Annotated[int, typer.Option(help="Of every prompt, random.")] = 96,
    output_tokens: Annotated[int, typer.Option(help="Of every answer.")] = 96,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds, of a stream and of a recovery.")] = 60.0,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown to this file.")] = None,
    json_target: JsonTarget = None,
) -> None:
    """Kill a deployment's processes in turn under streaming requests; say what became of each."""
    from blockferry.cluster.bench.report import emit
    from blockferry.cluster.bench.survival import SurvivalConfig, markdown_of, report_of, run_survival
    from blockferry.cluster.bench.survival_victims import API, SCHEDULER, served
    from blockferry.cluster.deployment import load_deployment

    with one_line_errors():
        bench = SurvivalConfig(
            num_streams=num_streams, prompt_tokens=prompt_tokens, output_tokens=output_tokens, limit_s=limit
        )
        file = find_config(config)
        settings = load_deployment(file).config
        roles = list(dict.fromkeys(str(one.role) for one in settings.instances))
        known = [*roles, SCHEDULER, API]
        chosen = victims or known
        for one in chosen:
            if one not in known:
                raise typer.BadParameter(f"{one!r} is none of this deployment's {', '.join(known)}")
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            report = stack.enter_context(cli_output.progress_bar())
            report(Progress(phase="bringing the deployment up", done=0, total=1))
            deployment = stack.enter_context(served(file, settings.name, folder / "serve.log"))
            blows = asyncio.run(
                run_survival(
                    bench,
                    deployment.url,
                    deployment.victims(chosen),
                    lambda name: report(Progress(phase=f"killing {name}", done=0, total=1)),
                )
            )
        if markdown is not None:
            markdown.write_text(markdown_of(bench, blows), encoding="utf-8")
        emit(report_of(blows), json_target=json_target)
