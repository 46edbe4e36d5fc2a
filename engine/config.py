"""Resolved configuration: frozen values that the whole deployment shares. Nothing mutates them.

Holds types and their own limits only; reading YAML, defaults from a checkpoint and "will it run here" live
in cluster. This is also the one module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from pathlib import Path


class Role(enum.StrEnum):
    """What an instance is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class DType(enum.StrEnum):
    """Data types of weights and cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


class Device(enum.StrEnum):
    """Where workers compute."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, where its files are and how it is computed."""

    name: str  # as written in the YAML; served_name defaults to it
    served_name: str
    path: Path  # resolved folder with config.json, safetensors and tokenizer
    dtype: DType
    max_model_len: int
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The block pool of every instance."""

    block_size: int | None = None  # tokens; None: 16, or what the planner finds best
    num_blocks: int | None = None  # exactly this many; else memory_bytes decides
    memory_bytes: int = 1 << 30  # per rank
    planner: str = "auto"  # or uniform, slab, unified
    layout: str = "BHLNC"
    dtype: str = "auto"  # of keys, values and latents: the model's; or fp8
    enable_prefix_caching: bool = True
    watermark: float = 0.01


class DraftMethod(enum.StrEnum):
    """Who proposes tokens ahead of the model."""

    MTP = "mtp"  # multi-token-prediction modules that were trained beside it
    NGRAM = "ngram"  # what followed the last few tokens the last time that they occurred in the row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How tokens are drafted, which the model then verifies in one pass. Output does not depend on it."""

    method: DraftMethod
    num_tokens: int = 3  # drafted per row and step, at most
    head_path: Path | None = None  # folder of MTP modules that are not part of the checkpoint
    is_adaptive: bool = True  # draft fewer, or none, where they are not accepted
    looks_up: bool = False  # method MTP: n-grams first, modules for rows where nothing recurs
    min_ngram: int = 2  # tokens that must recur
    max_ngram: int = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one instance's steps."""

    max_num_seqs: int = 64  # rows
    max_num_batched_tokens: int = 512  # token budget of one step, prefill and decode together
    max_queue_len: int = 4096
    num_steps_in_flight: int = 2  # 1: plan a step only after the last one's result
    policy: str = "fcfs"  # or "priority"
    speculation: SpeculationConfig | None = None  # None: one token per row and step

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens of one sequence that are scheduled and not settled."""
        return self.max_num_batched_tokens * self.num_steps_in_flight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Where blocks of an instance go when its pool has no room for them; sizes are of each rank."""

    cpu_gib: float
    policy: str = "lru"  # or "arc"
    store: str = "on_finish"  # as soon as nobody holds a block; or "on_eviction", when the pool reuses it
    min_load_tokens: int = 32  # fewer are computed rather than loaded
    load_timeout_s: float = 30.0
    load_failure_policy: str = "recompute"  # or "fail"
    disk_path: Path | None = None  # folder of a second tier's file; None: there is none
    disk_gib: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """One entry of `instances`: `replicas` instances of one shape."""

    role: Role
    replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_cpus: float = 1.0  # Ray resources of one worker
    num_gpus: float = 0.0
    resources: dict[str, float] = dataclasses.field(default_factory=dict)
    num_threads: int = 1  # torch threads of one worker
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    offload: OffloadConfig | None = None  # None: what the pool evicts is gone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """How prefill instances hand KV blocks to decode instances."""

    kind: str = "pd"
    transport: str = "ucx"  # or "loopback" (one process, tests)
    mode: str = "push"  # or "pull"
    overlap: str = "layers"  # blocks travel while later layers compute; "chunks": later chunks; "none": once all is
    lease_s: float = 60.0  # a source's blocks are held at most this long after its prefill
    transfer_timeout_s: float = 30.0
    load_failure_policy: str = "recompute"  # or "fail"
    checksums: bool = False  # compare both ends of every batch that was ferried; costs a read of it on either side
    ucx_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by UCX's names without UCX_


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When an instance is given up, and a request."""

    silence_limit_s: float = 10.0  # without a sign of life of one of its ranks, which come every second
    resume_timeout_s: float = 18.0  # that a request may be without anybody to run it; 0: it is never resumed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Which instances a request is sent to."""

    policy: str = "prefix_affinity"  # or "least_loaded"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    num_cpus: float = 0.0
    chat_template: Path | None = None
    keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # one of them must be shown; (): none needed
    max_concurrent_requests: int = 4096  # then 429
    max_connections: int = 8192  # of more, those that ask nothing are closed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """A whole deployment, as `blockferry serve` reads it."""

    name: str
    model: ModelConfig
    instances: tuple[InstanceConfig, ...]
    connector: ConnectorConfig
    api: ApiConfig
    health: HealthConfig = HealthConfig()
    router: RouterConfig = RouterConfig()
    device: Device = Device.CPU


def cache_dir() -> Path:
    """Where fetched models live: $BLOCKFERRY_CACHE, or ~/.cache/blockferry."""
    return Path(os.environ.get("BLOCKFERRY_CACHE", "~/.cache/blockferry")).expanduser()


def api_keys_of_environment() -> tuple[str, ...]:
    """Keys of the HTTP server: $BLOCKFERRY_API_KEY, several with commas between them."""
    return tuple(key.strip() for key in os.environ.get("BLOCKFERRY_API_KEY", "").split(",") if key.strip())
