"""What a plan of the KV cache amounts to, in the words that `plan`, `check` and `status` share.

Plain values, small enough to travel to the scheduler; plans nothing and prints nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from blockferry.engine.kv.instance_plan import InstancePlan, stage_layers
from blockferry.engine.kv.model_layers import ModelLayers
from blockferry.engine.kv.plan import KVCachePlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Layers that share a block table."""

    kind: str
    layer_numbers: tuple[int, ...]  # the model's own
    block_size: int
    page_size_bytes: int  # of one block, all of these layers

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "type": self.kind,
            "layers": list(self.layer_numbers),
            "block_size": self.block_size,
            "page_size_bytes": self.page_size_bytes,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """Layers of one pipeline stage."""

    pp_rank: int
    first_layer: int
    last_layer: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """One plan of one rank; of a pipeline, of the stage that holds least. KVCachePlan says what each figure means."""

    planner: str
    max_model_len: int  # that it was made for
    stage: StageSpan | None  # None without a pipeline
    groups: tuple[GroupFacts, ...]
    num_blocks: int
    bytes_per_block: int
    pool_bytes: int
    useful_fraction: float
    capacity_tokens: int
    max_concurrency: float
    num_whole_sequences: int
    hash_block_size: int
    scheduler_block_size: int

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the keys of `blockferry plan --json`."""
        return dataclasses.asdict(self) | {"groups": [group.to_json() for group in self.groups]}


def facts_of(plan: KVCachePlan, model: ModelLayers, *, max_model_len: int, stage: StageSpan | None) -> PlanFacts:
    """The facts of a plan of these layers."""
    return PlanFacts(
        planner=plan.planner.value,
        max_model_len=max_model_len,
        stage=stage,
        groups=tuple(
            GroupFacts(
                kind=group.spec.kind.value,
                layer_numbers=tuple(model.layer_numbers[layer_id] for layer_id in group.layer_ids),
                block_size=group.spec.block_size,
                page_size_bytes=sum(spec.page_size_bytes for spec in group.layer_specs),
            )
            for group in plan.groups
        ),
        num_blocks=plan.num_blocks,
        bytes_per_block=plan.bytes_per_block,
        pool_bytes=plan.pool_bytes,
        useful_fraction=plan.useful_fraction,
        capacity_tokens=plan.capacity_tokens,
        max_concurrency=plan.max_concurrency,
        num_whole_sequences=plan.num_whole_sequences,
        hash_block_size=plan.hash_block_size,
        scheduler_block_size=plan.scheduler_block_size,
    )


def facts_of_instance(plan: InstancePlan) -> PlanFacts:
    """The facts of what a running instance has, which `blockferry plan` shows of the same memory and lengths."""
    pp_rank, stage = plan.fullest_stage, None
    if len(plan.stages) > 1:
        stage = span_of(pp_rank, stage_layers(plan.model, len(plan.stages))[pp_rank], plan.model)
    return facts_of(plan.stages[pp_rank], plan.model, max_model_len=plan.longest, stage=stage)


def span_of(pp_rank: int, layer_ids: frozenset[int], model: ModelLayers) -> StageSpan:
    """A stage that has caches of these layers."""
    numbers = [model.layer_numbers[layer_id] for layer_id in layer_ids]
    return StageSpan(pp_rank=pp_rank, first_layer=min(numbers), last_layer=max(numbers))


def summary_of(plan: Mapping[str, Any]) -> str:
    """One line about a plan in JSON."""
    return (
        f"{plan['planner']} plan of {len(plan['groups'])} group(s), {plan['num_blocks']:,} blocks hold "
        f"{plan['capacity_tokens']:,} tokens: {plan['max_concurrency']:,.2f} sequences of {plan['max_model_len']:,}"
    )


def layer_words(numbers: Sequence[int]) -> str:
    """Layer numbers made short: "0-4, 6-10 ... 60-61" for runs, "5-59 by 6" for equal distances."""
    parts: list[str] = []
    start = 0
    while start < len(numbers):
        stop = start + 1
        step = numbers[stop] - numbers[start] if stop < len(numbers) else 1
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        if step != 1 and stop - start < 3:
            stop = start + 1  # two numbers are no pattern
        parts.append(range_words(numbers[start], numbers[stop - 1], step))
        start = stop
    if len(parts) > 4:
        return f"{parts[0]}, {parts[1]} ... {parts[-1]}"
    return ", ".join(parts)


def range_words(first: int, last: int, step: int = 1) -> str:
    """Such as 5-59 by 6."""
    if first == last:
        return str(first)
    return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"
