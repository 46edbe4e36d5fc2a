"""A deployment that is up: its actors, reservations and where it is reached.

Owns what it names from its creation until close(), which leaves nothing behind. Changed by one event loop at a time,
that of launch() and later that of the supervisor. Steps and requests do not pass here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from blockferry.cluster import placement
from blockferry.cluster.actor_calls import end_of, wait_for
from blockferry.cluster.actors import Place
from blockferry.cluster.deployment import Deployment
from blockferry.cluster.offload_host import remove_files
from blockferry.cluster.offload_settings import TierSettings
from blockferry.cluster.placement import PlacedInstance
from blockferry.cluster.sockets import Endpoint, Endpoints
from blockferry.cluster.supervision import Phase
from blockferry.connectors.transport.hosts import Hosts
from blockferry.engine.config import DeploymentConfig, Role
from blockferry.engine.kv.instance_plan import InstancePlan

SCHEDULER, API = "scheduler", "api"


@dataclasses.dataclass(slots=True, kw_only=True)
class InstanceRun:
    """One instance's processes, from their reservation to their end; filled in step by step by bring_up."""

    placed: PlacedInstance
    phase: Phase = Phase.COMING
    group: PlacementGroup | None = None
    ranks: list[Any] = dataclasses.field(default_factory=list)  # actor handles
    places: list[Place] = dataclasses.field(default_factory=list)  # of the ranks
    plan: InstancePlan | None = None
    tiers: TierSettings | None = None
    pools: list[bytes] = dataclasses.field(default_factory=list)  # the ranks' endpoints; empty: nothing is ferried

    @property
    def instance_id(self) -> str:
        """The name that it has for the deployment's whole life."""
        return self.placed.instance_id


@dataclasses.dataclass(slots=True, kw_only=True)
class Running:
    """A deployment that is up, or on its way."""

    deployment: Deployment
    hosts: Hosts  # that instances may be placed on, for as long as the deployment runs
    instances: dict[str, InstanceRun] = dataclasses.field(default_factory=dict)
    scheduler: Any = None
    api: Any = None
    url: str = ""
    client_endpoints: Endpoints | None = None
    num_named: dict[Role, int] = dataclasses.field(default_factory=dict)  # instances, in the deployment's whole life
    runs: dict[str, Any] = dataclasses.field(default_factory=dict)  # run() references of SCHEDULER and API

    @property
    def config(self) -> DeploymentConfig:
        """What was asked for at the start."""
        return self.deployment.config

    def in_phase(self, *phases: Phase) -> list[InstanceRun]:
        """Instances, in the order in which they were asked for."""
        return [instance for instance in self.instances.values() if instance.phase in phases]

    @property
    def workers(self) -> dict[str, list[Any]]:
        """Actor handles by instance, in rank order."""
        return {instance_id: instance.ranks for instance_id, instance in self.instances.items()}

    @property
    def client_endpoint(self) -> Endpoint:
        """Where clients on this machine connect."""
        assert self.client_endpoints is not None, "the scheduler is not up"
        return self.client_endpoints.local

    def name_next(self, index: int) -> InstanceRun:
        """One instance more of the shape at this index, under a name that none had before."""
        shape = self.config.instances[index]
        number = self.num_named.get(shape.role, 0)
        self.num_named[shape.role] = number + 1
        placed = PlacedInstance(instance_id=f"{shape.role.value}-{number}", index=index, config=shape)
        self.instances[placed.instance_id] = InstanceRun(placed=placed)
        return self.instances[placed.instance_id]

    def find_ended(self) -> dict[str, str]:
        """How scheduler or API have ended, by name; empty while both run. Does not wait."""
        if not self.runs:
            return {}
        done, _ = ray.wait(list(self.runs.values()), num_returns=len(self.runs), timeout=0)
        return {name: end_of(reference) for name, reference in self.runs.items() if reference in done}

    def close(self, reason: str) -> None:
        """Stop every actor and give the reservations back; every wait has a limit. Idempotent."""
        ranks = [rank for instance in self.instances.values() for rank in instance.ranks]
        services = [actor for actor in (self.api, self.scheduler) if actor is not None]
        with contextlib.suppress(ray.exceptions.RayError):
            if self.api is not None:
                self.api.shutdown.remote()
            if self.scheduler is not None:
                # tells clients and workers, so that requests end with the reason and the workers' run() returns
                wait_for([self.scheduler.shutdown.remote(reason)])
            wait_for(list(self.runs.values()))
            wait_for([rank.shutdown.remote() for rank in ranks])
        end_processes([*services, *ranks])
        with contextlib.suppress(ray.exceptions.RayError):
            placement.release(one.group for one in self.instances.values() if one.group is not None)
        remove_files(self.config)
        self.api = self.scheduler = None
        self.instances, self.runs = {}, {}


def end_processes(actors: list[Any]) -> None:
    """End actors that have been told to stop; whoever does not end by himself within the limit is killed."""
    with contextlib.suppress(ray.exceptions.RayError):
        farewells = {actor.__ray_terminate__.remote(): actor for actor in actors}
        for reference in wait_for(list(farewells)):
            del farewells[reference]
        actors = list(farewells.values())
    for actor in actors:  # killing the others would look like a crash
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)
