"""`bench transfer`: KV blocks between pools of two processes or two nodes, against the ceiling of the same moment.

Every case is a path (shm, tcp), a pattern of blocks (contiguous, scattered), a piece size and a mode (push, pull),
or the blocks of a model in place of pieces. Transfers run through PdWorkers with real block tables, one per rank of
each side; every byte is checked after every run. Ceilings alternate with the runs: shm is held against a compiled
memcpy of the same runs in the process that moves them, tcp against the better of two plain sockets (see
plain_socket.py). Knows neither processes nor Ray: ends are given.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockferry.cluster.bench.plain_socket import Sending
from blockferry.cluster.bench.report import ParamValue, Plot, Report, Result
from blockferry.cluster.bench.transfer_links import Ends, ask_all
from blockferry.cluster.bench.transfer_pair import Moved, Pair
from blockferry.cluster.bench.transfer_pools import (
    Amount,
    Blocks,
    Shape,
    Side,
    choose_blocks,
    mean_run_bytes,
    model_shape,
    page_bytes,
    piece_shape,
)
from blockferry.connectors.base import TransferMode
from blockferry.connectors.transport.ucx import UcxOptions

logger = logging.getLogger(__name__)

TRANSPORTS = {"shm": ("posix", "self"), "tcp": ("tcp", "self")}
PATHS = tuple(TRANSPORTS)
PATTERNS = ("contiguous", "scattered")
MODES = tuple(str(mode) for mode in TransferMode)
PIECE_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
SIZE = Amount(num_bytes=64 << 20)
USUAL = Side()
COLUMNS = ("transfer", "ceiling", "ratio", "gain", "block_time", "cpu")
SMALL_RUN_BYTES = 64 << 10  # below, transfers over a network are also measured without packing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferBenchConfig:
    """What to measure."""

    paths: Sequence[str] = ()  # none: all that the ends' places allow
    patterns: Sequence[str] = PATTERNS
    modes: Sequence[str] = MODES
    piece_sizes: Sequence[int] = PIECE_SIZES
    amount: Amount = SIZE  # of one transfer
    src: Side = USUAL
    dst: Side = USUAL
    model: str = ""  # its blocks instead of pieces
    model_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # config.json
    net_device: str = ""  # "": UCX chooses
    num_runs: int = 5
    time_limit_s: float = 300.0  # no case starts after it
    where: Mapping[str, ParamValue] = dataclasses.field(default_factory=dict)  # further parameters of every result

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_choice("path", self.paths, PATHS)
        _check_choice("pattern", self.patterns, PATTERNS)
        _check_choice("mode", self.modes, MODES)
        if self.num_runs < 1:
            raise ValueError(f"num_runs={self.num_runs} measures nothing; use 1 or more")
        for _ in self.shapes():
            pass

    def shapes(self) -> Iterator[tuple[int, Shape]]:
        """Bytes of a piece (or of a model's block) and the pools. Raises ValueError."""
        if self.model:
            shape = model_shape(self.model_config, self.amount, self.src, self.dst)
            yield page_bytes(shape.src), shape
            return
        for piece_bytes in self.piece_sizes:
            yield piece_bytes, piece_shape(piece_bytes, self.amount, self.src, self.dst)

    def params(self) -> dict[str, ParamValue]:
        """Parameters of every case, as far as they are not the usual ones."""
        both = {
            "tp": (self.src.tp_size, self.dst.tp_size),
            "layout": (self.src.order, self.dst.order),
            "block_size": (self.src.block_size, self.dst.block_size),
        }
        usual = {"tp": USUAL.tp_size, "layout": USUAL.order, "block_size": USUAL.block_size}
        params: dict[str, ParamValue] = {
            name: f"{src}:{dst}" for name, (src, dst) in both.items() if (src, dst) != (usual[name],) * 2
        }
        if self.model:
            params["model"] = self.model
        return params | dict(self.where)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    path: str
    pattern: str
    piece_bytes: int
    mode: str

    def params(self) -> dict[str, ParamValue]:
        """The case as result parameters."""
        return dataclasses.asdict(self)

    @property
    def is_push(self) -> bool:
        """Whether the source moves the bytes."""
        return self.mode == TransferMode.PUSH


OnCase = Callable[[Case, int, int], None]


def run_transfer_bench(config: TransferBenchConfig, ends: Ends, on_case: OnCase = lambda *_: None) -> Report:
    """Measure every combination between `ends`, which stay open; the median of num_runs counts.

    `on_case(case, number, total)` is called before each case. Raises ValueError for shm between hosts,
    TransportError when a transfer fails, a byte is wrong or an end is lost.
    """
    started_s = time.monotonic()
    paths = _possible_paths(config.paths, ends)
    shapes = list(config.shapes())
    total = len(paths) * len(shapes) * len(config.patterns) * len(config.modes)
    results: list[Result] = []
    number = 0
    for path in paths:
        for piece_bytes, shape in shapes:
            if time.monotonic() - started_s > config.time_limit_s:
                continue
            with _Bench(config, ends, path, shape) as bench:  # cases of one path and shape share their pools
                for pattern, mode in itertools.product(config.patterns, config.modes):
                    case = Case(path=path, pattern=pattern, piece_bytes=piece_bytes, mode=mode)
                    number += 1
                    on_case(case, number, total)
                    results += bench.run(case)
    if number < total:
        logger.warning(
            "%d of %d cases were not begun within %g s; raise the time limit",
            total - number,
            total,
            config.time_limit_s,
        )
    return Report(command="bench transfer", results=results, columns=COLUMNS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One round of a case."""

    moved: Moved
    ceilings: Mapping[str, float]  # GiB/s by name
    unpacked: Sequence[float]  # GiB/s of the same transfer with a one-sided operation per run; none where not measured


class _Bench:
    """Connected pools of one path and shape. A context manager."""

    def __init__(self, config: TransferBenchConfig, ends: Ends, path: str, shape: Shape) -> None:
        self._config = config
        self._shape = shape
        self._path = path
        self._may_pack = path != "shm" and _may_have_small_runs(config, shape)
        options = UcxOptions(transports=TRANSPORTS[path], net_device=config.net_device)
        self._pair = Pair(ends, shape, options)
        self._unpacked = Pair(ends, shape, dataclasses.replace(options, pack_below_bytes=0))
        self._next_seed = 1

    def __enter__(self) -> _Bench:
        for pair in self._pairs:
            pair.open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an error an end may not answer; its process is about to be ended
            for pair in self._pairs:
                pair.close()

    @property
    def _pairs(self) -> list[Pair]:
        return [self._pair, self._unpacked] if self._may_pack else [self._pair]

    def run(self, case: Case) -> list[Result]:
        """Measure one case. Raises TransportError."""
        seed, self._next_seed = self._next_seed, self._next_seed + 1
        mode, blocks = TransferMode(case.mode), choose_blocks(case.pattern, self._shape.grid, seed=seed)
        pairs = self._pairs if mean_run_bytes(self._shape, blocks) < SMALL_RUN_BYTES else [self._pair]
        for pair in pairs:
            pair.fill(seed)
        runs = []
        for _ in range(1 + self._config.num_runs):
            moved, *unpacked = [pair.transfer(mode, blocks, seed) for pair in pairs]
            ceilings = self._ceilings(mode, blocks)
            runs.append(_Run(moved=moved, ceilings=ceilings, unpacked=[one.speed for one in unpacked]))
        return _results(case.params() | self._config.params(), runs[1:])  # the first one warmed up

    def _ceilings(self, mode: TransferMode, blocks: Blocks) -> dict[str, float]:
        """GiB/s of the same runs without a transport, by name."""
        if self._path == "shm":
            return {"memcpy": self._pair.copy(mode, blocks)}
        return {f"socket_{sending}": self._pair.send_plain(blocks, sending) for sending in Sending}


def _may_have_small_runs(config: TransferBenchConfig, shape: Shape) -> bool:
    tables = (choose_blocks(pattern, shape.grid, seed=0) for pattern in config.patterns)
    return any(mean_run_bytes(shape, blocks) < SMALL_RUN_BYTES for blocks in tables)


def _results(params: Mapping[str, ParamValue], runs: Sequence[_Run]) -> list[Result]:
    """Rows of one case; the ceiling is the best one, by its median."""
    ceilings = {name: [run.ceilings[name] for run in runs] for name in runs[0].ceilings}
    best = max(ceilings.values(), key=statistics.median)
    speeds = [run.moved.speed for run in runs]
    rows: dict[str, tuple[str, Sequence[float]]] = {
        "transfer": ("GiB/s", speeds),
        "ceiling": ("GiB/s", best),
        "ratio": ("1", [speed / ceiling for speed, ceiling in zip(speeds, best, strict=True)]),
        # what a busy machine disturbs least: neither side's best run was waiting for a core
        "ratio_of_best": ("1", [max(speeds) / max(best)]),
        "block_time": ("us", [run.moved.block_us for run in runs]),
        "cpu": ("s/GiB", [run.moved.cpu_s_per_gib for run in runs]),
        **{name: ("GiB/s", values) for name, values in ceilings.items()},
    }
    unpacked = [speed for run in runs for speed in run.unpacked]
    if unpacked:
        rows["unpacked"] = ("GiB/s", unpacked)
        rows["gain"] = ("1", [speed / other for speed, other in zip(speeds, unpacked, strict=True)])
    return [Result(name=name, params=params, unit=unit, runs=values) for name, (unit, values) in rows.items()]


def _possible_paths(paths: Sequence[str], ends: Ends) -> Sequence[str]:
    """The paths to measure. Raises ValueError for one that the ends' places rule out."""
    is_one_host = len(set(ask_all(ends.all, "host_id"))) == 1
    if "shm" in paths and not is_one_host:
        raise ValueError("path='shm' needs both ends on one host; use --path tcp, or one node for --src and --dst")
    return paths or (PATHS if is_one_host else ("tcp",))


def _check_choice(what: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    for value in chosen:
        if value not in known:
            raise ValueError(f"{what}={value!r} is unknown; use {', '.join(known)}")


def plot_of(path: Path) -> Plot:
    """GiB/s over piece size, transfer beside ceiling."""
    return Plot(path=path, x="piece_bytes", panel="path", names=("transfer", "ceiling"), dashed="ceiling")
