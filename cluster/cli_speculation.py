"""`blockferry bench speculation`: its options, turned into two deployments that are brought up and asked in turn."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.cli_bench_options import JsonTarget, one_line_errors
from blockferry.cluster.launch_progress import Progress
from blockferry.cluster.shipped import find_config
from blockferry.engine.errors import ConfigError

SPECULATION_HELP_END = (
    "Brings the deployment up twice on one local Ray cluster, with and without its `speculation`, and asks both in "
    "turn for the same answers, greedily and one at a time.\n\n"
    "--json writes one document: command, version, machine and results, each with name, params, value (the median of "
    "runs), unit and runs, one per answer.\n\n"
    "Names: decode_rate, of the tokens after the first; ttft; output_tokens; speed_up, of decode_rate, answer by "
    "answer; overall_speed_up, of all answers' tokens over their time together; unequal_answers, whose text differs "
    "(0, unless a near-tie of numbers was decided otherwise); draft_acceptance; tokens_per_step, of steps that "
    "verified drafts. Params: deployment (plain, drafting), output_len."
)


def bench_speculation(
    config: Annotated[Path, typer.Option(help="Deployment with a `speculation` section; or a shipped one.")],
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts, one a line. Default: some questions and tasks.")
    ] = None,
    output_len: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    num_runs: Annotated[int, typer.Option("--runs", min=1, help="Times that every prompt is asked.")] = 1,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which no new round starts.")] = 600.0,
    json_target: JsonTarget = None,
) -> None:
    """Time answers with and without drafts, one at a time: tokens per second, acceptance, tokens per step."""
    from blockferry.cluster.bench.report import emit
    from blockferry.cluster.bench.speculation import (
        PROMPTS,
        SpeculationBenchConfig,
        run_speculation_bench,
        speculation_deployments,
    )
    from blockferry.cluster.deployment import load_deployment
    from blockferry.cluster.session import Wish, deployed_together

    with one_line_errors():
        bench = SpeculationBenchConfig(
            prompts=PROMPTS if prompts is None else _read_prompts(prompts),
            output_len=output_len,
            num_runs=num_runs,
            time_limit_s=time_limit,
        )
        file = find_config(config)
        deployments = speculation_deployments(load_deployment(file))
        wishes = [Wish(deployment=one, file=file, address=None, with_api=True) for one in deployments.values()]
        with contextlib.ExitStack() as stack:
            report = stack.enter_context(cli_output.progress_bar())
            running = stack.enter_context(deployed_together(wishes, report))
            urls = {name: one.url for name, one in zip(deployments, running, strict=True)}
            measured = asyncio.run(
                run_speculation_bench(
                    bench, urls, lambda done, total: report(Progress(phase="rounds", done=done, total=total))
                )
            )
        emit(measured, json_target=json_target)


def _read_prompts(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", f"{file} cannot be read: {error}") from None
    found = tuple(line for line in lines if line.strip())
    if not found:
        raise ConfigError("--prompts", f"{file} holds no prompt; write one a line")
    return found
