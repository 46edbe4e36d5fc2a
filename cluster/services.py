"""The two actors of a deployment that are no ranks, scheduler and HTTP server: made, started, and started again.

Both run on the node of the process that brings the deployment up. Owns the order of their steps; the actors are
Running's. Raises LaunchError.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from blockferry.cluster import actors
from blockferry.cluster.actor_calls import POLL_S, STEP_TIMEOUT_S, LaunchError, gather, silent
from blockferry.cluster.bring_up import settings_of, worker_places
from blockferry.cluster.deployment import is_disaggregated
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.ray_session import NAMESPACE
from blockferry.cluster.running import API, SCHEDULER, InstanceRun, Running
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
    (running.url,) = await gather({API: running.api.open.remote()}, "opening the port", silent)


async def start_scheduler(running: Running, instances: Sequence[InstanceRun], report: Report) -> dict[str, str]:
    """Give the scheduler instances that are up and wait until all ranks have joined; why those that failed did."""
    settings = _scheduler_settings(running, instances)
    workers = {instance.instance_id: instance.ranks for instance in instances}
    calls = {SCHEDULER: running.scheduler.prepare.remote(settings, workers)}
    (running.client_endpoints,) = await gather(calls, "starting the scheduler", report)
    running.runs[SCHEDULER] = running.scheduler.run.remote()
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    while not _have_joined(instances, states := await instance_states(running)):
        _raise_if_ended(running, SCHEDULER)
        if time.monotonic() > deadline_s:
            raise LaunchError(f"workers did not join the scheduler within {STEP_TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)
    return {instance_id: one.reason for instance_id, one in states.items() if one.state == "failed"}


def _have_joined(instances: Sequence[InstanceRun], states: Mapping[str, InstanceState]) -> bool:
    known = [states.get(instance.instance_id) for instance in instances]
    return all(one is not None and one.state != "starting" for one in known)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceState:
    """What the scheduler says of an instance."""

    state: str
    reason: str


async def instance_states(running: Running) -> dict[str, InstanceState]:
    """The scheduler's word on every instance, at most a second old; empty before it runs."""
    (status,) = await gather({SCHEDULER: running.scheduler.status.remote()}, "asking for its status", silent)
    return {
        one["instance_id"]: InstanceState(state=one["state"], reason=one["reason"])
        for one in status.get("instances", ())
    }


def _scheduler_settings(running: Running, instances: Sequence[InstanceRun]) -> SchedulerSettings:
    config = running.config
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
        _raise_if_ended(running, API)
        await asyncio.sleep(POLL_S)
    (is_ready,) = await gather({API: ready}, "starting the HTTP server", silent)
    if not is_ready:
        raise LaunchError(f"the HTTP server was not ready within {STEP_TIMEOUT_S:g} s")


def same_port(api: ApiConfig, url: str) -> ApiConfig:
    """The settings of a server that takes over the address of one that has ended."""
    return dataclasses.replace(api, port=int(url.rpartition(":")[2]))


def _raise_if_ended(running: Running, name: str) -> None:
    reason = running.find_ended().get(name)
    if reason is not None:
        raise LaunchError(f"{name} has ended: {reason}")
