"""Brings a deployment up on a Ray session and takes it down again, whole, also when it fails half-way.

Owns the actors and reservations it makes. Steps and requests do not pass here.

    reserve -> api port -> workers load -> pools -> connect -> scheduler -> workers join -> serve
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from blockferry.cluster import actors, placement
from blockferry.cluster.actors import Place
from blockferry.cluster.deployment import Deployment, is_disaggregated
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.interrupt import stop_signals
from blockferry.cluster.launch_progress import Progress, Report
from blockferry.cluster.offload_host import remove_files
from blockferry.cluster.offload_settings import TierSettings, tier_settings
from blockferry.cluster.placement import PlacedInstance
from blockferry.cluster.plan_facts import facts_of_instance
from blockferry.cluster.ray_session import NAMESPACE
from blockferry.cluster.scheduler_host import InstanceSettings, SchedulerSettings, WorkerPlace
from blockferry.cluster.scheduler_loop import LoopTiming
from blockferry.cluster.sockets import Endpoint, Endpoints
from blockferry.cluster.worker_settings import WorkerSettings
from blockferry.connectors.base import TransferMode
from blockferry.connectors.handshake import with_common_scales
from blockferry.engine.config import DeploymentConfig, Role
from blockferry.engine.errors import BlockferryError
from blockferry.engine.kv.instance_plan import InstancePlan
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.worker.spec import WorkerSpec

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0  # weights of a large model over a network disk
STEP_TIMEOUT_S = 120.0  # every other phase
STOP_TIMEOUT_S = 5.0
POLL_S = 0.2


class LaunchError(BlockferryError):
    """A deployment did not come up; the message names the actor and the phase."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Running:
    """A deployment that is up, or on its way. Owned by the thread that called launch()."""

    config: DeploymentConfig
    instances: list[PlacedInstance]
    groups: Mapping[str, PlacementGroup] = dataclasses.field(default_factory=dict)
    workers: dict[str, list[Any]] = dataclasses.field(default_factory=dict)  # actor handles in rank order
    scheduler: Any = None
    api: Any = None
    url: str = ""
    client_endpoints: Endpoints | None = None
    runs: dict[str, Any] = dataclasses.field(default_factory=dict)  # run() references by actor name

    @property
    def client_endpoint(self) -> Endpoint:
        """Where clients on this machine connect."""
        assert self.client_endpoints is not None, "the scheduler is not up"
        return self.client_endpoints.local

    def find_failure(self, timeout_s: float) -> str:
        """Wait up to timeout_s; the reason when scheduler or API have ended, else empty."""
        if not self.runs:
            return ""
        done, _ = ray.wait(list(self.runs.values()), timeout=timeout_s)
        for name, reference in self.runs.items():
            if reference in done:
                return f"{name} has ended: {_end_of(reference)}"
        return ""

    def close(self, reason: str) -> None:
        """Stop every actor and give the reservations back; every wait has a limit. Idempotent."""
        ranks = [rank for ranks in self.workers.values() for rank in ranks]
        everyone = [actor for actor in (self.api, self.scheduler, *ranks) if actor is not None]
        with contextlib.suppress(ray.exceptions.RayError):
            if self.api is not None:
                self.api.shutdown.remote()
            if self.scheduler is not None:
                # tells clients and workers, so that requests end with the reason and the workers' run() returns
                _wait_for([self.scheduler.shutdown.remote(reason)])
            _wait_for(list(self.runs.values()))
            _wait_for([rank.shutdown.remote() for rank in ranks])
            farewells = {actor.__ray_terminate__.remote(): actor for actor in everyone}
            for reference in _wait_for(list(farewells)):
                del farewells[reference]
            everyone = list(farewells.values())
        for actor in everyone:  # whoever has not ended by himself; killing the others would look like a crash
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)
        with contextlib.suppress(ray.exceptions.RayError):
            placement.release(self.groups)
        remove_files(self.config)
        self.api = self.scheduler = None
        self.workers, self.runs, self.groups = {}, {}, {}


def launch(deployment: Deployment, report: Report, *, with_api: bool) -> Running:
    """Start every actor of a deployment on the connected Ray cluster.

    Args:
        deployment: what to start.
        report: told of every phase as ranks finish it.
        with_api: whether an HTTP server is part of it (`generate` needs none).

    Raises:
        PlacementError: the cluster lacks resources.
        LaunchError: an actor failed or took too long. Nothing is left running either way.
    """
    config = deployment.config
    running = Running(config=config, instances=placement.name_instances(config))
    try:
        report(Progress(phase="reserving places", done=0, total=1))
        running.groups = placement.reserve(running.instances, name=config.name)
        try:
            _create_actors(running, with_api=with_api)
        except ValueError as error:  # Ray: an actor of this name exists
            raise LaunchError(
                f"deployment {config.name!r} runs on this cluster already; change `name` ({error})"
            ) from None
        if with_api:
            # a busy port is reported before the minutes that loading may take
            running.url = _gather([running.api.open.remote()], "opening the port", _silent, names=["api"])[0]
        places = _gather(
            [rank.place.remote() for rank in _ranks(running)],
            "starting workers",
            report,
            names=_rank_names(running.instances),
        )
        _load(running, report)
        plans = plan_instances(deployment, running.instances)
        _make_pools(running, plans, report)
        _start_scheduler(running, plans, places, report)
        if with_api:
            _serve_api(running, report)
    except BaseException:
        running.close("the launch failed")
        raise
    return running


def _create_actors(running: Running, *, with_api: bool) -> None:
    """Ask for every process at once: each takes seconds to import its modules."""
    config = running.config
    beside_driver: dict[str, Any] = {
        "namespace": NAMESPACE,
        "max_concurrency": 8,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        "runtime_env": {"env_vars": actors.worker_environment(1)},
    }
    if with_api:
        api = ray.remote(actors.ApiActor).options(
            name=actors.api_name(config.name), num_cpus=config.api.num_cpus, **beside_driver
        )
        running.api = api.remote(config.model, config.api)
    for instance in running.instances:
        running.workers[instance.instance_id] = _create_ranks(running, instance)
    scheduler = ray.remote(actors.SchedulerActor).options(
        name=actors.scheduler_name(config.name), num_cpus=0, **beside_driver
    )
    running.scheduler = scheduler.remote()


def _create_ranks(running: Running, instance: PlacedInstance) -> list[Any]:
    config = running.config
    ranks = []
    for rank in range(instance.num_ranks):
        pp_rank, tp_rank = divmod(rank, instance.config.tensor_parallel)
        worker = ray.remote(actors.WorkerActor).options(
            name=actors.worker_name(config.name, instance.instance_id, rank),
            namespace=NAMESPACE,
            num_cpus=instance.config.num_cpus,
            num_gpus=instance.config.num_gpus,
            resources=instance.config.resources or None,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=running.groups[instance.instance_id], placement_group_bundle_index=pp_rank
            ),
            runtime_env={"env_vars": actors.worker_environment(instance.config.num_threads)},
        )
        ranks.append(worker.remote(_worker_settings(config, instance, tp_rank=tp_rank, pp_rank=pp_rank)))
    return ranks


def _worker_settings(
    config: DeploymentConfig, instance: PlacedInstance, *, tp_rank: int, pp_rank: int
) -> WorkerSettings:
    shape = instance.config
    spec = WorkerSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        cache_dtype=CacheDType(shape.cache.dtype),
        max_model_len=config.model.max_model_len,
        max_rows=shape.scheduler.max_num_seqs,
        max_num_batched_tokens=shape.scheduler.max_num_batched_tokens,
        layout=shape.cache.layout,
        device=config.device,
        num_threads=shape.num_threads,
        tp_rank=tp_rank,
        tp_size=shape.tensor_parallel,
        pp_rank=pp_rank,
        pp_size=shape.pipeline_parallel,
    )
    return WorkerSettings(
        instance_id=instance.instance_id,
        spec=spec,
        connector=config.connector if is_disaggregated(config) else None,
        deployment=config.name,
    )


def _load(running: Running, report: Report) -> None:
    """Load all weights, once every rank has found its part of the checkpoint: those that load wait for each other."""
    names = _rank_names(running.instances)
    checks = [rank.check.remote() for rank in _ranks(running)]
    _gather(checks, "checking the checkpoint", report, names=names, timeout_s=LOAD_TIMEOUT_S)
    gathering = {
        instance.instance_id: running.workers[instance.instance_id][0].rendezvous.remote()
        for instance in running.instances
        if instance.num_ranks > 1
    }
    methods = _gather(list(gathering.values()), "finding rendezvous", _silent, names=list(gathering))
    method_of = dict(zip(gathering, methods, strict=True))
    calls = [
        rank.load.remote(method_of.get(instance.instance_id, ""))
        for instance in running.instances
        for rank in running.workers[instance.instance_id]
    ]
    _gather(calls, "loading weights", report, names=names, timeout_s=LOAD_TIMEOUT_S)


def plan_instances(deployment: Deployment, instances: Sequence[PlacedInstance]) -> dict[str, InstancePlan]:
    """What each instance runs on. Raises ConfigError."""
    return {
        instance.instance_id: plan_of(
            deployment.config.model, deployment.header, instance.config, where=f"instances[{instance.index}]"
        )
        for instance in instances
    }


def _tiers(plans: Mapping[str, InstancePlan], instance: PlacedInstance) -> TierSettings | None:
    return tier_settings(plans[instance.instance_id], instance.config, where=f"instances[{instance.index}]")


def _make_pools(running: Running, plans: Mapping[str, InstancePlan], report: Report) -> None:
    calls = [
        rank.create_pool.remote(plans[instance.instance_id], _tiers(plans, instance))
        for instance in running.instances
        for rank in running.workers[instance.instance_id]
    ]
    endpoints = _gather(calls, "making pools", report, names=_rank_names(running.instances))
    if not is_disaggregated(running.config):
        return
    endpoints = with_common_scales(endpoints)
    executing = Role.PREFILL if running.config.connector.mode == TransferMode.PUSH else Role.DECODE
    roles = [instance.config.role for instance in running.instances for _ in range(instance.num_ranks)]
    ranks = [rank for instance in running.instances for rank in running.workers[instance.instance_id]]
    # only the side that moves the bytes needs a connection; the other one answers on it
    peers = [endpoint for role, endpoint in zip(roles, endpoints, strict=True) if role is not executing]
    connects = [
        rank.connect.remote(own, peers if role is executing else [])
        for rank, role, own in zip(ranks, roles, endpoints, strict=True)
    ]
    _gather(connects, "connecting pools", report, names=_rank_names(running.instances))


def _start_scheduler(
    running: Running, plans: Mapping[str, InstancePlan], places: Sequence[Place], report: Report
) -> None:
    config = running.config
    here = ray.get_runtime_context().get_node_id()
    settings = SchedulerSettings(
        deployment=config.name,
        model=config.model.served_name,
        max_model_len=config.model.max_model_len,
        instances=tuple(
            InstanceSettings(
                instance_id=instance.instance_id,
                role=instance.config.role,
                num_ranks=instance.num_ranks,
                kv=plans[instance.instance_id].ledger,
                cache=instance.config.cache,
                scheduler=instance.config.scheduler,
                max_num_encoder_tokens=plans[instance.instance_id].model.num_encoder_tokens,
                plan=facts_of_instance(plans[instance.instance_id]),
                tiers=_tiers(plans, instance),
            )
            for instance in running.instances
        ),
        connector=config.connector if is_disaggregated(config) else None,
        has_remote_ranks=any(place.node_id != here for place in places),
        workers=_worker_places(running, places),
        timing=LoopTiming(silence_limit_s=config.health.silence_limit_s),
    )
    calls = [running.scheduler.prepare.remote(settings, running.workers)]
    running.client_endpoints = _gather(calls, "starting the scheduler", report, names=["scheduler"])[0]
    running.runs["scheduler"] = running.scheduler.run.remote()
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    while not ray.get(running.scheduler.is_complete.remote(), timeout=STEP_TIMEOUT_S):
        failure = running.find_failure(POLL_S)
        stop_signals.check()
        if failure or time.monotonic() > deadline_s:
            raise LaunchError(failure or f"workers did not join the scheduler within {STEP_TIMEOUT_S:g} s")


def _worker_places(running: Running, places: Sequence[Place]) -> tuple[WorkerPlace, ...]:
    ranks = [(one.instance_id, rank) for one in running.instances for rank in range(one.num_ranks)]
    return tuple(
        WorkerPlace(instance_id=instance_id, rank=rank, address=place.address, pid=place.pid)
        for (instance_id, rank), place in zip(ranks, places, strict=True)
    )


def _serve_api(running: Running, report: Report) -> None:
    here = ray.get_runtime_context().get_node_id()
    running.runs["api"] = running.api.run.remote(running.client_endpoints, here)
    ready = running.api.wait_ready.remote(STEP_TIMEOUT_S)
    report(Progress(phase="starting the HTTP server", done=0, total=1))
    done, _ = ray.wait([ready, running.runs["api"]], timeout=STEP_TIMEOUT_S)
    if ready not in done:
        raise LaunchError(running.find_failure(0.0) or f"the HTTP server was not ready within {STEP_TIMEOUT_S:g} s")


def _wait_for(references: list[Any]) -> list[Any]:
    """Wait for all of them, up to STOP_TIMEOUT_S; those that have an answer."""
    if not references:
        return []
    done, _ = ray.wait(references, num_returns=len(references), timeout=STOP_TIMEOUT_S)
    return list(done)


def _gather(
    calls: Sequence[Any], phase: str, report: Report, *, names: Sequence[str], timeout_s: float = STEP_TIMEOUT_S
) -> list[Any]:
    """Results of actor calls in order; LaunchError names the first actor that failed."""
    deadline_s = time.monotonic() + timeout_s
    pending = list(calls)
    total = len(calls)
    report(Progress(phase=phase, done=0, total=total))
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        stop_signals.check()
        for reference in done:
            failure = _failure_of(reference)
            if failure:
                raise LaunchError(f"{names[calls.index(reference)]}, {phase}: {failure}")
        if done:
            report(Progress(phase=phase, done=total - len(pending), total=total))
        if pending and time.monotonic() > deadline_s:
            raise LaunchError(f"{names[calls.index(pending[0])]}, {phase}: not done within {timeout_s:g} s")
    results: list[Any] = ray.get(list(calls))
    return results


def _failure_of(reference: Any) -> str:
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return _first_line(error.cause or error)
    except ray.exceptions.RayError as error:
        if "creation task" in _first_line(error):
            return _last_line(error)  # below the traceback stands what its constructor raised
        return f"its process has died: {_first_line(error)}"
    return ""


def _end_of(reference: Any) -> str:
    return _failure_of(reference) or str(ray.get(reference) or "it was told to stop")


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]


def _ranks(running: Running) -> list[Any]:
    return [rank for instance in running.instances for rank in running.workers[instance.instance_id]]


def _rank_names(instances: Sequence[PlacedInstance]) -> list[str]:
    return [
        f"worker {instance.instance_id} rank {rank}" for instance in instances for rank in range(instance.num_ranks)
    ]


def _silent(_progress: Progress) -> None:
    """For phases too short to show."""
