"""What `blockferry plan` asks the planners for a model, and the config that it reads for it.

Turns a config and options into requests, one per planner; owns no output.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockferry.cluster.checkpoint import find_model
from blockferry.cluster.fetch import KNOWN_MODELS
from blockferry.cluster.plan_facts import StageSpan, span_of
from blockferry.cluster.plan_report import PlannedModel
from blockferry.cluster.shipped import shipped_models
from blockferry.engine.errors import ConfigError, PoolTooSmall
from blockferry.engine.kv.instance_plan import layers_for, plan_request, stage_layers
from blockferry.engine.kv.model_layers import LayerOptions, ModelLayers, layers_of
from blockferry.engine.kv.plan import Planner
from blockferry.engine.kv.planners import Attempt, attempt
from blockferry.engine.models.config import read_json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """How a model is to be served, and with how much memory."""

    memory_bytes: int  # per rank
    layers: LayerOptions
    block_size: int | None = None  # None: 16; for a uniform plan of a model with states, as large as those need
    max_model_len: int | None = None  # None: the model's, halved until a sequence fits
    max_in_flight_tokens: int = 8192
    layout: str = "BLHNC"
    pp_size: int = 1


def read_model_config(name: str) -> Mapping[str, Any]:
    """The config.json of a file, a folder, a shipped name or a cached model. Raises ConfigError, ModelLoadError."""
    path = config_path(name)
    try:
        return read_json(path)
    except RecursionError:
        raise ConfigError(str(path), "is nested too deeply to be a model's config") from None


def config_path(name: str) -> Path:
    """The config.json that a name stands for. Raises as read_model_config."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_models()
    if path.is_dir() or name in KNOWN_MODELS or (name.count("/") == 1 and name not in shipped):
        return find_model("model", name, base=Path()) / "config.json"
    shipped_name = name.removesuffix(".json")
    if shipped_name in shipped:
        return shipped[shipped_name]
    known = [*shipped, *KNOWN_MODELS]
    hint = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    guess = f"; did you mean {hint[0]!r}?" if hint else ""
    raise ConfigError("model", f"{name!r} is no file, folder or known model ({', '.join(known)}){guess}")


def plan_model(
    config: Mapping[str, Any], question: PlanQuestion, planners: Sequence[Planner]
) -> tuple[PlannedModel, ...]:
    """What each planner makes of a model, all of them for sequences of the same length. Raises ConfigError."""
    length = question.max_model_len or _longest_position(config, question)
    plans = _plan_length(config, question, planners, length)
    while question.max_model_len is None and length > 1 and any(map(_is_too_small, plans)):
        limiting = {one.attempt.planner for one in plans if _is_too_small(one)}
        length //= 2
        plans = tuple(
            dataclasses.replace(one, limits_length=one.attempt.planner in limiting)
            for one in _plan_length(config, question, planners, length)
        )
    return plans


def _plan_length(
    config: Mapping[str, Any], question: PlanQuestion, planners: Sequence[Planner], length: int
) -> tuple[PlannedModel, ...]:
    return tuple(_plan_with(planner, config, question, length) for planner in planners)


def _plan_with(planner: Planner, config: Mapping[str, Any], question: PlanQuestion, length: int) -> PlannedModel:
    model = layers_for(planner, config, question.layers, block_size=question.block_size)
    request = plan_request(
        model,
        max_model_len=length,
        max_in_flight_tokens=question.max_in_flight_tokens,
        memory_bytes=question.memory_bytes,
        layout=question.layout,
    )
    stages = _stages(model, question.pp_size)
    made = attempt(planner, request, stages)
    return PlannedModel(model=model, request=request, attempt=made, stage=_stage_of(made, model, stages))


def _stage_of(made: Attempt, model: ModelLayers, stages: Sequence[frozenset[int]]) -> StageSpan | None:
    """The stage whose layers a plan's groups have."""
    if made.plan is None:
        return None
    planned = {layer_id for group in made.plan.groups for layer_id in group.layer_ids}
    for pp_rank, layer_ids in enumerate(stages):
        if planned and planned <= layer_ids:
            return span_of(pp_rank, layer_ids, model)
    return None


def _stages(model: ModelLayers, pp_size: int) -> list[frozenset[int]]:
    """Indices of the layers of each pipeline stage; empty without a pipeline."""
    try:
        return [] if pp_size == 1 else stage_layers(model, pp_size)
    except ValueError as error:
        raise ConfigError("pp", str(error)) from None


def _longest_position(config: Mapping[str, Any], question: PlanQuestion) -> int:
    longest = layers_of(config, question.layers).max_position
    if longest is None:
        raise ConfigError("max-model-len", "the config names no longest sequence; give --max-model-len")
    return longest


def _is_too_small(planned: PlannedModel) -> bool:
    return isinstance(planned.attempt.error, PoolTooSmall)
