"""Which planner plans: the one asked for, the best of all, or every one for a comparison.

Refuses plans under which one sequence of max_model_len could never run. Plans nothing itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import sys
from collections.abc import Callable, Sequence

from blockferry.engine.errors import ConfigError, PoolTooSmall
from blockferry.engine.kv.plan import KVCachePlan, Planner, PlanRequest
from blockferry.engine.kv.planning import (
    RankShare,
    plan_ranks,
    plan_unified,
    plan_uniform,
    pool_words,
    pool_words_up,
)
from blockferry.engine.kv.reach import KVContent, NoReach, SequenceLimits
from blockferry.engine.kv.slab_geometry import slabs_taken
from blockferry.engine.kv.slab_planner import page_demand, plan_slab
from blockferry.engine.kv.spec import AttentionSpec

MAX_POOL_BYTES = 1 << 60
NEAR_TIE = 0.99  # capacities that differ by less are alike: the plan of fewer groups is then the faster one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one planner made of a request: a plan, or the reason why there is none."""

    planner: Planner
    plan: KVCachePlan | None = None
    error: ConfigError | None = None


def plan_with(planner: Planner, request: PlanRequest) -> KVCachePlan:
    """The plan of one planner. Raises UnplannableLayers, PoolTooSmall, ConfigError."""
    return _PLANNERS[planner](request)


def plan_stages(planner: Planner, request: PlanRequest, stages: Sequence[frozenset[int]]) -> KVCachePlan:
    """The plan of the pipeline stage that holds least; each stage has request.memory_bytes. Raises as plan_with."""
    if len(stages) == 1:
        return plan_with(planner, request)
    if planner is Planner.SLAB:
        plans = [_plan_slab(_only(request, layer_ids)) for layer_ids in stages]
        return min(plans, key=lambda plan: plan.capacity_tokens)
    ranks = [RankShare(layer_ids=layer_ids, memory_bytes=request.memory_bytes) for layer_ids in stages]
    return max(plan_ranks(request, ranks, planner=planner), key=lambda plan: plan.bytes_per_block)


def best_plan(request: PlanRequest) -> KVCachePlan:
    """The uniform or the slab plan, whichever holds more tokens; of about as many, that of fewer groups.

    Raises what the uniform planner does where neither can plan.
    """
    return best_of([attempt(planner, request) for planner in (Planner.UNIFORM, Planner.SLAB)])


def best_of(attempts: Sequence[Attempt]) -> KVCachePlan:
    """The plan that holds most tokens; of those that hold about as many, that of fewest groups, then the first.

    Plans with clearly fewer whole sequences than another's are out: in a small pool, a slab that belongs to one group
    leaves pages over that the other groups lack.

    Raises the first attempt's error where there is no plan.
    """
    plans = [one.plan for one in attempts if one.plan is not None]
    if not plans:
        assert attempts, "nothing was attempted"
        assert attempts[0].error is not None, attempts
        raise attempts[0].error
    most_sequences = max(plan.num_whole_sequences for plan in plans)
    plans = [plan for plan in plans if plan.num_whole_sequences >= NEAR_TIE * most_sequences]
    most_tokens = max(plan.capacity_tokens for plan in plans)
    alike = [plan for plan in plans if plan.capacity_tokens >= NEAR_TIE * most_tokens]
    return min(alike, key=lambda plan: len(plan.groups))


def plan_all(request: PlanRequest) -> tuple[Attempt, ...]:
    """What every planner makes of a request, in the order of Planner."""
    return tuple(attempt(planner, request) for planner in Planner)


def attempt(planner: Planner, request: PlanRequest, stages: Sequence[frozenset[int]] = ()) -> Attempt:
    """plan_with, or plan_stages where there are stages, with a refusal as a value."""
    try:
        plan = plan_stages(planner, request, stages) if stages else plan_with(planner, request)
        return Attempt(planner=planner, plan=plan)
    except ConfigError as error:
        return Attempt(planner=planner, error=error)


def _plan_slab(request: PlanRequest) -> KVCachePlan:
    try:
        plan = plan_slab(request)
    except PoolTooSmall as error:
        raise _without_slabs(request, error) from None
    if plan.slab is None or _can_run(plan, request.limits):
        return plan
    needed_bytes = _sequence_bytes(plan, request.limits)
    lengths = range(1, min(request.limits.max_model_len, sys.maxsize - 1) + 1)
    length = bisect.bisect_left(
        lengths, True, key=lambda one: not _can_run(plan, dataclasses.replace(request.limits, max_model_len=one))
    )
    remedy = f", or set max_model_len to {length} or less" if length else ""
    raise PoolTooSmall(
        "",
        f"a pool of {pool_words(request.memory_bytes)} has {plan.slab.num_slabs} slabs of {plan.slab.slab_bytes} "
        f"bytes, too few for one sequence of max_model_len={request.limits.max_model_len} tokens; give the pool "
        f"{pool_words_up(needed_bytes)} or more{remedy}",
        needed_bytes=needed_bytes,
    )


def _without_slabs(request: PlanRequest, error: PoolTooSmall) -> PoolTooSmall:
    """The refusal of a pool too small for any slabs, with what one sequence takes once there are some."""
    memory_bytes = max(error.needed_bytes, request.memory_bytes, 1)
    while memory_bytes < MAX_POOL_BYTES:
        memory_bytes *= 2
        try:
            plan = plan_slab(dataclasses.replace(request, memory_bytes=memory_bytes))
        except PoolTooSmall:
            continue
        if plan.slab is None:  # one group: the uniform plan, whose refusal has said it all
            return error
        if not _can_run(plan, request.limits):
            continue
        needed_bytes = max(_sequence_bytes(plan, request.limits), error.needed_bytes)
        return PoolTooSmall(
            "",
            f"a pool of {pool_words(request.memory_bytes)} cannot give each group of layers a slab; one sequence of "
            f"max_model_len={request.limits.max_model_len} tokens takes {pool_words_up(needed_bytes)} or more",
            needed_bytes=needed_bytes,
        )
    return error


def _only(request: PlanRequest, layer_ids: frozenset[int]) -> PlanRequest:
    """The request with no cache for the layers of other stages, which keep their numbers."""
    absent = AttentionSpec(block_size=1, content=KVContent(num_kv_heads=1, head_dim=1, dtype_bytes=1), reach=NoReach())
    layers = tuple(spec if i in layer_ids else absent for i, spec in enumerate(request.layers))
    return dataclasses.replace(request, layers=layers)


def _can_run(plan: KVCachePlan, limits: SequenceLimits) -> bool:
    """Whether one sequence of max_model_len can be held."""
    assert plan.slab is not None, plan
    demands = [page_demand(group, limits) for group in plan.groups]
    return slabs_taken(plan.slab, demands) <= plan.slab.num_slabs


def _sequence_bytes(plan: KVCachePlan, limits: SequenceLimits) -> int:
    """Bytes of a pool that holds one sequence of max_model_len."""
    assert plan.slab is not None, plan
    demands = [page_demand(group, limits) for group in plan.groups]
    num_slabs = slabs_taken(dataclasses.replace(plan.slab, tail_pages=0), demands)
    return plan.slab.null_bytes + num_slabs * plan.slab.slab_bytes


_PLANNERS: dict[Planner, Callable[[PlanRequest], KVCachePlan]] = {
    Planner.UNIFORM: plan_uniform,
    Planner.SLAB: _plan_slab,
    Planner.UNIFIED: plan_unified,
}
