"""`blockferry bench offload`: its options, turned into copies and into two deployments that are asked in turn."""

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

OFFLOAD_HELP_END = (
    "Copies blocks between a pool and a memory tier, then brings a deployment up twice on one local Ray cluster, with "
    "and without offload, in a pool too small for its conversations, and lets them return in turn.\n\n"
    "--json writes one document: command, version, machine and results, each with name, params, value (the median of "
    "runs), unit and runs.\n\n"
    "Names: store, load, memcpy and ratio (params pattern, block_bytes, blocks, of): GiB/s through the connector, of "
    "plain memcpy of the same runs, and their quotient. ttft (params offload, conversations, prompt_tokens, "
    "pool_share) of conversations that return, and ratio (of ttft): how many times longer it is without offload; "
    "same_answers, the share of greedy answers whose text is the same on both: 1 with dtype float32."
)


def bench_offload(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: Annotated[Path, typer.Option(help="Mixed deployment; its first instance is measured.")] = Path(
        "smollm2-mixed-cpu.yaml"
    ),
    num_runs: Annotated[int, typer.Option("--runs", min=1, help="Of every copy; the median counts.")] = 9,
    conversations: Annotated[int, typer.Option(min=0, help="That return in turn; 0: copies only.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Of a conversation's first turn, random.")] = 1024,
    turns: Annotated[int, typer.Option(min=1, help="That come back of each conversation.")] = 2,
    pool_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the conversations that the pool holds.")
    ] = 0.25,
    cpu_gib: Annotated[float, typer.Option(min=0.001, help="Memory of the tier.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    json_target: JsonTarget = None,
) -> None:
    """Measure stores and loads against memcpy, and the first token of conversations that return from memory."""
    from blockferry.cluster.bench.offload_copies import CopyBenchConfig, run_copy_bench
    from blockferry.cluster.bench.offload_return import ReturnBenchConfig, return_deployments, run_return_bench
    from blockferry.cluster.bench.report import Report, emit
    from blockferry.cluster.deployment import load_deployment
    from blockferry.cluster.session import Wish, deployed_together

    with one_line_errors(), contextlib.ExitStack() as stack:
        report = stack.enter_context(cli_output.progress_bar())
        report(Progress(phase="copies", done=0, total=1))
        rows = run_copy_bench(CopyBenchConfig(num_runs=num_runs))
        if conversations:
            bench = ReturnBenchConfig(
                num_conversations=conversations,
                prompt_tokens=prompt_tokens,
                num_turns=turns,
                pool_share=pool_share,
                cpu_gib=cpu_gib,
                seed=seed,
            )
            file = find_config(config)
            deployments = return_deployments(load_deployment(file), bench)
            wishes = [Wish(deployment=one, file=file, address=None, with_api=True) for one in deployments.values()]
            running = stack.enter_context(deployed_together(wishes, report))
            urls = {name: one.url for name, one in zip(deployments, running, strict=True)}
            rows += asyncio.run(
                run_return_bench(
                    bench, urls, lambda done, total: report(Progress(phase="turns", done=done, total=total))
                )
            )
        measured = Report(command="bench offload", results=rows)
    with one_line_errors():
        emit(measured, json_target=json_target)
