"""What each instance of a deployment will run on: its plan of the KV cache. Starts nothing and imports no torch."""

from __future__ import annotations

from blockferry.cluster.speculation_settings import num_layers_that_draft
from blockferry.engine.config import InstanceConfig, ModelConfig
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.instance_plan import InstancePlan, InstanceRequest, plan_instance
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.kv.plan import Planner
from blockferry.engine.models.config import ModelHeader

AUTO = "auto"
PLANNERS = (AUTO, *Planner)
CACHE_DTYPES = (CacheDType.AUTO, CacheDType.FP8)
_PLACES = {  # where a planner's word for a setting stands in a deployment file
    "tp": "{}.tensor_parallel",
    "pipeline_parallel": "{}.pipeline_parallel",
    "planner": "{}.cache.planner",
    "layout": "{}.cache.layout",
    "cache_dtype": "{}.cache.dtype",
    "": "{}.cache",
}


def plan_of(model: ModelConfig, header: ModelHeader, instance: InstanceConfig, *, where: str) -> InstancePlan:
    """The plan of one instance; `where` is its place in the deployment file. Raises ConfigError."""
    cache, speculation = instance.cache, instance.scheduler.speculation
    request = InstanceRequest(
        dtype=model.dtype.value,
        max_model_len=model.max_model_len,
        max_in_flight_tokens=instance.scheduler.max_in_flight_tokens,
        memory_bytes=cache.memory_bytes,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        planner=None if cache.planner == AUTO else Planner(cache.planner),
        layout=cache.layout,
        tp_size=instance.tensor_parallel,
        pp_size=instance.pipeline_parallel,
        cache_dtype=CacheDType(cache.dtype),
        num_speculative_tokens=0 if speculation is None else speculation.num_tokens,
        num_draft_layers=num_layers_that_draft(speculation, header),
    )
    try:
        return plan_instance(header.values, request)
    except ConfigError as error:
        raise ConfigError(_PLACES.get(error.path, "{}").format(where), error.reason) from None
