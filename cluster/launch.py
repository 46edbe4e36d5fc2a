"""Brings a deployment up on a Ray session, whole, or leaves nothing of it behind.

Owns the order of the parts' steps; the parts are bring_up's and services'.

    reserve -> api port -> workers load -> pools -> connect -> scheduler -> workers join -> serve
"""

from __future__ import annotations

import asyncio

from blockferry.cluster import bring_up, placement, services
from blockferry.cluster.actor_calls import LaunchError
from blockferry.cluster.deployment import Deployment
from blockferry.cluster.interrupt import until_stopped
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.running import Running
from blockferry.cluster.supervision import Phase
from blockferry.connectors.transport.hosts import Hosts


def launch(deployment: Deployment, report: Report, *, hosts: Hosts, with_api: bool) -> Running:
    """Start every actor of a deployment on the connected Ray cluster.

    Args:
        deployment: what to start.
        report: told of every phase as ranks finish it.
        hosts: that the Ray cluster may ever have.
        with_api: whether an HTTP server is part of it (`generate` needs none).

    Raises:
        PlacementError: the cluster lacks resources.
        LaunchError: an actor failed or took too long. Nothing is left running either way.
    """
    running = Running(deployment=deployment, hosts=hosts)
    for placed in placement.name_instances(deployment.config):
        running.name_next(placed.index)
    try:
        asyncio.run(until_stopped(_launch(running, report, with_api=with_api)))
    except BaseException:
        running.close("the launch failed")
        raise
    return running


async def _launch(running: Running, report: Report, *, with_api: bool) -> None:
    config, instances = running.config, list(running.instances.values())
    report(Progress(phase="reserving places", done=0, total=1))
    await bring_up.reserve(config, instances)
    _create_actors(running, with_api=with_api)
    if with_api:
        await services.open_port(running)  # a busy port is reported before the minutes that loading may take
    await bring_up.find_places(instances, report)
    bring_up.check_places(running, instances)
    await bring_up.load(instances, report)
    await bring_up.make_pools(running.deployment, instances, report)
    await bring_up.connect(config, instances, [], report)
    failures = await services.start_scheduler(running, instances, report)
    for instance_id, reason in failures.items():
        raise LaunchError(f"instance {instance_id} has failed: {reason}")
    for instance in instances:
        instance.phase = Phase.SERVING
    if with_api:
        await services.serve_api(running, report)


def _create_actors(running: Running, *, with_api: bool) -> None:
    """Ask for every process at once: each takes seconds to import its modules."""
    config = running.config
    try:
        if with_api:
            services.create_api(running, config.api)
        for instance in running.instances.values():
            bring_up.create_ranks(config, instance, hosts=running.hosts)
        services.create_scheduler(running)
    except ValueError as error:  # Ray: an actor of this name exists
        raise LaunchError(f"deployment {config.name!r} runs on this cluster already; change `name` ({error})") from None
