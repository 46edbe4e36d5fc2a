"""`bench transfer`: KV blocks between the pools of two processes, against the ceiling of the same moment.

Every case is a path (shm, tcp), a pattern of blocks (contiguous, scattered), a piece size (one page) and a mode
(push, pull). Transfers run through PdWorker with real block tables; every byte is checked after every run.
Ceilings alternate with the runs: a compiled memcpy of the same runs in one process for shm, a plain socket that
sends the same pieces for tcp. Only loopback addresses are targets.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from blockferry.cluster.bench.report import Plot, Report, Result
from blockferry.cluster.bench.transfer_peer import FAR, NEAR, TRANSPORTS, Check, End, FarEnd, make_layout, send_plain
from blockferry.connectors.base import Int32Array, TransferCommand, TransferMode, TransferPart, TransportError
from blockferry.connectors.layout import intersect_runs
from blockferry.connectors.transport.native_loops import copy_runs

PATHS = tuple(TRANSPORTS)
PATTERNS = ("contiguous", "scattered")
MODES = tuple(str(mode) for mode in TransferMode)
PIECE_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
GIB = float(1 << 30)
_DEADLINE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    path: str
    pattern: str
    piece_bytes: int
    mode: str

    def params(self) -> dict[str, str | int]:
        """The case as result parameters."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Which blocks of the source go to which of the destination."""

    src: Int32Array
    dst: Int32Array


def run_transfer_bench(  # noqa: PLR0913  the command's options
    *,
    paths: Sequence[str] = PATHS,
    patterns: Sequence[str] = PATTERNS,
    piece_sizes: Sequence[int] = PIECE_SIZES,
    modes: Sequence[str] = MODES,
    num_bytes: int = 64 << 20,
    num_runs: int = 5,
    time_limit_s: float = 300.0,
    on_case: Callable[[Case, int, int], None] | None = None,
) -> Report:
    """Measure every combination; `num_bytes` per transfer, the median of num_runs.

    Starts no new case after time_limit_s. `on_case(case, number, total)` is called before each case. Raises
    ValueError for an unknown path, pattern or mode or a piece larger than num_bytes, TransportError when a
    transfer fails or a byte is wrong.
    """
    _check_choice("path", paths, PATHS)
    _check_choice("pattern", patterns, PATTERNS)
    _check_choice("mode", modes, MODES)
    if num_runs < 1:
        raise ValueError(f"num_runs={num_runs} measures nothing; use 1 or more")
    if piece_sizes and max(piece_sizes) > num_bytes:
        raise ValueError(f"piece_bytes={max(piece_sizes)} is larger than num_bytes={num_bytes}, one transfer's size")
    cases = [
        [Case(path=path, pattern=pattern, piece_bytes=piece, mode=mode) for pattern in patterns for mode in modes]
        for path in paths
        for piece in piece_sizes
    ]
    total = sum(len(group) for group in cases)
    started_s = time.monotonic()
    results: list[Result] = []
    far = FarEnd()
    try:
        for group in cases:  # cases of one path and piece size share their pools
            if not group or time.monotonic() - started_s > time_limit_s:
                continue
            with _Bench(far, group[0], num_bytes) as bench:
                for case in group:
                    if on_case is not None:
                        on_case(case, len(results) // 3 + 1, total)
                    results += bench.run(case, num_runs)
    finally:
        far.close()
    return Report(command="bench transfer", results=results)


class _Bench:
    """Two connected pools of one path and piece size. A context manager."""

    def __init__(self, far: FarEnd, case: Case, num_bytes: int) -> None:
        self._num_pieces = num_bytes // case.piece_bytes
        self._layout = make_layout(case.piece_bytes, self._num_pieces)
        self._far = far
        self._next_id = 1
        self._near = End(NEAR, case.path, self._layout)
        self._near.connect(far.open(case.path, self._layout))
        self._spare = np.ones(self._layout.num_bytes, np.uint8)  # the ceiling's target, its pages touched

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._near.close()
        self._far.close_end()

    def run(self, case: Case, num_runs: int) -> list[Result]:
        """Measure one case: transfer, ceiling and their ratio."""
        seed = self._next_id
        is_push = case.mode == TransferMode.PUSH
        source, target = (self._near, self._far) if is_push else (self._far, self._near)
        source.fill(seed)
        blocks = _choose_blocks(case.pattern, self._num_pieces, seed)
        speeds, ceilings = [], []
        for is_warm_up in (True, *[False] * num_runs):
            target.clear()
            speed = self._transfer(case, blocks)
            if not target.verify(Check(seed=seed, src_block_ids=blocks.src, dst_block_ids=blocks.dst)):
                raise TransportError(f"{case}: bytes at the destination differ from the source's")
            ceiling = self._ceiling(case, blocks)
            if not is_warm_up:
                speeds.append(speed)
                ceilings.append(ceiling)
        ratios = [speed / ceiling for speed, ceiling in zip(speeds, ceilings, strict=True)]
        return [
            Result(name="transfer", params=case.params(), unit="GiB/s", runs=speeds),
            Result(name="ceiling", params=case.params(), unit="GiB/s", runs=ceilings),
            Result(name="ratio", params=case.params(), unit="1", runs=ratios),
        ]

    def _transfer(self, case: Case, blocks: _Blocks) -> float:
        src, dst = (NEAR, FAR) if case.mode == TransferMode.PUSH else (FAR, NEAR)
        command = TransferCommand(
            transfer_id=self._next_id,
            mode=TransferMode(case.mode),
            src_instance_id=src,
            dst_instance_id=dst,
            parts=(self._part(blocks),),
            deadline_s=_DEADLINE_S,
        )
        self._next_id += 1
        started_s = time.perf_counter()
        num_bytes = self._near.ferry(command)
        return num_bytes / (time.perf_counter() - started_s) / GIB

    def _part(self, blocks: _Blocks) -> TransferPart:
        num_tokens = len(blocks.src) * self._layout.block_size
        return TransferPart(
            src_group=0, dst_group=0, src_block_ids=blocks.src, dst_block_ids=blocks.dst, num_tokens=num_tokens
        )

    def _ceiling(self, case: Case, blocks: _Blocks) -> float:
        """GiB/s of the same runs without a transport."""
        runs = intersect_runs(self._layout, self._layout, self._part(blocks))
        source, target = self._near.pool, self._spare
        if case.path == "tcp":
            port = self._far.begin_receive(runs.num_bytes)
            started_s = time.perf_counter()
            send_plain(port, source, runs)
        else:
            started_s = time.perf_counter()
            copy_runs(target.ctypes.data, source.ctypes.data, runs.dst_offsets, runs.src_offsets, runs.lengths)
        return runs.num_bytes / (time.perf_counter() - started_s) / GIB


def _choose_blocks(pattern: str, num_pieces: int, seed: int) -> _Blocks:
    ids = np.arange(1, num_pieces + 1, dtype=np.int32)
    if pattern == "contiguous":
        return _Blocks(src=ids, dst=ids)
    rng = np.random.default_rng(seed)
    return _Blocks(src=rng.permutation(ids), dst=rng.permutation(ids))


def _check_choice(what: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    for value in chosen:
        if value not in known:
            raise ValueError(f"{what}={value!r} is unknown; use {', '.join(known)}")


def plot_of(path: Path) -> Plot:
    """GiB/s over piece size, transfer beside ceiling."""
    return Plot(path=path, x="piece_bytes", series="path", names=("transfer", "ceiling"))
