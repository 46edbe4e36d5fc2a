"""Takes single instances out of a deployment that goes on: their processes, connections, reservation.

Owns the order of these steps. The waits of one instance keep no other one waiting. The scheduler lists a failed
instance until it is told to forget it, so that its absence is seen for as long as nothing has replaced it.

    drained:  scheduler tells the ranks to stop -> they release what they hold -> peers disconnect -> place given back
    failed:   processes are killed -> gone -> peers disconnect -> place given back
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

import ray

from blockferry.cluster import placement
from blockferry.cluster.actor_calls import POLL_S, LaunchError, gather, has_died, silent
from blockferry.cluster.running import SCHEDULER, InstanceRun, Running, end_processes

logger = logging.getLogger(__name__)

GONE_TIMEOUT_S = 30.0  # for killed processes to be gone; Ray takes 5 s for one that does not answer
SHUTDOWN_TIMEOUT_S = 20.0
RELEASE_S = 1.0  # until what a reservation held is seen to be free


async def take_down_failed(running: Running, instance: InstanceRun) -> None:
    """Clear a failed instance away, or one that did not come up. Raises nothing that its processes can cause."""
    await kill(instance.ranks)
    await _release(running, instance)


async def take_down_drained(running: Running, instance: InstanceRun) -> None:
    """End an instance on which nothing runs any more."""
    await forget(running, instance.instance_id)  # first: its ranks end because they are told, which is no failure
    calls = {f"{instance.instance_id} {rank}": actor.shutdown.remote() for rank, actor in enumerate(instance.ranks)}
    with contextlib.suppress(LaunchError):
        await gather(calls, "stopping", silent, timeout_s=SHUTDOWN_TIMEOUT_S)
    await asyncio.to_thread(end_processes, list(instance.ranks))
    await _release(running, instance)


async def kill(actors: Iterable[Any]) -> None:
    """Kill processes and wait until they are gone, up to GONE_TIMEOUT_S."""
    actors = list(actors)
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            await asyncio.to_thread(ray.kill, actor)
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    for actor in actors:
        while not await _is_gone(actor, deadline_s) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)


async def _is_gone(actor: Any, deadline_s: float) -> bool:
    ping = actor.place.remote()
    while not ray.wait([ping], timeout=0)[0]:
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return has_died(ping)


async def forget(running: Running, instance_id: str) -> None:
    """Have the scheduler drop an instance that is drained or has failed; one that it does not know is no error."""
    call = running.scheduler.remove_instance.remote(instance_id)
    try:
        await gather({SCHEDULER: call}, f"removing {instance_id}", silent)
    except LaunchError as error:  # it never joined, or the scheduler has died and the next one will not know it
        logger.info("%s", error)


async def _release(running: Running, instance: InstanceRun) -> None:
    for other in running.instances.values():
        if other is not instance and other.pools:
            for rank in other.ranks:
                rank.disconnect.remote(instance.instance_id)
    if instance.group is not None:
        placement.release([instance.group])
        instance.group = None
        await asyncio.sleep(RELEASE_S)
    running.instances.pop(instance.instance_id, None)
