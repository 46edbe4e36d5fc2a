"""The `offload` section of an instance: its keys, what it cannot be combined with, and the tiers that it makes.

Starts nothing; whether this machine has the room is check.py's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from blockferry.cluster.yaml_reader import Section
from blockferry.connectors.offload_base import TierShape
from blockferry.engine.config import Device, InstanceConfig, OffloadConfig, Role
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.instance_plan import InstancePlan
from blockferry.engine.kv.tier_plan import plan_tiers
from blockferry.engine.kv.tier_policies import PolicyName
from blockferry.engine.scheduler.handoff import LoadFailurePolicy
from blockferry.engine.scheduler.offload_stores import StoreWhen

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """An instance's tiers as its scheduler and its ranks must know them; the same for both."""

    config: OffloadConfig
    units_per_block: tuple[int, ...]
    unit_bytes: tuple[int, ...]  # per pipeline stage
    num_units: int  # of the memory
    num_disk_units: int  # 0: no disk
    useful_fraction: float  # of the units of a block, where it is least

    def shape(self, pp_rank: int) -> TierShape:
        """The cut of the tiers of a stage's ranks."""
        return TierShape(units_per_block=self.units_per_block, unit_bytes=self.unit_bytes[pp_rank])

    def memory_bytes(self, pp_rank: int) -> int:
        """Shared memory that a rank's tier takes."""
        return self.num_units * self.unit_bytes[pp_rank]


def read_offload(section: Section) -> OffloadConfig | None:
    """None where the file has no such section. Raises ConfigError."""
    if not section.written_keys():
        return None
    base = OffloadConfig(cpu_gib=1.0)
    disk = section.section("disk")
    path = disk.text("path", None)
    disk_gib = disk.number("gib", base.disk_gib, minimum=0.0)
    disk.finish()
    offload = OffloadConfig(
        cpu_gib=section.number("cpu_gib", base.cpu_gib, minimum=0.0),
        policy=section.choice("policy", base.policy, [*PolicyName]),
        store=section.choice("store", base.store, [*StoreWhen]),
        min_load_tokens=section.integer("min_load_tokens", base.min_load_tokens, minimum=1),
        load_timeout_s=section.number("load_timeout_s", base.load_timeout_s, minimum=0.1),
        load_failure_policy=section.choice("load_failure_policy", base.load_failure_policy, [*LoadFailurePolicy]),
        disk_path=None if path is None else Path(path).expanduser(),
        disk_gib=disk_gib,
    )
    section.finish()
    if (path is None) != (disk_gib == 0.0):
        raise ConfigError(disk.path, "a disk needs both `path` and `gib`; write both, or neither")
    return offload


def check_offload(instances: Sequence[InstanceConfig], device: Device) -> None:
    """Raises ConfigError for what cannot work."""
    for index, instance in enumerate(instances):
        where = f"instances[{index}].offload"
        if instance.offload is None:
            continue
        if device is Device.CUDA:
            raise ConfigError(where, "blocks in GPU memory cannot be offloaded yet; remove it, or set `device: cpu`")
        if instance.role is Role.DECODE:
            raise ConfigError(
                where,
                "a decode instance gets its prompts from prefill instances, which compute or load them; offload there",
            )
        if not instance.cache.enable_prefix_caching:
            raise ConfigError(where, "nothing is found without enable_prefix_caching; turn it on, or remove offload")


def tier_settings(plan: InstancePlan, instance: InstanceConfig, *, where: str) -> TierSettings | None:
    """The tiers of an instance with this plan; None without any. Raises ConfigError for one that holds no block."""
    config = instance.offload
    if config is None:
        return None
    cut = plan_tiers(plan)
    num_units = cut.num_units(int(config.cpu_gib * GIB))
    num_disk_units = cut.num_units(int(config.disk_gib * GIB))
    for key, gib, count in (("cpu_gib", config.cpu_gib, num_units), ("disk.gib", config.disk_gib, num_disk_units)):
        if (key == "cpu_gib" or gib) and count < max(cut.units_per_block):
            least = max(cut.units_per_block) * max(cut.unit_bytes) / GIB
            raise ConfigError(f"{where}.offload.{key}", f"{gib:g} GiB hold no block; use {least:.6f} or more")
    return TierSettings(
        config=config,
        units_per_block=cut.units_per_block,
        unit_bytes=cut.unit_bytes,
        num_units=num_units,
        num_disk_units=num_disk_units,
        useful_fraction=min(cut.useful_fraction(group) for group in range(len(cut.units_per_block))),
    )
