"""The `blockferry` command. Parses arguments and calls; every error a user can cause is one line on stderr.

Modules that import Ray or torch are imported inside the commands that need them, so that --help is instant.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer._click.exceptions import ClickException

from blockferry.cluster import cli_bench, cli_kv, cli_output, cli_plan, cli_scale, cli_train
from blockferry.cluster.interrupt import Interrupted, stop_signals, until_stopped
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.shipped import find_config
from blockferry.engine.errors import BlockferryError

if TYPE_CHECKING:
    from blockferry.cluster.deployment import Deployment
    from blockferry.cluster.sockets import Endpoint

app = typer.Typer(
    name="blockferry",
    help="Serve language models across a Ray cluster, ferrying KV blocks from prefill to decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_kv.app, name="kv")
app.command("plan")(cli_plan.plan_command)
app.command("scale")(cli_scale.scale)
app.command("restart")(cli_scale.restart)
app.command("train-draft")(cli_train.train_draft)

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG.yaml", callback=find_config, help="Deployment file, or the name of a shipped one."),
]
Address = Annotated[str | None, typer.Option(help='Running Ray cluster, or "auto". Default: a local one.')]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def main() -> None:
    """Entry point: runs a command and exits with its code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    stop_signals.raise_at_once()
    try:
        code: Any = typer.main.get_command(app).main(cli_bench.fill_json_target(sys.argv[1:]), standalone_mode=False)
    except ClickException as error:
        context = getattr(error, "ctx", None)  # of the command that was misused
        command = context.command_path if context is not None else "blockferry"
        cli_output.print_error(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        code = error.exit_code
    except (BlockferryError, OSError) as error:
        cli_output.print_error(str(error))
        code = 1
    except Interrupted as interrupt:
        cli_output.note(str(interrupt))
        code = interrupt.exit_code
    sys.exit(code if isinstance(code, int) else 0)


@app.command("fetch-model")
def fetch_model(name: Annotated[str, typer.Argument(metavar="NAME", help="Such as smollm2-135m-instruct.")]) -> None:
    """Put a known small model into the local cache."""
    from blockferry.cluster.fetch import fetch

    with cli_output.progress_bar() as report:
        folder = fetch(name, progress=_phases(report))
    cli_output.print_line(str(folder))


@app.command()
def serve(config: ConfigFile, address: Address = None) -> None:
    """Bring a deployment up and serve HTTP until Ctrl-C or SIGTERM; what dies meanwhile is started again."""
    from blockferry.cluster.serving import keep_up
    from blockferry.cluster.session import Wish, deployed

    with contextlib.ExitStack() as stack:
        stack.enter_context(cli_output.only_results_on_stdout())
        with cli_output.progress_bar() as report:
            deployment = _load(config, report)
            wish = Wish(deployment=deployment, file=config, address=address, with_api=True)
            running = stack.enter_context(deployed(wish, report))
        cli_output.print_line(f"{deployment.config.model.served_name} is served at {running.url}")
        stack.enter_context(stop_signals.noted())
        asyncio.run(until_stopped(keep_up(running)))


@app.command()
def generate(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: ConfigFile,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Each one is answered by itself.")],
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws, where temperature is not 0.")] = None,
    is_chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="A prompt is a user's message, or text to continue. Default: the model's."),
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts, with a deployment that runs already or one brought up for it."""
    from blockferry.cluster.generate import GenerateOptions, PromptStyle, attached

    styles = {None: PromptStyle.AUTO, True: PromptStyle.CHAT, False: PromptStyle.RAW}
    options = GenerateOptions(max_tokens=max_tokens, temperature=temperature, style=styles[is_chat], seed=seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cli_output.only_results_on_stdout())
        with cli_output.progress_bar() as report:
            deployment = _load(config, report)
            endpoint = stack.enter_context(_endpoint(deployment, config, address, report))
            report(Progress(phase="generating", done=0, total=1))
            answers = asyncio.run(attached(endpoint, deployment.config, prompts, options))
        if as_json:
            cli_output.print_json({"outputs": [answer.to_json() for answer in answers]})
        else:
            cli_output.print_answers(answers)
    if any(answer.error for answer in answers):
        raise typer.Exit(1)


@app.command()
def status(address: Address = None, as_json: AsJson = False) -> None:
    """Show instances, workers, ledgers and transfers of running deployments."""
    from blockferry.cluster.status import deployments_at, deployments_here

    with cli_output.only_results_on_stdout():
        deployments = deployments_here() if address is None else deployments_at(address)
    if as_json:
        cli_output.print_json({"deployments": deployments})
    else:
        cli_output.print_status(deployments)


@app.command()
def check(config: ConfigFile, address: Address = None, as_json: AsJson = False) -> None:
    """Say what would not work here, and why, before anything starts."""
    from blockferry.cluster.check import check_deployment

    with cli_output.only_results_on_stdout():
        findings = check_deployment(config, address=address)
    if as_json:
        cli_output.print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        cli_output.print_findings(findings)
    if any(finding.is_error for finding in findings):
        raise typer.Exit(1)


@contextlib.contextmanager
def _endpoint(deployment: Deployment, file: Path, address: str | None, report: Report) -> Iterator[Endpoint]:
    """The scheduler's endpoint: of the deployment that runs under this name here, else of a new one."""
    from blockferry.cluster.run_record import find_record
    from blockferry.cluster.session import Wish, deployed

    record = find_record(deployment.config.name)
    if record is not None and address is None:
        if record.model_path != str(deployment.config.model.path):
            raise BlockferryError(
                f"deployment {record.name!r} runs here with another model ({record.model_path}); change `name`"
            )
        yield record.client
        return
    wish = Wish(deployment=deployment, file=file, address=address, with_api=False)
    with deployed(wish, report) as running:
        yield running.client_endpoint


def _load(file: Path, report: Report) -> Deployment:
    from blockferry.cluster.deployment import load_deployment

    return load_deployment(file, progress=_phases(report))


def _phases(report: Report) -> Callable[[str], None]:
    return lambda phase: report(Progress(phase=phase, done=0, total=1))
