"""What the commands show a person: progress while they wait, answers, tables. The only module that prints.

Progress and errors go to stderr, results to stdout, so that a --json document stands alone there.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from blockferry.cluster.draft_counts import draft_words
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.plan_facts import layer_words, summary_of

if TYPE_CHECKING:
    from blockferry.cluster.check import Finding
    from blockferry.cluster.generate import Answer

PIPE_COLUMNS = 160
LONG_PHASE = 100  # units from which on lines tell every tenth of a phase


_results: contextvars.ContextVar[TextIO | None] = contextvars.ContextVar("results", default=None)


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Send to stderr whatever others print meanwhile (Ray tells its errors on stdout)."""
    token = _results.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)


def _stdout() -> TextIO:
    return _results.get() or sys.stdout


def print_error(message: str) -> None:
    """One line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False), file=_stdout())


def print_line(text: str) -> None:
    """A line on stdout, as it is."""
    print(text, file=_stdout(), flush=True)


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def progress_bar() -> Iterator[Report]:
    """A progress bar on stderr; on something that is no terminal, a line per phase, and per tenth of a long one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines_of_progress()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1)

        def show(progress: Progress) -> None:
            bar.update(task, description=_phase(progress), completed=progress.done, total=progress.total)

        yield show


def _lines_of_progress() -> Report:
    shown: dict[str, int] = {}  # tenths by phase

    def show(progress: Progress) -> None:
        tenths = 10 * progress.done // max(progress.total, 1)
        if progress.phase not in shown:
            note(f"{progress.phase} ...")
        elif progress.total >= LONG_PHASE and tenths > shown[progress.phase]:
            note(f"{_phase(progress)}: {progress.done:,} of {progress.total:,}")
        shown[progress.phase] = tenths

    return show


def _phase(progress: Progress) -> str:
    return f"{progress.phase}, {progress.note}" if progress.note else progress.phase


def print_answers(answers: Sequence[Answer]) -> None:
    """Every answer's text, then a table of what each cost."""
    for answer in answers:
        print_line(f"> {answer.prompt}")
        print_line(answer.error if answer.error else answer.text)
        print_line("")
    table = Table(box=None, padding=(0, 2, 0, 0))
    ferry = ("blocks ferried", "bytes ferried", "bytes saved", "wait for blocks")
    for heading in ("prompt", "output", "cached", "loaded", *ferry, "drafts", "TTFT", "decode"):
        table.add_column(heading, justify="right")
    for answer in answers:
        stats = answer.stats
        is_ferried = stats.transfer_blocks > 0
        table.add_row(
            f"{stats.num_prompt_tokens} tok",
            f"{stats.num_output_tokens} tok",
            f"{stats.num_cached_tokens} tok",
            f"{stats.num_loaded_tokens} tok",
            str(stats.transfer_blocks),
            size_words(stats.transfer_bytes),
            size_words(stats.transfer_saved_bytes) if is_ferried else "-",
            f"{stats.transfer_s * 1e3:.2f} ms" if is_ferried else "-",
            f"{stats.num_accepted_tokens} of {stats.num_drafted_tokens}" if stats.num_drafted_tokens else "-",
            f"{answer.ttft_s * 1e3:.0f} ms",
            f"{answer.decode_tokens_per_s:.1f} tok/s",
        )
    _wide_console().print(table)


def print_status(deployments: Sequence[Mapping[str, Any]]) -> None:
    """A table of every deployment's instances."""
    console = _wide_console()
    if not deployments:
        console.print("no deployment is running here; start one with `blockferry serve CONFIG.yaml`")
    for one in deployments:
        health = "healthy" if one["healthy"] else f"NOT healthy: {one['reason'] or 'starting'}"
        console.print(f"{one['deployment']}: {one['model']}, {health}, up {one['uptime_s']:.0f} s", highlight=False)
        moved = one["transfers"]
        console.print(
            f"  {one['url'] or 'no HTTP server'}; {one['num_unfinished']} unfinished requests; "
            f"connector {one['connector'] or 'none'}: {moved['num_done']} transfers, "
            f"{size_words(moved['num_bytes'])} ferried, {moved['num_failed']} failed, "
            f"{sum(one['handoffs'].values())} under way",
            highlight=False,
            soft_wrap=True,
        )
        cached = one["prefix_cache"]
        console.print(
            f"  router {one['router']}; prefix cache: {cached['num_hit_tokens']} of {cached['num_queried_tokens']} "
            f"prompt tokens found, {cached['hit_rate']:.1%}",
            highlight=False,
            soft_wrap=True,
        )
        table = Table(box=None, padding=(0, 2, 0, 2))
        for heading in ("instance", "role", "state", "ranks", "running", "waiting", "free blocks", "of", "preempted"):
            table.add_column(heading)
        table.add_column("workers")
        for instance in one["instances"]:
            table.add_row(
                instance["instance_id"],
                instance["role"],
                instance["state"],
                *(
                    str(instance[key])
                    for key in ("num_ranks", "num_running", "num_waiting", "num_free_blocks", "num_blocks")
                ),
                str(instance["num_preemptions"]),
                ", ".join(
                    f"{worker['address']} pid {worker['pid']}"
                    for worker in one["workers"]
                    if worker["instance_id"] == instance["instance_id"]
                ),
            )
        console.print(table)
        for line in (*_draft_lines(one["instances"]), *_tier_lines(one["instances"])):
            console.print(line, highlight=False, soft_wrap=True)
        for line in _plan_lines(one["instances"]):
            console.print(line, highlight=False, soft_wrap=True)


def _draft_lines(instances: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What drafts have brought where they are verified; those of a prefill instance are by the one that decodes."""
    for instance in instances:
        counts = instance.get("speculation")
        if counts and instance["role"] != "prefill":
            yield f"  {instance['instance_id']}: {draft_words(counts)}"


def _tier_lines(instances: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each instance keeps outside of its pool."""
    for instance in instances:
        tiers = instance.get("tiers")
        if not tiers:
            continue
        kept = [
            f"{tiers[f'{tier}_blocks']} blocks {where} {tier} ({tiers[f'{tier}_usage']:.0%} full)"
            for where, tier in (("in", "memory"), ("on", "disk"))
            if f"{tier}_blocks" in tiers
        ]
        yield (
            f"  {instance['instance_id']}: offload keeps {', '.join(kept)}; stored {size_words(tiers['store_bytes'])}, "
            f"loaded {size_words(tiers['load_bytes'] + tiers['fetch_bytes'])} for {tiers['num_loaded_tokens']} tokens, "
            f"{tiers['num_failed_loads']} loads failed"
        )


def _plan_lines(instances: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each plan holds; instances with equal ones are named together."""
    planned = [instance for instance in instances if instance["plan"] is not None]
    for index, instance in enumerate(planned):
        plan = instance["plan"]
        if any(plan == earlier["plan"] for earlier in planned[:index]):
            continue
        names = ", ".join(other["instance_id"] for other in planned[index:] if other["plan"] == plan)
        yield f"  {names}: {summary_of(plan)}"
        yield from group_lines(plan)


def group_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """One line per group of a plan in JSON."""
    for group in plan["groups"]:
        yield (
            f"    {group['type']}: layers {layer_words(group['layers']) or 'of other stages'}, blocks of "
            f"{group['block_size']} tokens, {size_words(group['page_size_bytes'])} each"
        )


def show(renderable: RenderableType) -> None:
    """A table or styled text on stdout."""
    _wide_console().print(renderable, highlight=False)


def _wide_console() -> Console:
    """Stdout; in a file or a pipe wide enough that no table column is cut."""
    console = Console(file=_stdout())
    return console if console.is_terminal else Console(file=_stdout(), width=PIPE_COLUMNS)


def print_findings(findings: Sequence[Finding]) -> None:
    """One line per finding, then the verdict."""
    for finding in findings:
        print_line(f"{finding.level.value:7} {finding.subject}: {finding.message}")
        for line in () if finding.plan is None else group_lines(finding.plan.to_json()):
            print_line(line)
    num_errors = sum(finding.is_error for finding in findings)
    print_line(f"{num_errors} error(s): this would not start" if num_errors else "this deployment can start here")


def size_words(num_bytes: float) -> str:
    """Bytes as a person reads them: 12.5 MiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    index = 0
    while num_bytes >= 1024 and index < len(units) - 1:
        num_bytes /= 1024
        index += 1
    return f"{num_bytes:.0f} {units[index]}" if index == 0 else f"{num_bytes:.2f} {units[index]}"
