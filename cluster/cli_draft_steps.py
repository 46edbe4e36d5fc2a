"""`blockferry bench draft-steps`: its options, turned into ways to draft that take turns in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.cli_bench_options import JsonTarget, one_line_errors
from blockferry.cluster.launch_progress import Progress
from blockferry.cluster.shipped import find_config

DRAFT_STEPS_HELP_END = (
    "Everything runs in this process, without Ray or HTTP; `bench speculation` measures a served deployment.\n\n"
    "--json writes one document: command, version, machine and results, each with name, params, value (the median of "
    "runs), unit and runs, one per round over all prompts.\n\n"
    "Names: rate, of the tokens after the first; ratio, of rate to that without drafts in the same round; tokens of a "
    "step; step, and of it forward, sampling, drafting and control (the scheduler and the wire); held_1, held_2, ..., "
    "the share of verified drafts at that position that were accepted; unequal, answers that are not those without "
    "drafts. Params: method (off, ngram, mtp, mtp+lookup, or an oracle's probability), drafts, adaptive, "
    "output_len, temperature."
)


def bench_draft_steps(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: Annotated[Path, typer.Option(help="Deployment whose first instance is measured; or a shipped one.")] = Path(
        "smollm2-mixed-cpu.yaml"
    ),
    head: Annotated[str, typer.Option(help="Folder or shipped name of a head that drafts; own: the model's.")] = "",
    drafts: Annotated[list[int] | None, typer.Option(help="Of a step; repeat for more. Default: 1, 2, 3.")] = None,
    oracle: Annotated[
        list[float] | None, typer.Option(help="Also drafts that are right with this probability; repeat for more.")
    ] = None,
    is_adaptive: Annotated[bool, typer.Option("--adaptive", help="Draft fewer where they are not accepted.")] = False,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    num_runs: Annotated[int, typer.Option("--runs", min=1, help="Rounds over all prompts.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Of torch. Default: the deployment's.")] = 0,
    is_cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="On one thread, by its own clock, which other programs disturb less.")
    ] = False,
    json_target: JsonTarget = None,
) -> None:
    """Time one request's steps by who drafts and how many: tokens per second, acceptance, where the time goes."""
    from blockferry.cluster.bench.draft_steps import DraftStepsConfig, run_draft_steps_bench
    from blockferry.cluster.bench.draft_ways import one_instance, ways_to_draft
    from blockferry.cluster.bench.report import emit
    from blockferry.cluster.deployment import load_deployment

    with one_line_errors(), cli_output.progress_bar() as report:
        deployment = one_instance(load_deployment(find_config(config)), num_threads=1 if is_cpu_time else threads)
        bench = DraftStepsConfig(
            ways=ways_to_draft(deployment, head, drafts or [1, 2, 3], is_adaptive=is_adaptive),
            oracle_shares=oracle or (),
            output_len=output_len,
            num_runs=num_runs,
            temperature=temperature,
            is_cpu_time=is_cpu_time,
        )
        measured = run_draft_steps_bench(
            deployment, bench, lambda done, total: report(Progress(phase="answers", done=done, total=total))
        )
    with one_line_errors():
        emit(measured, json_target=json_target)
