"""`blockferry bench ...`: options of every benchmark, turned into its configuration; measures nothing itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure the ledger, transfers and a server.", no_args_is_help=True)

JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE]", help="Write results as JSON to FILE; without FILE, to stdout."),
]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the results.")]


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
    model: Annotated[str, typer.Option(help="Default: the first one served.")] = "",
    num_prompts: Annotated[int, typer.Option(help="Requests of each measurement.")] = 64,
    num_warmup: Annotated[int, typer.Option(help="Requests before it, not counted.")] = 2,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    range_ratio: Annotated[float, typer.Option(help="Lengths vary by this fraction.")] = 0.0,
    concurrency: Annotated[list[int] | None, typer.Option(help="Closed loop; repeat for more.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Open loop, requests per second; repeat for more.")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    max_duration: Annotated[float, typer.Option(help="Seconds after which a measurement ends.")] = 600.0,
    json_target: JsonTarget = None,
    plot: PlotFile = None,
) -> None:
    """Measure TTFT, TPOT, ITL, end-to-end latency and tokens per second of any OpenAI endpoint."""
    from blockferry.cluster.bench.report import Plot, emit
    from blockferry.cluster.bench.serve import ServeBenchConfig, run_serve_bench
    from blockferry.engine.errors import ConfigError

    loops: list[tuple[int | None, float | None]] = [(None, one) for one in rate or []]
    loops += [(one, None) for one in concurrency or ([] if rate else [1, 8, 32])]
    try:
        configs = [
            ServeBenchConfig(
                base_url=url,
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
        report = asyncio.run(run_serve_bench(configs))
        picture = None if plot is None else Plot(path=plot, x="rate_per_s" if rate else "concurrency")
        emit(report, json_target=json_target, plot=picture)
    except ValueError as error:
        raise ConfigError("", str(error)) from None
