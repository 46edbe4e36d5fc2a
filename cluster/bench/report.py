"""What every benchmark hands over: one JSON shape, one table, one plot. Measures nothing itself.

    {"command", "version", "machine": {...}, "results": [{"name", "params", "value", "unit", "runs"}]}

`value` is the median of `runs`. Plotting needs the `plot` extra (matplotlib), imported only when asked for.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ParamValue = str | int | float | bool | None
WIDEST = 400  # columns of a table
MAX_PARAM_COLUMNS = 4  # that fit a terminal beside name, value and unit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured number: what, under which parameters, in which unit, every run of it."""

    name: str
    params: Mapping[str, ParamValue]
    unit: str  # "s", "ms", "GiB/s", "tok/s", "1", ...
    runs: Sequence[float]  # at least one

    @property
    def value(self) -> float:
        """Median of the runs."""
        return statistics.median(self.runs)

    def to_json(self) -> dict[str, Any]:
        """The result as the shared shape has it."""
        return {
            "name": self.name,
            "params": dict(self.params),
            "value": self.value,
            "unit": self.unit,
            "runs": list(self.runs),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of one command."""

    command: str  # "bench serve"
    results: Sequence[Result]
    columns: Sequence[str] = ()  # names that stand side by side in the table, one row per parameters; none: see there

    def to_json(self) -> dict[str, Any]:
        """The whole document."""
        return {
            "command": self.command,
            "version": importlib.metadata.version("blockferry"),
            "machine": describe_machine(),
            "results": [result.to_json() for result in self.results],
        }

    def write_json(self, target: Path | str) -> None:
        """Write the document to a file, or to stdout for "-". Raises OSError."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        if str(target) == "-":
            sys.stdout.write(text)
        else:
            Path(target).write_text(text, encoding="utf-8")

    def print_table(self, console: Console | None = None) -> None:
        """Print one row per result, or per set of parameters where `columns` names what stands side by side.

        Parameters of one value only stand in the caption, many others share a column.
        """
        every = list(dict.fromkeys(key for result in self.results for key in result.params))
        values = {key: {result.params[key] for result in self.results if key in result.params} for key in every}
        varying = [key for key in every if len(values[key]) > 1]
        shared = {key: next(iter(values[key])) for key in every if len(values[key]) == 1}
        caption = ", ".join(f"{key} {_cell(value)}" for key, value in shared.items() if value is not None)
        title = f"blockferry {self.command}"
        if self.columns:
            table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0)
            self._add_wide_rows(table, varying)
        else:
            table = Table(title=title, caption=caption)
            self._add_rows(table, varying)
        _print_uncut(table, console or Console())

    def _add_rows(self, table: Table, varying: Sequence[str]) -> None:
        is_wide = len(varying) > MAX_PARAM_COLUMNS
        for heading in ["name", *(["parameters"] if is_wide else varying)]:
            table.add_column(heading, no_wrap=heading == "name")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("unit", no_wrap=True)
        for result in self.results:
            cells = {column: _cell(result.params.get(column)) for column in varying}
            joined = ", ".join(f"{column} {cell}" for column, cell in cells.items() if cell)
            table.add_row(result.name, *([joined] if is_wide else cells.values()), f"{result.value:,.4g}", result.unit)

    def _add_wide_rows(self, table: Table, varying: Sequence[str]) -> None:
        units = {result.name: result.unit for result in self.results}
        names = [name for name in self.columns if name in units]
        for heading in varying:
            table.add_column(heading.replace("_", "\n"))
        for name in names:
            unit = "" if units[name] == "1" else units[name]
            table.add_column(f"{name}\n{unit}".replace("_", "\n").strip(), justify="right")
        rows: dict[tuple[str, ...], dict[str, str]] = {}
        for result in self.results:
            cells = tuple(_cell(result.params.get(key)) for key in varying)
            rows.setdefault(cells, {})[result.name] = f"{result.value:,.4g}"
        for cells, by_name in rows.items():
            table.add_row(*cells, *(by_name.get(name, "") for name in names))


def _print_uncut(table: Table, console: Console) -> None:
    """With every digit, in lines longer than a narrow terminal's where they must be."""
    options = console.options.update(max_width=WIDEST)
    console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Line charts, one below the other for each unit and panel; x is a parameter, lines differ in name or others."""

    path: Path
    x: str
    series: str = ""  # the parameter that tells lines apart; "": every one that differs among a name's results
    panel: str = ""  # a parameter with a chart of its own for every value
    names: tuple[str, ...] = ()  # results to draw; all when empty
    dashed: str = ""  # the name whose lines are dashed, in the colour of the others with the same parameters
    is_log_x: bool = True
    title: str = ""

    def draw(self, results: Sequence[Result]) -> None:
        """Write the picture. Raises ValueError without matplotlib or when nothing has the x parameter."""
        chosen = [r for r in results if r.params.get(self.x) is not None and (not self.names or r.name in self.names)]
        if not chosen:
            raise ValueError(f"no result has the parameter {self.x!r}, the plot's x axis; nothing to draw")
        try:
            from matplotlib.figure import Figure  # a heavy import, only for --plot
        except ImportError as error:
            raise ValueError("--plot needs matplotlib; install blockferry[plot]") from error
        charts: dict[tuple[ParamValue, str], list[Result]] = {}
        for result in chosen:
            charts.setdefault((result.params.get(self.panel), result.unit), []).append(result)
        figure = Figure(figsize=(9, 1 + 3.5 * len(charts)), layout="constrained")
        for axes, ((panel, unit), members) in zip(figure.subplots(len(charts), squeeze=False).flat, charts.items()):
            self._draw_chart(axes, members)
            axes.set_ylabel(unit)
            axes.set_title(str(panel or ""))
        figure.suptitle(self.title)
        figure.savefig(self.path, dpi=120)

    def _draw_chart(self, axes: Any, members: Sequence[Result]) -> None:
        colours: dict[str, str] = {}
        for (name, rest), line in self._lines(members).items():
            key = rest if self.dashed else f"{name} {rest}"
            points = sorted((float(result.params[self.x] or 0), result.value) for result in line)
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker="o",
                color=colours.setdefault(key, f"C{len(colours)}"),
                linestyle="--" if name == self.dashed else "-",
                label=f"{name} {rest}".strip(),
            )
        if self.is_log_x:
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(self.x)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))

    def _lines(self, results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
        """Results by their name and the values that tell its lines apart."""
        lines: dict[tuple[str, str], list[Result]] = {}
        for result in results:
            keys = [self.series] if self.series else self._varying(results, result.name)
            rest = " ".join(str(result.params.get(key, "")) for key in keys)
            lines.setdefault((result.name, rest), []).append(result)
        return lines

    def _varying(self, results: Sequence[Result], name: str) -> list[str]:
        """Parameters besides x that differ among the results of one name."""
        same = [result.params for result in results if result.name == name]
        return [key for key in same[0] if key != self.x and len({params.get(key) for params in same}) > 1]


def emit(report: Report, *, json_target: Path | str | None, plot: Plot | None = None) -> None:
    """Do what --json and --plot ask for; the table goes to stderr when stdout carries the JSON."""
    if json_target is not None:
        report.write_json(json_target)
    report.print_table(Console(stderr=str(json_target) == "-"))
    if plot is not None:
        plot.draw(report.results)


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge a number: processor, cores, memory, versions, commit."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("numpy", "ray", "torch", "triton", "libucx-cu12")},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Short commit of the checkout this file belongs to, or None (a wheel, no git)."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _cell(value: ParamValue) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
