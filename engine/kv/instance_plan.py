"""The plan that an instance runs on: what its scheduler accounts for, and where each rank's pages lie.

Made once, from config.json and the deployment's settings, by whoever launches; scheduler and workers are given it, so
that both and `blockferry plan` agree. Ranks of one pipeline stage have the same plan, made for the one with most KV
heads: block ids mean the same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from blockferry.engine.errors import ConfigError, PoolTooSmall
from blockferry.engine.kv.ledger_config import ledger_config
from blockferry.engine.kv.model_config import TEXT_SECTIONS
from blockferry.engine.kv.model_layers import CacheDType, LayerOptions, ModelLayers, layers_of, uniform_block_size
from blockferry.engine.kv.plan import KVCachePlan, Planner, PlanRequest
from blockferry.engine.kv.planners import attempt as attempt_plan
from blockferry.engine.kv.planners import best_of, plan_with
from blockferry.engine.kv.planning import RankShare, plan_ranks
from blockferry.engine.kv.reach import EncoderReach, SequenceLimits
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.models.sharding import split_layers

DEFAULT_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRequest:
    """How an instance is to be planned."""

    dtype: str  # of weights and states: float32, bfloat16, float16
    max_model_len: int
    max_in_flight_tokens: int  # of one sequence, scheduled and not settled
    memory_bytes: int  # of each rank
    num_blocks: int | None = None  # exactly this many, by the uniform planner; else memory_bytes decides
    block_size: int | None = None  # None: 16; for a uniform plan of a model with states, as large as those need
    planner: Planner | None = None  # None: the best one
    layout: str = "BHLNC"
    tp_size: int = 1
    pp_size: int = 1
    cache_dtype: CacheDType = CacheDType.AUTO  # of keys, values and latents; AUTO: dtype
    num_speculative_tokens: int = 0  # drafted per row and step
    num_draft_layers: int | None = None  # that draft them and have caches; None: as LayerOptions says


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """What an instance runs on."""

    model: ModelLayers
    ledger: KVCacheConfig
    stages: tuple[KVCachePlan, ...]  # per pipeline stage
    longest: int  # tokens of the longest sequence that fits, at most max_model_len

    @property
    def fullest_stage(self) -> int:
        """The pipeline stage whose blocks take most bytes, so that its ranks' memory limits the instance."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].bytes_per_block)

    @property
    def bytes_per_rank(self) -> int:
        """Largest pool of a rank."""
        return max(stage.pool_bytes for stage in self.stages)


def in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A model's config.json with another data type of weights, and so of what recurrent layers keep."""
    sections = {name: in_dtype(config[name], dtype) for name in TEXT_SECTIONS if isinstance(config.get(name), Mapping)}
    return {**config, **sections, "dtype": dtype, "torch_dtype": dtype}


def layers_for(
    planner: Planner, config: Mapping[str, Any], options: LayerOptions, *, block_size: int | None
) -> ModelLayers:
    """The caches of a model on one rank, in blocks as large as a planner wants them. Raises ConfigError.

    Args:
        planner: who will plan them.
        config: the model's config.json.
        options: all but their block size.
        block_size: in tokens; None: 16, and for all planners but slab as many as the model's states need.
    """
    if block_size is not None:
        return layers_of(config, dataclasses.replace(options, block_size=block_size))
    model = layers_of(config, dataclasses.replace(options, block_size=DEFAULT_BLOCK_SIZE))
    needed = DEFAULT_BLOCK_SIZE if planner is Planner.SLAB else uniform_block_size(model.layers, DEFAULT_BLOCK_SIZE)
    if needed == DEFAULT_BLOCK_SIZE:
        return model
    return layers_of(config, dataclasses.replace(options, block_size=needed))


def plan_request(
    model: ModelLayers, *, max_model_len: int, max_in_flight_tokens: int, memory_bytes: int, layout: str
) -> PlanRequest:
    """What a planner is asked for a model's caches."""
    return PlanRequest(
        layers=model.layers,
        limits=SequenceLimits(
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            max_num_encoder_tokens=model.num_encoder_tokens,
        ),
        memory_bytes=memory_bytes,
        layout=layout,
        draft_layer_ids=model.draft_layer_ids,
    )


def plan_instance(config: Mapping[str, Any], request: InstanceRequest) -> InstancePlan:
    """Plan an instance of the model that config.json describes.

    A pool that cannot hold one sequence of max_model_len is planned for a shorter one, halved until it fits. Raises
    ConfigError (PoolTooSmall, UnplannableLayers) in one line; a pool for nothing is told what max_model_len takes.
    """
    try:
        return _plan(config, request)
    except PoolTooSmall as error:
        if request.max_model_len == 1:
            raise
        shorter, too_small = dataclasses.replace(request, max_model_len=request.max_model_len // 2), error
    try:
        return plan_instance(config, shorter)
    except PoolTooSmall:
        raise too_small from None


def _plan(config: Mapping[str, Any], request: InstanceRequest) -> InstancePlan:
    if request.pp_size > 1 or request.num_blocks is not None:
        if request.planner is Planner.SLAB:
            raise ConfigError("planner", "slab plans neither pipeline stages nor a given num_blocks; use uniform")
        return _plan_ranks(config, request, request.planner or Planner.UNIFORM)
    planners = [Planner.UNIFORM, Planner.SLAB] if request.planner is None else [request.planner]
    models = {planner: _layers_for(planner, config, request) for planner in planners}
    if request.planner is None:
        plan = best_of([attempt_plan(planner, _plan_request(models[planner], request)) for planner in planners])
    else:
        plan = plan_with(request.planner, _plan_request(models[request.planner], request))
    return InstancePlan(
        model=models[plan.planner], ledger=ledger_config(plan), stages=(plan,), longest=request.max_model_len
    )


def stage_layers(model: ModelLayers, pp_size: int) -> list[frozenset[int]]:
    """Layer ids, which count caches, of each pipeline stage; drafts are the last one's. Raises ValueError."""
    own = {number for i, number in enumerate(model.layer_numbers) if i not in model.draft_layer_ids}
    own -= model.encoder_numbers  # every stage computes the encoder
    num_layers = max(own, default=-1) + 1
    stages = []
    for pp_rank in range(pp_size):
        span = split_layers(num_layers, pp_rank, pp_size)
        stop = span.stop if pp_rank < pp_size - 1 else max(model.layer_numbers, default=-1) + 1
        stages.append(frozenset(i for i, number in enumerate(model.layer_numbers) if span.start <= number < stop))
    return stages


def _plan_ranks(config: Mapping[str, Any], request: InstanceRequest, planner: Planner) -> InstancePlan:
    model = _layers_for(planner, config, request)
    try:
        stages = stage_layers(model, request.pp_size)
    except ValueError as error:
        raise ConfigError("pipeline_parallel", str(error)) from None
    plan_request = _plan_request(model, request)
    shares = [RankShare(layer_ids=layer_ids, memory_bytes=request.memory_bytes) for layer_ids in stages]
    if request.num_blocks is not None:
        ample = [dataclasses.replace(share, memory_bytes=1 << 60) for share in shares]
        sizes = [plan.bytes_per_block for plan in plan_ranks(plan_request, ample, planner=planner)]
        shares = [
            dataclasses.replace(share, memory_bytes=request.num_blocks * max(size, 1))
            for share, size in zip(shares, sizes, strict=True)
        ]
    plans = plan_ranks(plan_request, shares, planner=planner)
    return InstancePlan(model=model, ledger=_whole_ledger(plans), stages=plans, longest=request.max_model_len)


def _whole_ledger(stages: tuple[KVCachePlan, ...]) -> KVCacheConfig:
    """The ledger of all stages: groups with every stage's layers."""
    if len(stages) == 1:
        return ledger_config(stages[0])
    groups = tuple(
        KVCacheGroup(
            layer_ids=tuple(layer_id for group in same for layer_id in group.layer_ids),
            spec=next(group.spec for group in same if group.layer_ids),
            is_draft=same[0].is_draft,
        )
        for same in zip(*(stage.groups for stage in stages), strict=True)
    )
    return dataclasses.replace(ledger_config(stages[0]), groups=groups)


def _layers_for(planner: Planner, config: Mapping[str, Any], request: InstanceRequest) -> ModelLayers:
    is_auto = request.cache_dtype is CacheDType.AUTO
    cache_dtype = CacheDType(request.dtype) if is_auto else request.cache_dtype
    options = LayerOptions(
        cache_dtype=cache_dtype,
        tp_size=request.tp_size,
        num_speculative_tokens=request.num_speculative_tokens,
        num_draft_layers=request.num_draft_layers,
    )
    model = layers_for(planner, in_dtype(config, request.dtype), options, block_size=request.block_size)
    if not is_auto and any(isinstance(spec, AttentionSpec) and spec.reach == EncoderReach() for spec in model.layers):
        raise ConfigError("cache_dtype", f"{cache_dtype} is not computed for cross attention, which {model.name} has")
    return model


def _plan_request(model: ModelLayers, request: InstanceRequest) -> PlanRequest:
    return plan_request(
        model,
        max_model_len=request.max_model_len,
        max_in_flight_tokens=request.max_in_flight_tokens,
        memory_bytes=request.memory_bytes,
        layout=request.layout,
    )
