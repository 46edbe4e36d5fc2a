"""The scheduler assembled: ledgers, instances, connector bookkeeping and the loop that drives them.

Runs in any process, with or without Ray; imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from blockferry.cluster.offload_settings import TierSettings
from blockferry.cluster.plan_facts import PlanFacts
from blockferry.cluster.router import POLICIES
from blockferry.cluster.scheduler_loop import LoopTiming, SchedulerLoop
from blockferry.cluster.secret import ClusterSecret
from blockferry.cluster.sockets import Binding
from blockferry.connectors.base import Overlap, TransferMode
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.config import CacheConfig, ConnectorConfig, Role, RouterConfig, SchedulerConfig
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.kv.tier_ledger import TierLedger
from blockferry.engine.kv.tier_policies import PolicyName, make_policy
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.handoff import HandoffOptions, LoadFailurePolicy
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.offload_stores import StoreWhen
from blockferry.engine.scheduler.offloading import Offloading, OffloadOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """One instance as its scheduler must know it."""

    instance_id: str
    role: Role
    num_ranks: int
    kv: KVCacheConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    max_num_encoder_tokens: int = 0  # of one encoder input
    plan: PlanFacts | None = None  # that kv was made from; for status only
    tiers: TierSettings | None = None  # behind the pool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a rank runs."""

    instance_id: str
    rank: int
    address: str
    pid: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Everything a deployment's scheduler is told before it starts."""

    deployment: str
    model: str
    max_model_len: int
    instances: tuple[InstanceSettings, ...]
    connector: ConnectorConfig | None  # None: nothing is ferried
    has_remote_ranks: bool  # some worker is on another node: listen on TCP too
    workers: tuple[WorkerPlace, ...] = ()  # for status only
    timing: LoopTiming = dataclasses.field(default_factory=LoopTiming)
    secret: ClusterSecret = dataclasses.field(default_factory=ClusterSecret.make)  # of workers and clients
    router: RouterConfig = dataclasses.field(default_factory=RouterConfig)

    def summary(self) -> dict[str, Any]:
        """What `status` shows of these settings."""
        return {
            "deployment": self.deployment,
            "model": self.model,
            "max_model_len": self.max_model_len,
            "workers": [dataclasses.asdict(worker) for worker in self.workers],
            "router": self.router.policy,
            "connector": None if self.connector is None else f"{self.connector.transport} {self.connector.mode}",
        }

    def status(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """What `status` shows of the deployment, given the loop's snapshot: each instance with its plan."""
        plans = {one.instance_id: one.plan.to_json() for one in self.instances if one.plan is not None}
        instances = [one | {"plan": plans.get(one["instance_id"])} for one in snapshot["instances"]]
        listed = {one["instance_id"] for one in instances}
        summary = self.summary()
        summary["workers"] = [worker for worker in summary["workers"] if worker["instance_id"] in listed]
        return {**summary, **snapshot, "instances": instances}

    def with_instance(
        self, instance: InstanceSettings, workers: Sequence[WorkerPlace], *, listed: Container[str]
    ) -> SchedulerSettings:
        """With one more instance, and without those that are not listed any more."""
        return dataclasses.replace(
            self,
            instances=(*(one for one in self.instances if one.instance_id in listed), instance),
            workers=(*(one for one in self.workers if one.instance_id in listed), *workers),
        )


def build_loop(
    settings: SchedulerSettings, *, bind_host: str, end_instance: Callable[[str], None] = lambda _instance_id: None
) -> SchedulerLoop:
    """The whole scheduler of a deployment, with its sockets bound and not running yet; see SchedulerLoop."""
    connector = None
    lease = settings.connector or ConnectorConfig()
    if settings.connector is not None:
        connector = PdScheduler(
            mode=TransferMode(settings.connector.mode), transfer_timeout_s=settings.connector.transfer_timeout_s
        )
    central = CentralScheduler(
        [make_instance(one, max_model_len=settings.max_model_len) for one in settings.instances],
        connector=connector,
        handoffs=HandoffOptions(
            overlap=Overlap(lease.overlap),
            lease_s=lease.lease_s,
            transfer_timeout_s=lease.transfer_timeout_s,
            # a frozen D that is not given up within hold_s has gone on, and taken in what lay in its sockets
            hold_s=max(lease.lease_s, settings.timing.silence_limit_s) + lease.transfer_timeout_s,
            load_failure_policy=LoadFailurePolicy(lease.load_failure_policy),
        ),
    )
    return SchedulerLoop(
        central,
        binding=Binding(host=bind_host, secret=settings.secret),
        timing=settings.timing,
        choose_route=POLICIES[settings.router.policy],
        end_instance=end_instance,
    )


def make_instance(settings: InstanceSettings, *, max_model_len: int) -> Instance:
    """An instance with its ledger. Takes a while where the pool is large."""
    rows = RowTable(max_rows=settings.scheduler.max_num_seqs, max_model_len=max_model_len)
    kv = KVCacheManager(
        settings.kv,
        rows,
        options=LedgerOptions(
            enable_caching=settings.cache.enable_prefix_caching,
            watermark=settings.cache.watermark,
            max_in_flight_tokens=settings.scheduler.max_in_flight_tokens,
            max_num_encoder_tokens=settings.max_num_encoder_tokens,
        ),
    )
    instance = Instance(
        settings.instance_id,
        settings.role,
        config=settings.scheduler,
        kv=kv,
        rows=rows,
        num_ranks=settings.num_ranks,
    )
    if settings.tiers is not None:
        _give_tiers(instance, settings.tiers)
    return instance


def _give_tiers(instance: Instance, tiers: TierSettings) -> None:
    config = tiers.config
    Offloading(
        instance,
        memory=_tier(tiers, tiers.num_units),
        disk=_tier(tiers, tiers.num_disk_units) if tiers.num_disk_units else None,
        options=OffloadOptions(
            when=StoreWhen(config.store),
            min_load_tokens=config.min_load_tokens,
            load_timeout_s=config.load_timeout_s,
            policy=LoadFailurePolicy(config.load_failure_policy),
        ),
    )


def _tier(tiers: TierSettings, num_units: int) -> TierLedger:
    policy = make_policy(PolicyName(tiers.config.policy), capacity=num_units)
    return TierLedger(units_per_block=tiers.units_per_block, num_units=num_units, policy=policy)
