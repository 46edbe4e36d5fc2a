"""`blockferry plan`: a model's KV cache on paper. Options become a question; answers become text, JSON or a picture."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.plan_model import PlanQuestion, config_path, plan_model, read_model_config
from blockferry.cluster.plan_report import (
    PlannedModel,
    comparison_table,
    document_of,
    group_table,
    page_bars,
    summary_lines,
)
from blockferry.cluster.yaml_reader import parse_size
from blockferry.engine.config import DType
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.instance_plan import in_dtype
from blockferry.engine.kv.model_checks import known_families
from blockferry.engine.kv.model_config import MAX_SIZE
from blockferry.engine.kv.model_layers import CacheDType, LayerOptions
from blockferry.engine.kv.plan import KVCachePlan, Planner
from blockferry.engine.kv.planners import best_of

MAX_MEMORY_BYTES = 1 << 60
MAX_SPECULATIVE_TOKENS = 1024
MODEL_HELP = (
    "A config.json, its folder, or a shipped name. Known families: "
    + ", ".join(known_families())
    + ". Others are planned by their layer_types or as plain full attention, with a warning; where keys say that "
    "layers are something else, they are refused."
)
MEMORY_HELP = "KV cache memory of one rank. 80GiB is 80 x 2^30 bytes, 80G and 80GB are 80 x 10^9, 80 is bytes."


def plan_command(  # noqa: PLR0913, PLR0917 - one parameter per option
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    memory: Annotated[str, typer.Option(help=MEMORY_HELP)],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages; the plan is of the one that holds least.")] = 1,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SIZE, help="Tokens per block. Default: 16; of a uniform plan, what states need."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SIZE, help="Longest sequence. Default: the model's, halved until one fits."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_SIZE, help="Most tokens in flight at once.")
    ] = 8192,
    dtype: Annotated[
        DType | None, typer.Option(help="Data type of weights, and so of states. Default: the config's.")
    ] = None,
    kv_dtype: Annotated[CacheDType, typer.Option(help="Data type of keys and values.")] = CacheDType.AUTO,
    speculative_tokens: Annotated[
        int,
        typer.Option(min=0, max=MAX_SPECULATIVE_TOKENS, help="Tokens drafted per request and step."),
    ] = 0,
    draft_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SPECULATIVE_TOKENS,
            help="Layers that draft them and have caches: 0 for n-grams, 1 for a head. Default: those of the config.",
        ),
    ] = None,
    layout: Annotated[str, typer.Option(help="Axes of the pool: BLHNC, BHLNC, LBHNC or LBNHC.")] = "BLHNC",
    planner: Annotated[Planner | None, typer.Option(help="Default: uniform or slab, whichever holds more.")] = None,
    is_comparison: Annotated[bool, typer.Option("--compare", help="Show all planners side by side.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw who gets which bytes.")] = None,
) -> None:
    """Show how a model's KV cache would be laid out: groups, pages, waste, and what fits."""
    question = PlanQuestion(
        memory_bytes=_memory_bytes(memory),
        layers=LayerOptions(
            cache_dtype=kv_dtype,
            tp_size=tp,
            num_speculative_tokens=speculative_tokens,
            num_draft_layers=draft_layers,
        ),
        block_size=block_size,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_num_batched_tokens,
        layout=layout,
        pp_size=pp,
    )
    planners = (Planner.UNIFORM, Planner.SLAB) if planner is None else (planner,)
    with _naming(model), _quiet_planners():
        config = read_model_config(model)
        config = config if dtype is None else in_dtype(config, dtype)
        plans = plan_model(config, question, tuple(Planner) if is_comparison else planners)
    if is_comparison and all(one.attempt.plan is None for one in plans):
        _print_refusals(plans, as_json=as_json)
        raise typer.Exit(1)
    chosen = best_of([one.attempt for one in plans if one.attempt.planner in planners])
    shown = plans if is_comparison else [one for one in plans if one.attempt.plan is chosen]
    if plot is not None:
        from blockferry.cluster.plan_picture import draw_plans

        written = draw_plans([one for one in shown if one.attempt.plan is not None], plot)
        cli_output.note(f"picture: {written}")
    if as_json:
        cli_output.print_json(_document(plans, chosen) if is_comparison else document_of(shown[0]))
        return
    _print_plans(shown, chosen, question)


@contextlib.contextmanager
def _quiet_planners() -> Iterator[None]:
    """Keep planners' warnings to themselves: what a plan costs is in its report."""
    logger = logging.getLogger("blockferry.engine.kv")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _naming(model: str) -> Iterator[None]:
    """Have what is wrong with a config say whose."""
    try:
        yield
    except ConfigError as error:
        if error.path != "config.json":
            raise
        raise ConfigError(str(config_path(model)), str(error).removeprefix("config.json: ")) from None


def _document(plans: tuple[PlannedModel, ...], chosen: KVCachePlan | None) -> dict[str, Any]:
    return {
        "model": plans[0].model.name,
        "best": next((one.name for one in plans if chosen is not None and one.attempt.plan is chosen), None),
        "max_model_len": plans[0].request.limits.max_model_len,
        "length_limited_by": _limiting(plans),
        "warnings": list(plans[0].model.warnings),
        "plans": [document_of(one) for one in plans],
    }


def _limiting(plans: list[PlannedModel] | tuple[PlannedModel, ...]) -> list[str]:
    return [one.name for one in plans if one.limits_length]


def _print_refusals(plans: tuple[PlannedModel, ...], *, as_json: bool) -> None:
    """Every planner's own reason why it has no plan."""
    if as_json:
        cli_output.print_json(_document(plans, None))
        return
    for planned in plans:
        cli_output.print_error(f"{planned.name}: not possible: {planned.attempt.error}")


def _print_heading(shown: list[PlannedModel] | tuple[PlannedModel, ...], question: PlanQuestion) -> None:
    """What holds for all plans shown."""
    first = shown[0]
    length = first.request.limits.max_model_len
    cli_output.print_line(
        f"{first.model.name}: {cli_output.size_words(question.memory_bytes)} of KV cache on each rank, "
        f"sequences of up to {length:,} tokens"
    )
    if question.max_model_len is None and length != first.model.max_position:
        by = f": {' and '.join(_limiting(shown))} limits the length of all" if len(shown) > 1 else ""
        cli_output.print_line(f"(the model allows {first.model.max_position:,} tokens, which do not fit{by})")
    if question.pp_size > 1:
        cli_output.print_line(f"(of {question.pp_size} pipeline stages, the one that holds least)")
    for warning in first.model.warnings:
        cli_output.print_line(f"warning: {warning}")
    for told in first.model.notes:
        cli_output.print_line(f"({told})")


def _print_plans(
    shown: list[PlannedModel] | tuple[PlannedModel, ...], chosen: KVCachePlan, question: PlanQuestion
) -> None:
    _print_heading(shown, question)
    if len(shown) > 1:
        cli_output.print_line("")
        cli_output.show(comparison_table(shown, chosen))
    for planned in shown:
        cli_output.print_line("")
        if planned.attempt.plan is None:
            cli_output.print_line(f"{planned.name}: not possible: {planned.attempt.error}")
            continue
        cli_output.print_line(f"{planned.name}{' (best)' if planned.attempt.plan is chosen and len(shown) > 1 else ''}")
        if planned.plan.groups:
            cli_output.show(group_table(planned))
        for line in summary_lines(planned):
            cli_output.print_line(line)
        for bar in page_bars(planned):
            cli_output.show(bar)


def _memory_bytes(memory: str) -> int:
    if not memory.isascii():
        raise ConfigError("--memory", f"{memory!r} is not a size; write it in digits 0 to 9, such as 80GiB")
    num_digits = sum(letter.isdigit() for letter in memory)
    num_bytes = parse_size("--memory", memory) if num_digits <= 30 else MAX_MEMORY_BYTES + 1
    if num_bytes > MAX_MEMORY_BYTES:
        raise ConfigError("--memory", f"{memory[:40]} is more than any machine has; write a size such as 80GiB")
    if num_bytes <= 0:
        raise ConfigError("--memory", f"{memory} leaves no memory; write a positive size such as 80GiB")
    return num_bytes
