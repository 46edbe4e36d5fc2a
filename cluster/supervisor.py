"""Keeps a deployment whole for as long as it is served: brings back what died, takes in and lets go of instances.

Owns Running from the end of launch() on; all of it happens on one event loop. decide() of supervision says what to do;
here it is done. What takes long is a task of its own, so that the watch goes on meanwhile.

    scheduler dead   every surviving rank is reset -> a new scheduler -> ranks and HTTP server go over to it
    API dead         a new one on the same port
    instance failed  cleared away -> a new one, under a new name, once there is room for it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray

from blockferry.cluster import bring_up, services
from blockferry.cluster.actor_calls import POLL_S, LaunchError, failure_of, gather, silent
from blockferry.cluster.placement import PlacementError
from blockferry.cluster.running import API, SCHEDULER, InstanceRun, Running
from blockferry.cluster.services import InstanceState
from blockferry.cluster.supervision import MAX_FAILURES, Phase, Seen, Streak, decide
from blockferry.cluster.takedown import forget, kill, take_down_drained, take_down_failed
from blockferry.engine.errors import BlockferryError, ConfigError

logger = logging.getLogger(__name__)

FROZEN_S = 20.0  # that scheduler or HTTP server may take to answer before they are killed
ROUND_S = 0.5  # between two looks at the deployment
JOIN_TIMEOUT_S = 120.0
CONNECT_ATTEMPTS = 3  # of a newcomer's pools with those that are there, of which some may just be dying
RETRY_S = 1.0
SETTLE_S = 2.0  # after ranks' resets: what a process or connection that died had sent has been taken in by then
DRAINED_GRACE_S = 60.0  # after a drain's deadline: hand-offs under way end, or are given up

NOT_UP = (
    LaunchError,
    PlacementError,
    ConfigError,
    ray.exceptions.RayError,
    ValueError,
)  # why something did not come up


class GivenUp(BlockferryError):
    """What a deployment cannot do without fails again and again."""


class Supervisor:
    """The watch over one deployment. Used on the event loop that runs run()."""

    def __init__(self, running: Running, on_new_scheduler: Callable[[], None]) -> None:
        """`on_new_scheduler` is called when clients have to connect elsewhere."""
        self.running = running
        self.wanted = {index: one.replicas for index, one in enumerate(running.config.instances)}
        self._on_new_scheduler = on_new_scheduler
        self._states: dict[str, InstanceState] = {}
        self._joining = asyncio.Lock()  # one newcomer at a time connects to all others; none while ranks are reset
        now_s = time.monotonic()
        self._streaks = {name: Streak(now_s=now_s) for name in (SCHEDULER, API)}
        self._index_streaks = {index: Streak(now_s=now_s) for index in self.wanted}
        self._not_before_s: dict[int, float] = {}
        self._unreplaced: dict[int, list[str]] = {}  # failed instances that the scheduler still lists, by index
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Watch until cancelled. Raises GivenUp."""
        try:
            while True:
                await self._round()
                await asyncio.sleep(ROUND_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _round(self) -> None:
        ended = self.running.find_ended()
        if SCHEDULER in ended:
            await self._restart(SCHEDULER, ended[SCHEDULER], self._restart_scheduler)
            return
        if API in ended:
            await self._restart(API, ended[API], self._restart_api)
        await self._end_frozen()
        await self._look_after_instances()

    async def _end_frozen(self) -> None:
        """Kill what does not answer: then it has ended, and is started again."""
        for name, actor in ((SCHEDULER, self.running.scheduler), (API, self.running.api)):
            try:
                await gather({name: actor.place.remote()}, "answering", silent, timeout_s=FROZEN_S)
            except LaunchError as error:
                logger.warning("%s; ending it", error)
                await self._end(actor)

    # --- scheduler and HTTP server

    async def _restart(self, name: str, reason: str, start: Callable[[], Awaitable[None]]) -> None:
        """Start one of them again. Raises GivenUp when that does not help."""
        streak = self._streaks[name]
        delay_s = streak.fail(now_s=time.monotonic())
        if streak.num_failures > MAX_FAILURES:
            raise GivenUp(f"{name} has ended {streak.num_failures} times in a row, at last: {reason}")
        logger.warning("%s has ended: %s; starting it again", name, reason)
        await asyncio.sleep(min(delay_s, RETRY_S))
        started_s = time.monotonic()
        try:
            await start()
        except NOT_UP as error:
            logger.warning("%s did not come up again: %s", name, error)
            return
        now_s = time.monotonic()
        streak.up(now_s=now_s)
        logger.warning("%s is up again after %.1f s", name, now_s - started_s)

    async def _restart_scheduler(self) -> None:
        running = self.running
        async with self._joining:
            await self._end(running.scheduler)
            await self._create(lambda: services.create_scheduler(running))  # its process starts while ranks are reset
            survivors = await self._reset(running.in_phase(Phase.SERVING))
            settled_s = time.monotonic() + SETTLE_S
            await gather({SCHEDULER: running.scheduler.place.remote()}, "starting the scheduler", silent)
            await asyncio.sleep(max(0.0, settled_s - time.monotonic()))
            self._states, self._unreplaced = {}, {}
            try:
                await services.start_scheduler(running, survivors, silent)
            except BaseException:
                await self._end(running.scheduler)
                raise
            self._on_new_scheduler()
        if API not in running.find_ended():
            await self._reattach_api()

    async def _reset(self, instances: list[InstanceRun]) -> list[InstanceRun]:
        """Make ranks ready for another scheduler; those instances that are, while the others are cleared away."""
        calls = {one.instance_id: [rank.reset.remote() for rank in one.ranks] for one in instances}
        pending = [call for group in calls.values() for call in group]
        while pending:  # a rank that does not answer within its own limits is dead, and Ray says so
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            await asyncio.sleep(POLL_S)
        survivors = []
        for instance in instances:
            failures = [failure for call in calls[instance.instance_id] if (failure := failure_of(call))]
            if failures:
                self._lose(instance, failures[0])
            else:
                survivors.append(instance)
        return survivors

    async def _reattach_api(self) -> None:
        """Have the HTTP server go over to the new scheduler; one that cannot is ended, and so started again."""
        running, here = self.running, ray.get_runtime_context().get_node_id()
        call = running.api.reattach.remote(running.client_endpoints, here)
        try:
            await gather({API: call}, "going over to the new scheduler", silent)
        except LaunchError as error:
            logger.warning("%s", error)
            await self._end(running.api)

    async def _restart_api(self) -> None:
        running = self.running
        await self._end(running.api)
        api = services.same_port(running.config.api, running.url)
        await self._create(lambda: services.create_api(running, api))
        try:
            await services.open_port(running)
            await services.serve_api(running, silent)
        except BaseException:
            await self._end(running.api)
            raise

    async def _create(self, create: Callable[[], None]) -> None:
        """Make an actor once Ray has forgotten that of the same name, which has ended."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            try:
                create()
                return
            except ValueError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(POLL_S)

    async def _end(self, actor: Any) -> None:
        await kill([actor])

    # --- instances

    async def _look_after_instances(self) -> None:
        try:
            self._states = await services.instance_states(self.running)
        except LaunchError:
            return  # the scheduler has just died
        now_s = time.monotonic()
        actions = decide(self._seen(), self.wanted, not_before_s=self._not_before_s, now_s=now_s)
        for instance_id in actions.clear:
            instance = self.running.instances[instance_id]
            self._unreplaced.setdefault(instance.placed.index, []).append(instance_id)
            self._lose(instance, self._states[instance_id].reason)
        for index in actions.start:
            self._spawn(self._replace(index))

    def _seen(self) -> list[Seen]:
        states = self._states
        return [
            Seen(
                instance_id=one.instance_id,
                index=one.placed.index,
                phase=one.phase,
                state=states[one.instance_id].state if one.instance_id in states else None,
            )
            for one in self.running.instances.values()
        ]

    def _lose(self, instance: InstanceRun, reason: str) -> None:
        logger.warning("instance %s has failed: %s", instance.instance_id, reason)
        instance.phase = Phase.LOST
        self._note_failure(instance.placed.index)
        self._spawn(take_down_failed(self.running, instance))

    def _note_failure(self, index: int) -> None:
        now_s = time.monotonic()
        delay_s = self._index_streaks[index].fail(now_s=now_s)
        self._not_before_s[index] = now_s + delay_s

    async def _replace(self, index: int) -> None:
        """Bring one instance up on the deployment's own account."""
        try:
            instance = await self.bring(index)
        except BlockferryError as error:
            self._note_failure(index)
            wait_s = self._not_before_s[index] - time.monotonic()
            role = self.running.config.instances[index].role
            logger.warning("no new %s instance came up: %s; next attempt in %.0f s", role, error, max(0.0, wait_s))
            return
        logger.warning("instance %s serves", instance.instance_id)

    async def bring(self, index: int) -> InstanceRun:
        """Bring one more instance up; it serves when this returns.

        Raises PlacementError, ConfigError or LaunchError, with nothing left of it.
        """
        running = self.running
        instance = running.name_next(index)
        try:
            await bring_up.reserve(running.config, [instance])
            bring_up.create_ranks(running.config, instance, hosts=running.hosts)
            await bring_up.find_places([instance], silent)
            bring_up.check_places(running, [*running.in_phase(Phase.SERVING), instance])
            await bring_up.load([instance], silent)
            await bring_up.make_pools(running.deployment, [instance], silent)
            async with self._joining:
                await self._join(instance)
        except NOT_UP as error:
            instance.phase = Phase.LOST
            await take_down_failed(running, instance)
            await forget(running, instance.instance_id)
            if isinstance(error, BlockferryError):
                raise
            raise LaunchError(f"{instance.instance_id}: {error}") from error
        instance.phase = Phase.SERVING
        self._index_streaks[index].up(now_s=time.monotonic())
        for failed in self._unreplaced.get(index, [])[:1]:
            self._unreplaced[index].remove(failed)
            await forget(running, failed)
        return instance

    async def _join(self, instance: InstanceRun) -> None:
        running = self.running
        for attempt in range(CONNECT_ATTEMPTS):
            others = running.in_phase(Phase.SERVING)
            try:
                await bring_up.connect(running.config, [instance], others, silent)
                break
            except LaunchError:
                if attempt + 1 == CONNECT_ATTEMPTS or SCHEDULER in running.find_ended():
                    raise
                await asyncio.sleep(RETRY_S)
        call = running.scheduler.add_instance.remote(
            bring_up.settings_of(instance), instance.ranks, bring_up.worker_places(instance)
        )
        await gather({SCHEDULER: call}, f"taking in {instance.instance_id}", silent)
        state = await self._state_after(instance, None, "starting", timeout_s=JOIN_TIMEOUT_S)
        if state is None or state.state != "serving":
            raise LaunchError(f"{instance.instance_id} did not join: {state.reason if state else 'it is unknown'}")

    async def leave(self, instance: InstanceRun, phase: Phase, *, drain_timeout_s: float) -> None:
        """Let an instance go; no request is lost. `phase`: VACATING where another one is to take its place.

        Raises LaunchError when it failed meanwhile; it has gone then all the same.
        """
        running = self.running
        instance.phase = phase
        call = running.scheduler.drain.remote(instance.instance_id, drain_timeout_s)
        with contextlib.suppress(LaunchError):  # the scheduler has died; the next one will not know the instance
            await gather({SCHEDULER: call}, f"draining {instance.instance_id}", silent)
        state = await self._state_after(instance, "serving", "draining", timeout_s=drain_timeout_s + DRAINED_GRACE_S)
        if state is None or state.state == "drained":
            await take_down_drained(running, instance)
            return
        instance.phase = Phase.LOST if phase is Phase.VACATING else phase
        await take_down_failed(running, instance)
        await forget(running, instance.instance_id)
        raise LaunchError(f"{instance.instance_id} did not end in peace: {state.reason or state.state}")

    async def _state_after(self, instance: InstanceRun, *states: str | None, timeout_s: float) -> InstanceState | None:
        """What the scheduler says of an instance once it says none of these, or when time is up; None: nothing."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                known = (await services.instance_states(self.running)).get(instance.instance_id)
            except LaunchError:
                return None  # the scheduler has died, and the next one will not know it
            if (known.state if known else None) not in states or time.monotonic() > deadline_s:
                return known
            await asyncio.sleep(POLL_S)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the supervisor failed", exc_info=error)
