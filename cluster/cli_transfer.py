"""`blockferry bench transfer`: its options, turned into a configuration and into ends; measures nothing itself."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.cli_bench_options import JsonTarget, PlotFile, number_or_text, one_line_errors
from blockferry.cluster.launch_progress import Progress
from blockferry.cluster.yaml_reader import parse_size

if TYPE_CHECKING:
    from blockferry.cluster.bench.report import Report
    from blockferry.cluster.bench.transfer import OnCase, TransferBenchConfig

TRANSFER_HELP_END = (
    "Without --src and --dst two processes of this machine exchange blocks; with them, actors on those nodes.\n\n"
    "--json writes one document: command, version, machine and results, each with name, params, value (the median of "
    "runs), unit and runs.\n\n"
    "Names: transfer, ceiling (shm: memcpy; tcp: the better plain socket), ratio, ratio_of_best (each side's best run: "
    "what other work on the machine disturbs least), block_time, cpu (of the transfer threads of both sides), and each "
    "ceiling by itself: memcpy, or socket_pieces (one send per piece) and socket_contiguous (large sends that spin). "
    "Where short runs are packed for a network: unpacked (a one-sided read or write per run) and gain (transfer over "
    "unpacked). Params: path, pattern, piece_bytes, mode, and tp, layout, block_size, model, src, dst where they were "
    "given."
)


def bench_transfer(  # noqa: PLR0913, PLR0917 - one parameter per option
    path: Annotated[list[str] | None, typer.Option(help="shm or tcp; repeat for more. Default: all possible.")] = None,
    pattern: Annotated[list[str] | None, typer.Option(help="contiguous or scattered.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="push or pull.")] = None,
    piece: Annotated[list[str] | None, typer.Option(help="Size of a block, such as 64KiB.")] = None,
    model_shape: Annotated[
        str, typer.Option(help="Blocks of this model instead of pieces, such as smollm2-135m, or a config.json.")
    ] = "",
    size: Annotated[str, typer.Option(help="Of one transfer.")] = "64MiB",
    count: Annotated[int, typer.Option(min=0, help="Blocks of one transfer, instead of --size.")] = 0,
    tp: Annotated[str, typer.Option(help="Ranks of the source and of the destination, which share the heads.")] = "1:1",
    layout: Annotated[str, typer.Option(help="Of both pools, or SRC:DST.")] = "BHLNC",
    block_size: Annotated[str, typer.Option(help="Tokens of a block, or SRC:DST.")] = "16",
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster with the nodes --src and --dst; auto: of this machine's.")
    ] = None,
    src: Annotated[str, typer.Option(help="Node to send from: hostname, IP or start of its id.")] = "",
    dst: Annotated[str, typer.Option(help="Node to send to.")] = "",
    net_device: Annotated[
        str, typer.Option(help="Network interface, such as eth0. Default: that of the node's address.")
    ] = "",
    num_runs: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 5,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which no new case starts.")] = 300.0,
    json_target: JsonTarget = None,
    plot: PlotFile = None,
) -> None:
    """Ferry blocks between two processes or two nodes over UCX, and compare with what memory and sockets allow."""
    from blockferry.cluster.bench.report import emit
    from blockferry.cluster.bench.transfer import MODES, PATTERNS, PIECE_SIZES, TransferBenchConfig, plot_of
    from blockferry.cluster.bench.transfer_pools import Amount, Side

    with one_line_errors():
        sides = [
            Side(tp_size=ranks, order=order, block_size=tokens)
            for ranks, order, tokens in zip(
                _numbers("--tp", tp), _pair("--layout", layout), _numbers("--block-size", block_size), strict=True
            )
        ]
        config = TransferBenchConfig(
            paths=path or (),
            patterns=pattern or PATTERNS,
            modes=mode or MODES,
            piece_sizes=[parse_size("--piece", number_or_text(one)) for one in piece or []] or PIECE_SIZES,
            amount=Amount(num_bytes=parse_size("--size", number_or_text(size)), num_blocks=count),
            src=sides[0],
            dst=sides[1],
            model=model_shape,
            model_config=_read_config(model_shape),
            net_device=net_device,
            num_runs=num_runs,
            time_limit_s=time_limit,
        )
        if address is not None or src or dst:
            measured = _transfer_between(config, address or "auto", src, dst)
        else:
            measured = _transfer_here(config)
        emit(measured, json_target=json_target, plot=None if plot is None else plot_of(plot))


def _transfer_here(config: TransferBenchConfig) -> Report:
    from blockferry.cluster.bench.transfer import run_transfer_bench
    from blockferry.cluster.bench.transfer_links import open_processes

    with cli_output.progress_bar() as report:
        ends = open_processes(config.src.tp_size, config.dst.tp_size)
        with contextlib.closing(ends):
            return run_transfer_bench(config, ends, _on_case(report))


def _transfer_between(config: TransferBenchConfig, address: str, src: str, dst: str) -> Report:
    from blockferry.cluster import ray_session
    from blockferry.cluster.bench.transfer import run_transfer_bench
    from blockferry.cluster.bench.transfer_actors import cluster_nodes, find_node, open_actors
    from blockferry.cluster.interrupt import stop_signals

    with contextlib.ExitStack() as stack:
        report = stack.enter_context(cli_output.progress_bar())
        report(Progress(phase="connecting to Ray", done=0, total=1))
        stack.enter_context(stop_signals.noted())  # links to actors check them
        stack.callback(stop_signals.forget)
        stack.callback(ray_session.connect(address).close)
        stop_signals.renew()  # Ray's core has put a handler that aborts
        nodes = cluster_nodes()
        source, target = find_node(nodes, src, option="--src"), find_node(nodes, dst, option="--dst")
        ends = open_actors([source] * config.src.tp_size, [target] * config.dst.tp_size)
        stack.enter_context(contextlib.closing(ends))
        where = {"src": source.hostname, "dst": target.hostname}
        return run_transfer_bench(dataclasses.replace(config, where=where), ends, _on_case(report))


def _on_case(report: Callable[[Progress], None]) -> OnCase:
    return lambda case, number, total: report(
        Progress(phase=" ".join(str(value) for value in case.params().values()), done=number, total=total)
    )


def _pair(option: str, value: str) -> tuple[str, str]:
    """Both sides' values of "A:B", or of "A" for both. Raises ValueError."""
    first, colon, second = value.partition(":")
    if not first or (colon and not second) or ":" in second:
        raise ValueError(f"{option}={value!r} is neither one value nor SRC:DST, one for each side")
    return first, second or first


def _numbers(option: str, value: str) -> tuple[int, int]:
    """_pair() of whole numbers."""
    first, second = _pair(option, value)
    if not (first.isdecimal() and second.isdecimal()):
        raise ValueError(f"{option}={value!r} is neither a number nor SRC:DST, one number for each side")
    return int(first), int(second)


def _read_config(model: str) -> Mapping[str, Any]:
    """The config.json of a model by name, file or folder; nothing without a name."""
    from blockferry.cluster.plan_model import read_model_config

    return read_model_config(model) if model else {}
