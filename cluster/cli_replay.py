"""`blockferry bench serve --trace`: its options, turned into replays against one endpoint or one deployment each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockferry.cluster.cli_bench_options import one_line_errors, own_deployment
from blockferry.cluster.router import POLICIES
from blockferry.cluster.shipped import find_config
from blockferry.engine.config import RouterConfig
from blockferry.engine.errors import ConfigError

if TYPE_CHECKING:
    from blockferry.cluster.bench.replay import ReplayConfig
    from blockferry.cluster.bench.report import Result
    from blockferry.cluster.deployment import Deployment
    from blockferry.cluster.running import Running

STATUS_TIMEOUT_S = 10.0


def replay_trace(wanted: ReplayConfig, *, config: Path | None, routers: Sequence[str], json_target: str | None) -> None:
    """Replay against wanted.base_url, or on the deployment of `config` with each of the routers' policies in turn."""
    from blockferry.cluster.bench.replay import replay
    from blockferry.cluster.bench.report import Report, emit
    from blockferry.cluster.bench.trace import read_trace

    with one_line_errors():
        if routers and config is None:
            raise ConfigError("--router", "is chosen by a deployment of its own; give --config too")
        for policy in routers:
            if policy not in POLICIES:
                raise ConfigError("--router", f"{policy!r} is not one of {', '.join(POLICIES)}")
        read_trace(wanted.trace, limit=wanted.limit)  # what cannot be read is refused before anything starts
        if config is None:
            rows = asyncio.run(replay(wanted))
        else:
            file = find_config(config)
            rows = [row for one in _variants(file, routers) for row in _on_deployment(wanted, one, file)]
        emit(Report(command="bench serve", results=rows), json_target=json_target)


def _variants(file: Path, routers: Sequence[str]) -> Iterator[Deployment]:
    from blockferry.cluster.deployment import load_deployment

    deployment = load_deployment(file)
    for policy in routers or [deployment.config.router.policy]:
        config = dataclasses.replace(deployment.config, router=RouterConfig(policy=policy))
        yield dataclasses.replace(deployment, config=config)


def _on_deployment(wanted: ReplayConfig, deployment: Deployment, file: Path) -> list[Result]:
    from blockferry.cluster.bench.replay import deployment_rows, replay, wait_until_idle

    with contextlib.ExitStack() as stack:
        running = stack.enter_context(own_deployment(deployment, file))
        mine = dataclasses.replace(wanted, base_url=running.url, label=deployment.config.router.policy)
        before = _status(running)
        rows = asyncio.run(replay(mine))
        after = wait_until_idle(lambda: _status(running))
        return [*rows, *deployment_rows(before, after, mine)]


def _status(running: Running) -> dict[str, Any]:
    import ray

    status: dict[str, Any] = ray.get(running.scheduler.status.remote(), timeout=STATUS_TIMEOUT_S)
    return status
