"""What one worker process needs to know to start: a frozen value, resolved by the cluster.

Imports no torch, so that whoever launches workers can build it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from blockferry.engine.config import Device, DType, SpeculationConfig
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.models.sharding import RankPlace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One rank of one instance. Its global rank is pp_rank * tp_size + tp_rank."""

    model_path: Path
    dtype: DType
    cache_dtype: CacheDType = CacheDType.AUTO  # of keys, values and latents; AUTO: dtype
    max_model_len: int
    max_rows: int  # SchedulerConfig.max_num_seqs
    max_num_batched_tokens: int
    layout: str = "BHLNC"
    device: Device = Device.CPU
    device_index: int = 0
    num_threads: int = 1  # torch threads
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    init_method: str = ""  # "tcp://host:port" or "file:///path", equal on all ranks; unused by a lone rank
    collective_timeout_s: float = 60.0
    speculation: SpeculationConfig | None = None

    @property
    def place(self) -> RankPlace:
        """Which part of the model this rank computes."""
        return RankPlace(tp_rank=self.tp_rank, tp_size=self.tp_size, pp_rank=self.pp_rank, pp_size=self.pp_size)

    @property
    def rank(self) -> int:
        """Place of this worker in its instance; stages are contiguous."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """Workers of the instance."""
        return self.tp_size * self.pp_size

    @property
    def sampler_rank(self) -> int:
        """The rank whose execute() returns the StepResult: the last stage's first."""
        return (self.pp_size - 1) * self.tp_size

    @property
    def is_sampler(self) -> bool:
        """Whether this rank samples and returns results."""
        return self.rank == self.sampler_rank
