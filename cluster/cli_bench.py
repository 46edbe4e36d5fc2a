"""`blockferry bench ...`: options of every benchmark, turned into its configuration; measures nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.cli_bench_options import JsonTarget, PlotFile, one_line_errors, own_deployment
from blockferry.cluster.cli_draft_steps import DRAFT_STEPS_HELP_END, bench_draft_steps
from blockferry.cluster.cli_handoff import HANDOFF_HELP_END, bench_handoff
from blockferry.cluster.cli_offload import OFFLOAD_HELP_END, bench_offload
from blockferry.cluster.cli_speculation import SPECULATION_HELP_END, bench_speculation
from blockferry.cluster.cli_survival import SURVIVAL_HELP_END, bench_survival
from blockferry.cluster.cli_transfer import TRANSFER_HELP_END, bench_transfer
from blockferry.cluster.launch_progress import Progress
from blockferry.cluster.shipped import find_config
from blockferry.engine.errors import ConfigError

if TYPE_CHECKING:
    from blockferry.cluster.bench.serve import CeilingRows
    from blockferry.cluster.running import Running

app = typer.Typer(help="Measure the ledger, transfers, offload and a server.", no_args_is_help=True)

_KV_HELP_END = (
    "--json writes one document: command, version, machine and results, each with name, params, value (the median of "
    "runs), unit and runs.\n\n"
    "Names and their params: decode_step: rows, groups, mix, block_size. scheduler_step: rows, groups, block_size, "
    "drafts (most of a row), is_adaptive, acceptance. ratio, with drafts over without: of (scheduler_step) and its "
    "params. route: tokens, held (by all instances or none), instances, block_size. "
    "prefill: tokens, shared (cached share of the prompt), groups, mix, block_size. churn: blocks, requests, groups, "
    "mix, block_size. pool_start: blocks, groups. pool_bytes: blocks, groups, block_size."
)


def fill_json_target(arguments: list[str]) -> list[str]:
    """Give a `--json` that has no FILE the target "-", stdout; other commands' arguments stay as they are."""
    if arguments[:1] != ["bench"]:
        return arguments
    filled = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        filled.append(argument)
        if argument == "--json" and following.startswith("--"):
            filled.append("-")
    return filled


@app.command("serve")
def bench_serve(  # noqa: PLR0913, PLR0917 - one parameter per option
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    config: Annotated[Path | None, typer.Option(help="Deployment to bring up and measure instead of --url.")] = None,
    is_against_ceiling: Annotated[
        bool, typer.Option("--ceiling", help="With --config: compare with the model's linear layers alone.")
    ] = False,
    model: Annotated[str, typer.Option(help="Default: the first one served.")] = "",
    num_prompts: Annotated[int, typer.Option(help="Requests of each measurement.")] = 64,
    num_warmup: Annotated[int, typer.Option(help="Requests before it, not counted.")] = 2,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    range_ratio: Annotated[float, typer.Option(help="Lengths vary by this fraction.")] = 0.0,
    concurrency: Annotated[list[int] | None, typer.Option(help="Closed loop; repeat for more.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Open loop, requests per second; repeat for more.")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    num_runs: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this Mooncake-style JSONL instead: timestamp, *_length, hash_ids.")
    ] = None,
    trace_scale_len: Annotated[int, typer.Option(help="Tokens of a prompt for each 512 of the trace.")] = 512,
    trace_speed: Annotated[float, typer.Option(help="Times as fast as the trace's clock.")] = 1.0,
    trace_limit: Annotated[int, typer.Option(help="Requests of the trace, the first ones.")] = 1000,
    router: Annotated[
        list[str] | None, typer.Option(help="With --trace and --config: the router's policy; repeat to compare.")
    ] = None,
    max_duration: Annotated[float, typer.Option(help="Seconds after which a measurement ends.")] = 600.0,
    json_target: JsonTarget = None,
    plot: PlotFile = None,
) -> None:
    """Measure TTFT, TPOT, ITL, end-to-end latency and tokens per second of any OpenAI endpoint."""
    from blockferry.cluster.bench.report import emit
    from blockferry.cluster.bench.serve import ServeBenchConfig, plot_of, run_serve_bench
    from blockferry.cluster.deployment import load_deployment

    if router and trace is None:
        raise ConfigError("--router", "compares policies on a trace; give --trace FILE.jsonl too")
    if trace is not None:
        if plot is not None:
            raise ConfigError("--plot", "a replay has nothing to draw over; leave it out")
        from blockferry.cluster.bench.replay import ReplayConfig
        from blockferry.cluster.cli_replay import replay_trace

        with one_line_errors():
            wanted = ReplayConfig(
                base_url=url,
                trace=trace,
                model=model,
                block_tokens=trace_scale_len,
                speed=trace_speed,
                limit=trace_limit,
                seed=seed,
                max_duration_s=max_duration,
            )
        replay_trace(wanted, config=config, routers=router or [], json_target=json_target)
        return
    loops: list[tuple[int | None, float | None]] = [(None, one) for one in rate or []]
    loops += [(one, None) for one in concurrency or ([] if rate else [1, 8, 32])]
    if is_against_ceiling and config is None:
        raise ConfigError("--ceiling", "needs --config, which tells the model, its dtype and its threads")
    with one_line_errors(), contextlib.ExitStack() as stack:
        file = None if config is None else find_config(config)
        served = None if file is None else stack.enter_context(own_deployment(load_deployment(file), file))
        configs = [
            ServeBenchConfig(
                base_url=url if served is None else served.url,
                model=model,
                num_prompts=num_prompts,
                num_warmup=num_warmup,
                input_len=input_len,
                output_len=output_len,
                range_ratio=range_ratio,
                concurrency=limit,
                rate_per_s=rate_per_s,
                seed=seed,
                max_duration_s=max_duration,
            )
            for limit, rate_per_s in loops
        ]
        ceiling = _linear_ceiling(served) if served is not None and is_against_ceiling else None
        report = asyncio.run(run_serve_bench(configs, num_runs=num_runs, ceiling=ceiling))
        picture = None if plot is None else plot_of(configs, plot)
        emit(report, json_target=json_target, plot=picture)


@app.command("kv", epilog=_KV_HELP_END)
def bench_kv(
    num_runs: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 5,
    json_target: JsonTarget = None,
    plot: PlotFile = None,
) -> None:
    """Time the KV ledger and the scheduler alone: decode steps, prefill, churn, start and size. About a minute."""
    from blockferry.cluster.bench.kv import KvBenchConfig, run_kv_bench
    from blockferry.cluster.bench.report import Plot, emit

    with cli_output.progress_bar() as report, one_line_errors():
        measured = run_kv_bench(
            KvBenchConfig(num_runs=num_runs), lambda name: report(Progress(phase=name, done=0, total=1))
        )
    names = ("decode_step", "scheduler_step")
    with one_line_errors():
        emit(measured, json_target=json_target, plot=None if plot is None else Plot(path=plot, x="rows", names=names))


app.command("draft-steps", epilog=DRAFT_STEPS_HELP_END)(bench_draft_steps)
app.command("handoff", epilog=HANDOFF_HELP_END)(bench_handoff)
app.command("offload", epilog=OFFLOAD_HELP_END)(bench_offload)
app.command("speculation", epilog=SPECULATION_HELP_END)(bench_speculation)
app.command("survival", epilog=SURVIVAL_HELP_END)(bench_survival)
app.command("transfer", epilog=TRANSFER_HELP_END)(bench_transfer)


def _linear_ceiling(served: Running) -> CeilingRows:
    from blockferry.cluster.bench.ceiling import LinearCeiling

    return LinearCeiling(served.config)
