"""`blockferry bench handoff`: its options, turned into deployments that are brought up and asked in turn."""

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

HANDOFF_HELP_END = (
    "Brings all deployments up on one local Ray cluster, each with the baseline's num_threads, and asks them in turn, "
    "one request at a time.\n\n"
    "--json writes one document: command, version, machine and results, each with name, params, value (the median of "
    "runs), unit and runs.\n\n"
    "Names: ttft; second_token, from sending to the first token that is decoded; ratio and ratio_of_best (each side's "
    "best run) to the mixed deployment, of what the parameter `of` says; transfer_bytes; exposed_transfer, the part of "
    "the transfer that the request waited for; saved_bytes, which needed no ferrying. Params: deployment (mixed, "
    "pd_after_prefill, pd_overlapped), prompt_tokens, of."
)


def bench_handoff(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: Annotated[Path, typer.Option(help="Deployment with prefill and decode apart; or a shipped one.")],
    baseline: Annotated[
        Path | None, typer.Option(help="Mixed deployment of the same model. Default: like the prefill instance.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of every prompt, random.")] = 1500,
    num_runs: Annotated[int, typer.Option("--runs", min=1, help="Rounds; the median counts.")] = 9,
    num_warmup: Annotated[int, typer.Option(min=0, help="Rounds before, not counted.")] = 2,
    is_repeated: Annotated[
        bool, typer.Option("--same-prompt", help="The same prompt in all rounds, so that prefix caches help.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which no new round starts.")] = 600.0,
    json_target: JsonTarget = None,
) -> None:
    """Time the first and the second token of a prompt that is handed over, against a mixed deployment."""
    from blockferry.cluster.bench.handoff import HandoffBenchConfig, Target, run_handoff_bench
    from blockferry.cluster.bench.handoff_deployments import handoff_deployments, mixed_like
    from blockferry.cluster.bench.report import emit
    from blockferry.cluster.deployment import load_deployment
    from blockferry.cluster.session import Wish, deployed_together

    with one_line_errors():
        bench = HandoffBenchConfig(
            prompt_tokens=prompt_tokens,
            num_runs=num_runs,
            num_warmup=num_warmup,
            seed=seed,
            time_limit_s=time_limit,
            is_repeated=is_repeated,
        )
        file = find_config(config)
        apart = load_deployment(file)
        mixed = mixed_like(apart) if baseline is None else load_deployment(find_config(baseline))
        deployments = handoff_deployments(apart, mixed, num_prompt_tokens=prompt_tokens)
        wishes = [Wish(deployment=one, file=file, address=None, with_api=True) for one in deployments.values()]
        with contextlib.ExitStack() as stack:
            report = stack.enter_context(cli_output.progress_bar())
            running = stack.enter_context(deployed_together(wishes, report))
            targets = [Target(name=name, url=one.url) for name, one in zip(deployments, running, strict=True)]
            measured = asyncio.run(
                run_handoff_bench(
                    bench, targets, lambda done, total: report(Progress(phase="rounds", done=done, total=total))
                )
            )
        emit(measured, json_target=json_target)
