"""How tiers of an instance are cut: units of one size per rank, and how many of them a block of each group takes.

Arithmetic on the plan of the pool; scheduler and ranks make it from the same plan and so agree. A unit is about as
large as the smallest block, so that a block wastes less than one unit; padding of the pool is not stored.
"""

from __future__ import annotations

import dataclasses

from blockferry.engine.kv.instance_plan import InstancePlan
from blockferry.engine.kv.plan import KVCachePlan
from blockferry.engine.kv.reach import cdiv

_ALIGNMENT = 64  # bytes, of units: a cache line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """The cut of every tier of an instance."""

    units_per_block: tuple[int, ...]  # per cache group
    unit_bytes: tuple[int, ...]  # per pipeline stage
    block_bytes: tuple[int, ...]  # per cache group: content of a block on the ranks of all stages together

    def num_units(self, capacity_bytes: int) -> int:
        """Units that a rank's tier of so many bytes has: as many as the stage with the largest ones can hold."""
        return capacity_bytes // max(self.unit_bytes)

    def useful_fraction(self, group: int) -> float:
        """Share of a block's units that is content; 1 for a group that is never stored."""
        if not self.block_bytes[group]:
            return 1.0
        return self.block_bytes[group] / (self.units_per_block[group] * sum(self.unit_bytes))


def plan_tiers(plan: InstancePlan) -> TierPlan:
    """The cut that fits a plan's blocks."""
    pages = [_page_bytes(stage) for stage in plan.stages]
    smallest = [min(num_bytes for num_bytes in stage if num_bytes) for stage in pages]
    num_groups = len(plan.ledger.groups)
    units_per_block = tuple(
        max(1, *(cdiv(stage[group], unit) for stage, unit in zip(pages, smallest, strict=True)))
        for group in range(num_groups)
    )
    unit_bytes = tuple(
        cdiv(max(cdiv(stage[group], units_per_block[group]) for group in range(num_groups)), _ALIGNMENT) * _ALIGNMENT
        for stage in pages
    )
    block_bytes = tuple(sum(stage[group] for stage in pages) for group in range(num_groups))
    return TierPlan(units_per_block=units_per_block, unit_bytes=unit_bytes, block_bytes=block_bytes)


def _page_bytes(stage: KVCachePlan) -> list[int]:
    """Content of a block of each group on one rank of a stage; 0 where it has no layer of the group."""
    pages = [0] * len(stage.groups)
    for region in stage.regions:
        if region.spec.prefix_cacheable:
            pages[region.group] += len(region.layer_ids) * region.spec.unpadded_page_size_bytes
    return pages
