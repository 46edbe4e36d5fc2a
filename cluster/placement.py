"""Where workers go: which resources a deployment takes, whether the cluster has them, and the reservation.

Owns the placement groups it makes. The arithmetic is pure and runs on a list of nodes; only reserve() and
release() speak to Ray.

    one placement group per instance (PACK), one bundle per pipeline stage: the tensor-parallel ranks of a
    stage share a bundle and so a node
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from blockferry.engine.config import DeploymentConfig, InstanceConfig, Role
from blockferry.engine.errors import BlockferryError

RESERVE_TIMEOUT_S = 20.0

Resources = Mapping[str, float]


class PlacementError(BlockferryError):
    """The cluster lacks what a deployment needs; the message names the resource."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedInstance:
    """One replica of an instance: its name and shape."""

    instance_id: str
    index: int  # in the deployment's `instances`
    config: InstanceConfig

    @property
    def num_ranks(self) -> int:
        """Worker processes."""
        return self.config.tensor_parallel * self.config.pipeline_parallel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster as its resources count."""

    address: str
    total: Resources
    free: Resources


def name_instances(config: DeploymentConfig) -> list[PlacedInstance]:
    """Every replica with its name: prefill-0, prefill-1, decode-0, ..."""
    counts: dict[Role, int] = {}
    placed = []
    for index, instance in enumerate(config.instances):
        for _ in range(instance.replicas):
            number = counts.get(instance.role, 0)
            counts[instance.role] = number + 1
            placed.append(PlacedInstance(instance_id=f"{instance.role.value}-{number}", index=index, config=instance))
    return placed


def rank_resources(instance: InstanceConfig) -> dict[str, float]:
    """What one worker takes, in Ray's names."""
    wanted = {"CPU": instance.num_cpus, "GPU": instance.num_gpus} | instance.resources
    return {name: amount for name, amount in wanted.items() if amount > 0}


def stage_resources(instance: InstanceConfig) -> dict[str, float]:
    """What the tensor-parallel ranks of one stage take together; they share a node."""
    return {name: amount * instance.tensor_parallel for name, amount in rank_resources(instance).items()}


def total_resources(instances: Sequence[PlacedInstance]) -> dict[str, float]:
    """What all workers take."""
    total: dict[str, float] = {}
    for instance in instances:
        for name, amount in rank_resources(instance.config).items():
            total[name] = total.get(name, 0.0) + amount * instance.num_ranks
    return total


def find_shortage(
    instances: Sequence[PlacedInstance], nodes: Sequence[Node], *, who: str = "the deployment needs"
) -> str:
    """The first resource that the cluster lacks, with key path, amounts and remedy; empty when none."""
    for instance in instances:
        for name, amount in stage_resources(instance.config).items():
            largest = max(nodes, key=lambda node, name=name: node.total.get(name, 0.0), default=None)  # type: ignore[misc]
            most = largest.total.get(name, 0.0) if largest else 0.0
            if amount > most:
                return (
                    f"instances[{instance.index}] needs {amount:g} {name} on one node "
                    f"(tensor_parallel={instance.config.tensor_parallel}); "
                    f"the most that a node of this cluster has is {most:g}; "
                    f"add a node with {name}, or ask for less under instances[{instance.index}].resources"
                )
    remedy = "ask for less under instances[].resources, or add nodes"
    for name, amount in total_resources(instances).items():
        total = sum(node.total.get(name, 0.0) for node in nodes)
        free = sum(node.free.get(name, 0.0) for node in nodes)
        if amount > total:
            return f"{who} {amount:g} {name}; the cluster has {total:g} on {len(nodes)} node(s); {remedy}"
        if amount > free:
            return (
                f"{who} {amount:g} {name}; {free:g} of the cluster's {total:g} are free; "
                f"stop what uses the rest, {remedy}"
            )
    return ""


def cluster_nodes() -> list[Node]:
    """The live nodes of the connected cluster, with what is free on each."""
    state: Any = ray._private.state  # untyped, and the public calls give sums over the cluster only
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own signature
    free = state.available_resources_per_node()
    return [
        Node(
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in nodes
        if node["Alive"]
    ]


async def reserve(instances: Sequence[PlacedInstance], *, name: str) -> dict[str, PlacementGroup]:
    """A placement group per instance. Raises PlacementError, with nothing reserved, when they do not fit."""
    shortage = find_shortage(instances, cluster_nodes())
    if shortage:
        raise PlacementError(shortage)
    groups: dict[str, PlacementGroup] = {}
    try:
        for instance in instances:
            bundles: list[dict[str, Any]] = [
                stage_resources(instance.config) or {"CPU": 0.001} for _ in range(instance.config.pipeline_parallel)
            ]
            groups[instance.instance_id] = placement_group(
                bundles, strategy="PACK", name=f"{name}:{instance.instance_id}"
            )
        for instance in instances:
            if not await _is_ready(groups[instance.instance_id]):
                raise PlacementError(
                    f"instance {instance.instance_id} found no place within {RESERVE_TIMEOUT_S:g} s: it needs "
                    f"{_words(stage_resources(instance.config))} on one node for each of "
                    f"{instance.config.pipeline_parallel} stage(s); free now: {_free_words(cluster_nodes())}"
                )
    except BaseException:
        release(groups.values())
        raise
    return groups


async def _is_ready(group: PlacementGroup) -> bool:
    deadline_s = time.monotonic() + RESERVE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if group.wait(0):
            return True
        await asyncio.sleep(0.1)
    return False


def release(groups: Iterable[PlacementGroup]) -> None:
    """Give reservations back."""
    for group in groups:
        remove_placement_group(group)


def _words(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _free_words(nodes: Sequence[Node]) -> str:
    shown = [
        f"{node.address}: "
        + _words({name: amount for name, amount in node.free.items() if name in ("CPU", "GPU") or name.islower()})
        for node in nodes
    ]
    return "; ".join(shown)
