"""Brings instances up, one or many at once: reservation, processes, weights, pools, connections.

Owns the order of these steps and nothing else: what is made is written into the InstanceRun at once, so that whoever
owns that can take it down at any moment. What each step raises is LaunchError, unless it says otherwise.

    reserve -> create_ranks -> find_places -> load -> make_pools -> connect -> (the scheduler's add_instance)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from blockferry.cluster import actors, placement
from blockferry.cluster.actor_calls import LaunchError, gather, silent
from blockferry.cluster.deployment import Deployment, is_disaggregated
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.launch_progress import Report
from blockferry.cluster.offload_settings import tier_settings
from blockferry.cluster.placement import PlacedInstance
from blockferry.cluster.plan_facts import facts_of_instance
from blockferry.cluster.ray_session import NAMESPACE
from blockferry.cluster.running import InstanceRun, Running
from blockferry.cluster.scheduler_host import InstanceSettings, WorkerPlace
from blockferry.cluster.worker_settings import WorkerSettings, spec_of
from blockferry.connectors.base import TransferMode
from blockferry.connectors.handshake import with_common_scales, with_scales_of
from blockferry.connectors.transport.hosts import Hosts
from blockferry.engine.config import DeploymentConfig, Role

LOAD_TIMEOUT_S = 1800.0  # weights of a large model over a network disk


async def reserve(config: DeploymentConfig, instances: Sequence[InstanceRun]) -> None:
    """Reserve places for all of them or for none. Raises PlacementError."""
    groups = await placement.reserve([one.placed for one in instances], name=config.name)
    for instance in instances:
        instance.group = groups[instance.instance_id]


def create_ranks(config: DeploymentConfig, instance: InstanceRun, *, hosts: Hosts) -> None:
    """Ask for an instance's processes; each takes seconds to import its modules. Raises ValueError for taken names."""
    placed, shape = instance.placed, instance.placed.config
    assert instance.group is not None, instance.instance_id
    for rank in range(placed.num_ranks):
        pp_rank, tp_rank = divmod(rank, shape.tensor_parallel)
        worker = ray.remote(actors.WorkerActor).options(
            name=actors.worker_name(config.name, instance.instance_id, rank),
            namespace=NAMESPACE,
            num_cpus=shape.num_cpus,
            num_gpus=shape.num_gpus,
            resources=shape.resources or None,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=instance.group, placement_group_bundle_index=pp_rank
            ),
            runtime_env={"env_vars": actors.worker_environment(shape.num_threads)},
        )
        settings = _worker_settings(config, placed, tp_rank=tp_rank, pp_rank=pp_rank, hosts=hosts)
        instance.ranks.append(worker.remote(settings))


def _worker_settings(
    config: DeploymentConfig, placed: PlacedInstance, *, tp_rank: int, pp_rank: int, hosts: Hosts
) -> WorkerSettings:
    return WorkerSettings(
        instance_id=placed.instance_id,
        spec=spec_of(config, placed.config, tp_rank=tp_rank, pp_rank=pp_rank),
        connector=config.connector if is_disaggregated(config) else None,
        deployment=config.name,
        hosts=hosts,
    )


async def find_places(instances: Sequence[InstanceRun], report: Report) -> None:
    """Wait until every process is there, and note where."""
    calls = {name: rank.place.remote() for name, rank in _ranks(instances).items()}
    places = iter(await gather(calls, "starting workers", report))
    for instance in instances:
        instance.places = [next(places) for _ in instance.ranks]


def check_places(running: Running, instances: Sequence[InstanceRun]) -> None:
    """Refuse instances on several hosts where their ranks could not reach each other: no network was opened."""
    addresses = {place.address for instance in instances for place in instance.places}
    if running.hosts is Hosts.ONE and is_disaggregated(running.config) and len(addresses) > 1:
        where = ", ".join(f"{one.instance_id} on {one.places[0].address}" for one in instances)
        raise LaunchError(
            f"{where}: a deployment on a Ray cluster of its own shares memory within one host and opens no port "
            "for others; for several hosts start the cluster with `ray up` or `ray start`, and give --address"
        )


async def load(instances: Sequence[InstanceRun], report: Report) -> None:
    """Load all weights, once every rank has found its part of the checkpoint: those that load wait for each other."""
    checks = {name: rank.check.remote() for name, rank in _ranks(instances).items()}
    await gather(checks, "checking the checkpoint", report, timeout_s=LOAD_TIMEOUT_S)
    meetings = {one.instance_id: one.ranks[0].rendezvous.remote() for one in instances if len(one.ranks) > 1}
    methods = dict(zip(meetings, await gather(meetings, "finding rendezvous", silent), strict=True))
    method_of = {name: methods.get(one.instance_id, "") for one in instances for name in _ranks([one])}
    calls = {name: rank.load.remote(method_of[name]) for name, rank in _ranks(instances).items()}
    await gather(calls, "loading weights", report, timeout_s=LOAD_TIMEOUT_S)


async def make_pools(deployment: Deployment, instances: Sequence[InstanceRun], report: Report) -> None:
    """Plan each instance's caches and make its pools, and compute once in them. Raises ConfigError too."""
    config = deployment.config
    for instance in instances:
        where, shape = f"instances[{instance.placed.index}]", instance.placed.config
        instance.plan = plan_of(config.model, deployment.header, shape, where=where)
        instance.tiers = tier_settings(instance.plan, shape, where=where)
    calls = {
        name: rank.create_pool.remote(one.plan, one.tiers) for one in instances for name, rank in _ranks([one]).items()
    }
    pools = iter(await gather(calls, "making pools", report))
    for instance in instances:
        instance.pools = [pool for pool in (next(pools) for _ in instance.ranks) if pool]


async def connect(
    config: DeploymentConfig, newcomers: Sequence[InstanceRun], others: Sequence[InstanceRun], report: Report
) -> None:
    """Connect the pools of newcomers with all they exchange blocks with: each other, and others that are up.

    Only the side that moves the bytes needs a connection; the other one answers on it. Newcomers take the scales of
    fp8 caches from those that are up.
    """
    if not is_disaggregated(config):
        return
    await _agree_on_scales(newcomers, others)
    executing = Role.PREFILL if config.connector.mode == TransferMode.PUSH else Role.DECODE
    peers = [one for one in (*others, *newcomers) if one.placed.config.role is not executing]
    fresh = [one for one in newcomers if one.placed.config.role is not executing]
    calls: dict[str, Any] = {}
    for instance, targets in [*((one, peers) for one in newcomers), *((one, fresh) for one in others)]:
        if instance.placed.config.role is executing and targets:
            pools = [pool for target in targets for pool in target.pools]
            calls |= {name: rank.connect.remote(pools) for name, rank in _ranks([instance]).items()}
    await gather(calls, "connecting pools", report)


async def _agree_on_scales(newcomers: Sequence[InstanceRun], others: Iterable[InstanceRun]) -> None:
    known = [pool for other in others for pool in other.pools]
    fresh = [pool for newcomer in newcomers for pool in newcomer.pools]
    agreed = iter(with_scales_of(known, fresh) if known else with_common_scales(fresh))
    for newcomer in newcomers:
        newcomer.pools = [next(agreed) for _ in newcomer.pools]
    calls = {
        name: rank.take_scales.remote(pool)
        for newcomer in newcomers
        for (name, rank), pool in zip(_ranks([newcomer]).items(), newcomer.pools, strict=True)
    }
    await gather(calls, "agreeing on scales", silent)


def settings_of(instance: InstanceRun) -> InstanceSettings:
    """An instance with its pools made, as the scheduler must know it."""
    assert instance.plan is not None, instance.instance_id
    shape = instance.placed.config
    return InstanceSettings(
        instance_id=instance.instance_id,
        role=shape.role,
        num_ranks=instance.placed.num_ranks,
        kv=instance.plan.ledger,
        cache=shape.cache,
        scheduler=shape.scheduler,
        max_num_encoder_tokens=instance.plan.model.num_encoder_tokens,
        plan=facts_of_instance(instance.plan),
        tiers=instance.tiers,
    )


def worker_places(instance: InstanceRun) -> tuple[WorkerPlace, ...]:
    """Where an instance's ranks run."""
    return tuple(
        WorkerPlace(instance_id=instance.instance_id, rank=rank, address=place.address, pid=place.pid)
        for rank, place in enumerate(instance.places)
    )


def _ranks(instances: Iterable[InstanceRun]) -> Mapping[str, Any]:
    """Actor handles by the names that messages have for them."""
    return {f"worker {one.instance_id} rank {rank}": actor for one in instances for rank, actor in enumerate(one.ranks)}
