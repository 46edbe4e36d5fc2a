"""What one rank is told before it starts. Imports no torch, so that whoever launches workers can build it."""

from __future__ import annotations

import dataclasses

from blockferry.connectors.transport.hosts import Hosts
from blockferry.engine.config import ConnectorConfig, DeploymentConfig, InstanceConfig
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.worker.spec import WorkerSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One rank of one instance."""

    instance_id: str
    spec: WorkerSpec
    connector: ConnectorConfig | None  # None: this deployment ferries nothing
    deployment: str = ""  # its name
    hosts: Hosts = Hosts.MANY  # that this rank's peers may be on


def spec_of(config: DeploymentConfig, shape: InstanceConfig, *, tp_rank: int = 0, pp_rank: int = 0) -> WorkerSpec:
    """What one rank of an instance of the deployment computes."""
    return WorkerSpec(
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
        speculation=shape.scheduler.speculation,
    )
