"""`blockferry train-draft`: a draft head for a model, trained from nothing but the model. Options become settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockferry.cluster import cli_output
from blockferry.cluster.launch_progress import Progress

if TYPE_CHECKING:
    from blockferry.cluster.launch_progress import Report
    from blockferry.engine.spec_decode.training.pipeline import TrainProgress


def train_draft(  # noqa: PLR0913, PLR0917 - one parameter per option
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known model, ORG/NAME of a hub, or a folder.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the head goes.")],
    work: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="What is needed to go on after a kill. Default: FOLDER of --out + .work"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="About how long it may take.")] = 55.0,
    num_tokens: Annotated[
        int,
        typer.Option(
            "--tokens", min=1000, help="That the model is to write, if there is time: in parts of about 50,000."
        ),
    ] = 800_000,
    num_draft_tokens: Annotated[int, typer.Option("--vocabulary", min=16, help="Tokens that may be drafted.")] = 8192,
    num_epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the text.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Train a draft head for a model, on text that the model writes itself. Goes on where it was killed."""
    from blockferry.cluster.checkpoint import resolve_model
    from blockferry.cluster.train_tokens import CheckpointTokens
    from blockferry.engine.spec_decode.training.pipeline import Pipeline, PipelineSettings
    from blockferry.engine.spec_decode.training.trainer import TrainSettings

    settings = PipelineSettings(
        num_tokens=num_tokens,
        num_draft_tokens=num_draft_tokens,
        limit_s=60.0 * minutes,
        num_threads=threads,
        training=TrainSettings(num_epochs=num_epochs, seed=seed),
    )
    with cli_output.only_results_on_stdout(), cli_output.progress_bar() as report:
        path = resolve_model("model", model, base=Path.cwd())
        pipeline = Pipeline(path, CheckpointTokens.load(path), settings, _shown(report))
        head = pipeline.run(out.with_name(f"{out.name}.work") if work is None else work, out)
    if as_json:
        cli_output.print_json({"head": str(out), **head.to_json()})
        return
    cli_output.print_line(f"{out}: {head.num_tokens:,} tokens written, {head.num_steps:,} steps")
    for kind, acceptance in head.acceptance.items():
        drafts = ", ".join(f"{part:.3f}" for part in acceptance.per_draft)
        cli_output.print_line(
            f"held-out {kind}: drafts accepted {drafts}; {acceptance.tokens_per_step:.2f} tokens a step"
        )


def _shown(report: Report) -> Callable[[TrainProgress], None]:
    def show(progress: TrainProgress) -> None:
        report(Progress(phase=progress.phase, done=progress.done, total=progress.total, note=progress.note))

    return show
