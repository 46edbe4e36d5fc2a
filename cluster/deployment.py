"""A deployment's YAML file becomes one frozen DeploymentConfig, or an error with the key's path and a remedy.

Owns the file's keys, their defaults and the rules between them. Starts nothing; what this machine or cluster
lacks is check.py's and placement.py's business.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

from blockferry.cluster.checkpoint import local_folder, read_checkpoint, resolve_model, stored_dtype
from blockferry.cluster.fetch import Progress
from blockferry.cluster.instance_plans import CACHE_DTYPES, PLANNERS, plan_of
from blockferry.cluster.offload_settings import check_offload, read_offload, tier_settings
from blockferry.cluster.router import POLICIES
from blockferry.cluster.speculation_settings import check_speculation, read_speculation
from blockferry.cluster.yaml_reader import Section, load_yaml
from blockferry.connectors.base import Overlap, TransferMode
from blockferry.engine.config import (
    ApiConfig,
    CacheConfig,
    ConnectorConfig,
    DeploymentConfig,
    Device,
    DType,
    HealthConfig,
    InstanceConfig,
    ModelConfig,
    Role,
    RouterConfig,
    SchedulerConfig,
    api_keys_of_environment,
)
from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.models.config import ModelHeader

LAYOUTS = ("BHLNC", "BLHNC", "LBHNC", "LBNHC")
GPU_BLOCK_MULTIPLE = 16  # the attention kernels' key tile
DEFAULT_MAX_MODEL_LEN = 8192  # of a checkpoint that allows more: rows of token ids are sized by it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a file asks for, and what its checkpoint says."""

    config: DeploymentConfig
    header: ModelHeader


class Resolver(Protocol):
    """How a model's name becomes a folder: resolve_model or find_model."""

    def __call__(self, path: str, name: str, *, base: Path, progress: Progress) -> Path:
        """Raises ConfigError."""


def load_deployment(
    file: Path, *, resolve: Resolver = resolve_model, progress: Progress = lambda _phase: None
) -> Deployment:
    """Read a deployment file; `resolve` may fetch its model.

    Raises:
        ConfigError: unknown key, wrong type, impossible combination, missing model.
    """
    root = Section("", load_yaml(file))
    name = root.text("name", file.stem) or file.stem
    _check_name(name)
    device = Device(root.choice("device", Device.CPU, [*Device]))
    cache = _cache(root.section("cache"), CacheConfig())
    speculation = read_speculation(root.section("speculation"), file.parent)
    scheduler = _scheduler(root.section("scheduler"), SchedulerConfig(speculation=speculation))
    instances = tuple(
        _instance(section, cache=cache, scheduler=scheduler, device=device) for section in root.sections("instances")
    )
    connector = _connector(root.section("connector"))
    health = _health(root.section("health"))
    router = _router(root.section("router"))
    api = _api(root.section("api"), file.parent)
    model_section = root.section("model")
    wanted = _ModelWishes.read(model_section)
    root.finish()
    _check_instances(instances, device)
    check_offload(instances, device)
    folder = wanted.find(resolve, file.parent, progress)
    header = read_checkpoint(wanted.key, folder)
    model = _model(folder, wanted, header)
    check_speculation(speculation, model, header, instances)
    config = DeploymentConfig(
        name=name,
        model=model,
        instances=instances,
        connector=connector,
        api=api,
        health=health,
        router=router,
        device=device,
    )
    _check_against_checkpoint(config, header)
    return Deployment(config=config, header=header)


def is_disaggregated(config: DeploymentConfig) -> bool:
    """Whether prefill and decode run in different instances, so that blocks are ferried."""
    return any(instance.role is not Role.MIXED for instance in config.instances)


def _check_name(name: str) -> None:
    if not all(letter.isalnum() or letter in "-_." for letter in name) or len(name) > 64:
        raise ConfigError("name", f"{name!r} must be at most 64 letters, digits, '-', '_' or '.'")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ModelWishes:
    """The `model` section before the checkpoint is known; None: the checkpoint decides."""

    key: str  # of the model: model.name or model.path
    name: str  # as written there
    dtype: DType | None
    max_model_len: int | None
    served_name: str | None
    seed: int

    @classmethod
    def read(cls, section: Section) -> _ModelWishes:
        name, path = section.text("name", None), section.text("path", None)
        if name is None and path is None:
            raise ConfigError(section.path, "names no model; add `name: smollm2-135m-instruct` or `path: FOLDER`")
        if name is not None and path is not None:
            raise ConfigError(section.at("path"), "name and path both name the model; keep one of them")
        dtype = section.choice("dtype", "auto", ["auto", *DType])
        length = section.integer("max_model_len", 0, minimum=1)
        wishes = cls(
            key=section.at("name" if path is None else "path"),
            name=path or name or "",
            dtype=None if dtype == "auto" else DType(dtype),
            max_model_len=length or None,
            served_name=section.text("served_name", None),
            seed=section.integer("seed", 0, minimum=0),
        )
        section.finish()
        return wishes

    def find(self, resolve: Resolver, base: Path, progress: Progress) -> Path:
        """The model's folder; a path is a folder, a name may have to be fetched."""
        if self.key.endswith("path"):
            return local_folder(self.key, self.name, base)
        return resolve(self.key, self.name, base=base, progress=progress)


def _model(folder: Path, wanted: _ModelWishes, header: ModelHeader) -> ModelConfig:
    length = wanted.max_model_len or min(header.max_positions, DEFAULT_MAX_MODEL_LEN)
    try:
        header.check_length(length)
    except ModelLoadError as error:
        raise ConfigError("model.max_model_len", str(error)) from None
    return ModelConfig(
        name=wanted.name,
        served_name=wanted.served_name or (folder.name if wanted.key.endswith("path") else wanted.name),
        path=folder,
        dtype=wanted.dtype or stored_dtype(folder),
        max_model_len=length,
        seed=wanted.seed,
    )


def _cache(section: Section, base: CacheConfig) -> CacheConfig:
    if section.has("num_blocks") and section.has("memory"):
        raise ConfigError(section.at("memory"), "num_blocks and memory both size the pool; keep one of them")
    num_blocks = section.integer("num_blocks", 0, minimum=2) or None
    cache = CacheConfig(
        block_size=section.integer("block_size", base.block_size or 0, minimum=1, maximum=1024) or None,
        num_blocks=num_blocks if section.has("num_blocks") or section.has("memory") else base.num_blocks,
        memory_bytes=section.size("memory", base.memory_bytes),
        planner=section.choice("planner", base.planner, PLANNERS),
        layout=section.choice("layout", base.layout, LAYOUTS),
        dtype=section.choice("dtype", base.dtype, CACHE_DTYPES),
        enable_prefix_caching=section.flag("enable_prefix_caching", default=base.enable_prefix_caching),
        watermark=section.number("watermark", base.watermark, minimum=0.0, maximum=0.9),
    )
    section.finish()
    return cache


def _scheduler(section: Section, base: SchedulerConfig) -> SchedulerConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=section.integer("max_num_seqs", base.max_num_seqs, minimum=1, maximum=65536),
        max_num_batched_tokens=section.integer("max_num_batched_tokens", base.max_num_batched_tokens, minimum=1),
        max_queue_len=section.integer("max_queue_len", base.max_queue_len, minimum=1),
        num_steps_in_flight=section.integer("num_steps_in_flight", base.num_steps_in_flight, minimum=1, maximum=8),
        policy=section.choice("policy", base.policy, ("fcfs", "priority")),
        speculation=base.speculation,
    )
    section.finish()
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            section.at("max_num_batched_tokens"),
            f"{scheduler.max_num_batched_tokens} is less than max_num_seqs={scheduler.max_num_seqs}: a decode step "
            f"of every row would not fit; use {scheduler.max_num_seqs} or more",
        )
    return scheduler


def _instance(section: Section, *, cache: CacheConfig, scheduler: SchedulerConfig, device: Device) -> InstanceConfig:
    resources = section.section("resources")
    custom = {
        key: resources.number(key, 0.0, minimum=0.0)
        for key in resources.written_keys()
        if key not in ("num_cpus", "num_gpus")
    }
    default_gpus = 1.0 if device is Device.CUDA else 0.0
    instance = InstanceConfig(
        role=Role(section.choice("role", Role.MIXED, [*Role])),
        replicas=section.integer("replicas", 1, minimum=1, maximum=1024),
        tensor_parallel=section.integer("tensor_parallel", 1, minimum=1, maximum=1024),
        pipeline_parallel=section.integer("pipeline_parallel", 1, minimum=1, maximum=1024),
        num_cpus=resources.number("num_cpus", 1.0, minimum=0.0),
        num_gpus=resources.number("num_gpus", default_gpus, minimum=0.0),
        resources=custom,
        num_threads=section.integer("num_threads", 1, minimum=1, maximum=1024),
        cache=_cache(section.section("cache"), cache),
        scheduler=_scheduler(section.section("scheduler"), scheduler),
        offload=read_offload(section.section("offload")),
    )
    section.finish()
    if device is Device.CUDA and instance.num_gpus == 0:
        raise ConfigError(resources.at("num_gpus"), "0 GPUs with `device: cuda`; use 1, or set `device: cpu`")
    for key in ("CPU", "GPU", "cpu", "gpu", "cpus", "gpus", "memory"):
        if key in custom:
            raise ConfigError(resources.at(key), "not a custom resource; write num_cpus or num_gpus")
    return instance


def _connector(section: Section) -> ConnectorConfig:
    base = ConnectorConfig()
    mode = section.choice("mode", base.mode, tuple(TransferMode))
    overlap = Overlap.LAYERS if mode == TransferMode.PUSH else Overlap.CHUNKS
    ucx = section.section("ucx_options")
    connector = ConnectorConfig(
        kind=section.choice("kind", base.kind, ("pd",)),
        transport=section.choice("transport", base.transport, ("ucx", "loopback")),
        mode=mode,
        overlap=section.choice("overlap", overlap, tuple(Overlap)),
        lease_s=section.number("lease_s", base.lease_s, minimum=0.1),
        transfer_timeout_s=section.number("transfer_timeout_s", base.transfer_timeout_s, minimum=0.1),
        load_failure_policy=section.choice("load_failure_policy", base.load_failure_policy, ("recompute", "fail")),
        checksums=section.flag("checksums", default=base.checksums),
        ucx_options={key: ucx.text(key, "") or "" for key in ucx.written_keys()},
    )
    ucx.finish()
    section.finish()
    if mode == TransferMode.PULL and connector.overlap == Overlap.LAYERS:
        raise ConfigError(
            section.at("overlap"),
            "'layers' with mode pull: the side that reads does not see layers end; use chunks, or mode push",
        )
    if connector.transport == "loopback":
        raise ConfigError(
            section.at("transport"), "'loopback' joins pools of one process only and workers are processes; use 'ucx'"
        )
    return connector


def _health(section: Section) -> HealthConfig:
    base = HealthConfig()
    limit_s = section.number("silence_limit_s", base.silence_limit_s, minimum=2.0)  # two signs of life
    resume_s = section.number("resume_timeout_s", base.resume_timeout_s, minimum=0.0)
    section.finish()
    return HealthConfig(silence_limit_s=limit_s, resume_timeout_s=resume_s)


def _router(section: Section) -> RouterConfig:
    policy = section.choice("policy", RouterConfig().policy, tuple(POLICIES))
    section.finish()
    return RouterConfig(policy=policy)


def _api(section: Section, base: Path) -> ApiConfig:
    template = section.text("chat_template", None)
    path = None if template is None else base / Path(template).expanduser()
    if path is not None and not path.is_file():
        raise ConfigError(section.at("chat_template"), f"no such file: {path}")
    defaults = ApiConfig()
    api = ApiConfig(
        host=section.text("host", defaults.host) or defaults.host,
        port=section.integer("port", defaults.port, minimum=0, maximum=65535),
        num_cpus=section.number("num_cpus", defaults.num_cpus, minimum=0.0),
        chat_template=path,
        keys=_api_keys(section, base),
        max_concurrent_requests=section.integer("max_concurrent_requests", defaults.max_concurrent_requests, minimum=1),
        max_connections=section.integer("max_connections", defaults.max_connections, minimum=1),
    )
    section.finish()
    return api


def _api_keys(section: Section, base: Path) -> tuple[str, ...]:
    """Those of the file, one a line, and those of the environment."""
    name = section.text("api_key_file", None)
    if name is None:
        return api_keys_of_environment()
    path = base / Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(section.at("api_key_file"), f"{path} cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(section.at("api_key_file"), f"{path} holds no key; write one a line, or remove the entry")
    return keys + api_keys_of_environment()


def _check_instances(instances: tuple[InstanceConfig, ...], device: Device) -> None:
    if not instances:
        raise ConfigError("instances", "is empty; add `- role: mixed`, or one `role: prefill` and one `role: decode`")
    roles = {instance.role for instance in instances}
    if Role.MIXED in roles and len(roles) > 1:
        index = next(index for index, instance in enumerate(instances) if instance.role is Role.MIXED)
        raise ConfigError(
            f"instances[{index}].role", "mixed cannot stand beside prefill or decode; use mixed only, or both others"
        )
    for present, missing in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if present in roles and missing not in roles:
            raise ConfigError("instances", f"{present} without {missing}; add `- role: {missing}`, or use role mixed")
    if device is Device.CUDA and Role.MIXED not in roles:
        raise ConfigError(
            "device", "cuda with prefill and decode: blocks in GPU memory cannot be ferried yet; use role mixed, or cpu"
        )
    for index, instance in enumerate(instances):
        size = instance.cache.block_size
        if device is Device.CUDA and size is not None and size % GPU_BLOCK_MULTIPLE:
            raise ConfigError(
                f"instances[{index}].cache.block_size",
                f"{size} is not a multiple of {GPU_BLOCK_MULTIPLE}, the kernel tile; use 16, 32 or 64",
            )


def _check_against_checkpoint(config: DeploymentConfig, header: ModelHeader) -> None:
    for index, instance in enumerate(config.instances):
        where = f"instances[{index}]"
        tier_settings(plan_of(config.model, header, instance, where=where), instance, where=where)
