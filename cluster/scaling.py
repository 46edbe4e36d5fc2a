"""What a person may ask of a deployment that runs: other counts of instances, and a rolling restart.

Sequences of the supervisor's steps, one at a time; each tells how far it is. Raises ScaleRefused, with nothing
changed, for what cannot be.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from blockferry.cluster import placement
from blockferry.cluster.actor_calls import LaunchError
from blockferry.cluster.check import find_shortage_here
from blockferry.cluster.control import Handler, Tell
from blockferry.cluster.placement import PlacedInstance, PlacementError
from blockferry.cluster.running import InstanceRun
from blockferry.cluster.supervision import Phase, ScaleRefused, spread
from blockferry.cluster.supervisor import Supervisor
from blockferry.connectors.transport.hosts import Hosts

ROOM_TIMEOUT_S = 15.0  # for a place that was given back to be free


class Scaling:
    """Commands to one supervisor. Used on its event loop."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._is_busy = False

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By the names that commands have."""
        return {"scale": self.scale, "restart": self.restart}

    async def scale(self, arguments: Mapping[str, Any], tell: Tell) -> str:
        """Have as many instances as `counts` says, by role; `drain_timeout_s` is for those that leave."""
        async with self._alone():
            supervisor = self._supervisor
            configs = supervisor.running.config.instances
            before = dict(supervisor.wanted)
            target = spread(arguments["counts"], before, configs)
            more = [index for index, count in target.items() for _ in range(count - before[index])]
            fewer = [index for index, count in target.items() for _ in range(before[index] - count)]
            steps: list[Callable[[], Awaitable[None]]] = [
                lambda: self._add(more, tell),
                lambda: self._take(fewer, tell, float(arguments["drain_timeout_s"])),
            ]
            shortage = self._shortage(more)
            if shortage and not fewer:
                raise ScaleRefused(f"nothing was changed: {shortage}")
            for step in reversed(steps) if shortage else steps:  # those that leave make room
                await step()
            return self._words()

    async def restart(self, arguments: Mapping[str, Any], tell: Tell) -> str:
        """Replace every instance, one after the other."""
        async with self._alone():
            for instance in self._supervisor.running.in_phase(Phase.SERVING):
                if instance.phase is Phase.SERVING:  # still
                    await self._renew(instance, tell, float(arguments["drain_timeout_s"]))
            return self._words()

    async def _renew(self, instance: InstanceRun, tell: Tell, drain_timeout_s: float) -> None:
        supervisor, index = self._supervisor, instance.placed.index
        shortage = self._shortage([index])
        if shortage:
            tell(f"{instance.instance_id} is drained before its replacement starts: {shortage}")
            await self._leave(instance, Phase.VACATING, tell, drain_timeout_s)
            fresh = await self._bring_once_there_is_room(index)
        else:
            tell(f"a replacement for {instance.instance_id} starts")
            fresh = await supervisor.bring(index)
        tell(f"{fresh.instance_id} serves")
        if not shortage and instance.phase is Phase.SERVING:  # still
            await self._leave(instance, Phase.SURPLUS, tell, drain_timeout_s)

    async def _bring_once_there_is_room(self, index: int) -> InstanceRun:
        deadline_s = time.monotonic() + ROOM_TIMEOUT_S
        while True:
            try:
                return await self._supervisor.bring(index)
            except PlacementError:
                if time.monotonic() > deadline_s:
                    raise

    async def _add(self, indexes: Sequence[int], tell: Tell) -> None:
        """Bring instances up, all at once; when one does not come up, none stays."""
        if not indexes:
            return
        supervisor = self._supervisor
        tell(f"{len(indexes)} more: loading")

        async def bring(index: int) -> InstanceRun:
            instance = await supervisor.bring(index)
            tell(f"{instance.instance_id} serves")
            return instance

        results = await asyncio.gather(*(bring(index) for index in indexes), return_exceptions=True)
        errors = [one for one in results if isinstance(one, BaseException)]
        came = [one for one in results if isinstance(one, InstanceRun)]
        if errors:
            await asyncio.gather(*(self._leave(one, Phase.SURPLUS, tell, 0.0) for one in came))
            raise ScaleRefused(f"an instance did not come up, so that all is as before: {errors[0]}")
        for index in indexes:
            supervisor.wanted[index] += 1

    async def _take(self, indexes: Sequence[int], tell: Tell, drain_timeout_s: float) -> None:
        """Let the newest instances of these shapes go, all at once."""
        leaving: list[InstanceRun] = []
        for index in indexes:
            self._supervisor.wanted[index] -= 1
            serving = [one for one in self._supervisor.running.in_phase(Phase.SERVING) if one.placed.index == index]
            if serving:  # others that were wanted have failed, and are not to come back
                serving[-1].phase = Phase.SURPLUS
                leaving.append(serving[-1])
        await asyncio.gather(*(self._leave(one, Phase.SURPLUS, tell, drain_timeout_s) for one in leaving))

    async def _leave(self, instance: InstanceRun, phase: Phase, tell: Tell, drain_timeout_s: float) -> None:
        tell(f"{instance.instance_id} is drained, within {drain_timeout_s:g} s")
        try:
            await self._supervisor.leave(instance, phase, drain_timeout_s=drain_timeout_s)
        except LaunchError as error:
            tell(str(error))
        else:
            tell(f"{instance.instance_id} has left")

    def _shortage(self, indexes: Sequence[int]) -> str:
        configs = self._supervisor.running.config.instances
        placed = [PlacedInstance(instance_id="", index=index, config=configs[index]) for index in indexes]
        who = f"{len(indexes)} more instance(s) need"
        if not placed:
            return ""
        shortage = placement.find_shortage(placed, placement.cluster_nodes(), who=who)
        if not shortage and self._supervisor.running.hosts is Hosts.ONE:
            return find_shortage_here(self._supervisor.running.deployment, indexes)
        return shortage

    def _words(self) -> str:
        serving = self._supervisor.running.in_phase(Phase.SERVING)
        return f"serving: {', '.join(one.instance_id for one in serving)}"

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        if self._is_busy:
            raise ScaleRefused("another scale or restart of this deployment is under way; wait for its end")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
