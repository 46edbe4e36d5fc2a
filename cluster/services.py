"""The two actors of a deployment that are no ranks, scheduler and HTTP server: made, started, and started again.

Both run on the node of the process that brings the deployment up. Owns the order of their steps; the actors are
Running's. Raises LaunchError.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from blockferry.cluster import actors
from blockferry.cluster.actor_calls import POLL_S, STEP_TIMEOUT_S, LaunchError, gather, silent
from blockferry.cluster.bring_up import settings_of, worker_places
from blockferry.cluster.deployment import is_disaggregated
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.ray_session import NAMESPACE
from blockferry.cluster.running import API, SCHEDULER, Running
from blockferry.cluster.scheduler_host import SchedulerSettings
from blockferry.cluster.scheduler_loop import LoopTiming
from blockferry.engine.config import ApiConfig


def create_scheduler(running: Running) -> None:
    """Ask for the scheduler's process. Raises ValueError when its name is taken."""
    name = actors.scheduler_name(running.config.name)
    actor = ray.remote(actors.SchedulerActor).options(name=name, num_cpus=0, **_beside_driver())
    running.scheduler = actor.remote()


def create_api(running: Running, api: ApiConfig) -> None:
    """Ask for the HTTP server's process. Raises ValueError when its name is taken."""
    name = actors.api_name(running.config.name)
    actor = ray.remote(actors.ApiActor).options(name=name, num_cpus=api.num_cpus, **_beside_driver())
    running.api = actor.remote(running.config.model, api, running.config.health)


def _beside_driver() -> dict[str, Any]:
    return {
        "namespace": NAMESPACE,
        "max_concurrency": 8,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        "runtime_env": {"env_vars": actors.worker_environment(1)},
    }


async def open_port(running: Running) -> None:
    """Have the HTTP server bind its port."""
    (running.url,) = await gather({"api": running.api.open.remote()}, "opening the port", silent)


async def start_scheduler(running: Running, report: Report) -> None:
    """Give the scheduler every instance that is up and wait until all ranks have joined it."""
    settings = _scheduler_settings(running)
    calls = {"scheduler": running.scheduler.prepare.remote(settings, running.workers)}
    (running.client_endpoints,) = await gather(calls, "starting the scheduler", report)
    running.runs[SCHEDULER] = running.scheduler.run.remote()
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    while not (await gather({"scheduler": running.scheduler.is_complete.remote()}, "joining", silent))[0]:
        _raise_if_ended(running)
        if time.monotonic() > deadline_s:
            raise LaunchError(f"workers did not join the scheduler within {STEP_TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)


def _scheduler_settings(running: Running) -> SchedulerSettings:
    config, instances = running.config, running.instances.values()
    here = ray.get_runtime_context().get_node_id()
    return SchedulerSettings(
        deployment=config.name,
        model=config.model.served_name,
        max_model_len=config.model.max_model_len,
        instances=tuple(settings_of(instance) for instance in instances),
        connector=config.connector if is_disaggregated(config) else None,
        has_remote_ranks=any(place.node_id != here for instance in instances for place in instance.places),
        workers=tuple(place for instance in instances for place in worker_places(instance)),
        timing=LoopTiming(silence_limit_s=config.health.silence_limit_s),
        router=config.router,
    )


async def serve_api(running: Running, report: Report) -> None:
    """Have the HTTP server answer on its port."""
    here = ray.get_runtime_context().get_node_id()
    running.runs[API] = running.api.run.remote(running.client_endpoints, here)
    ready = running.api.wait_ready.remote(STEP_TIMEOUT_S)
    report(Progress(phase="starting the HTTP server", done=0, total=1))
    while not ray.wait([ready], timeout=0)[0]:
        _raise_if_ended(running)
        await asyncio.sleep(POLL_S)
    (is_ready,) = await gather({"api": ready}, "starting the HTTP server", silent)
    if not is_ready:
        raise LaunchError(f"the HTTP server was not ready within {STEP_TIMEOUT_S:g} s")


def same_port(api: ApiConfig, url: str) -> ApiConfig:
    """The settings of a server that takes over the address of one that has ended."""
    return dataclasses.replace(api, port=int(url.rpartition(":")[2]))


def _raise_if_ended(running: Running) -> None:
    for name, reason in running.find_ended().items():
        raise LaunchError(f"{name} has ended: {reason}")
