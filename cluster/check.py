"""What would not work on this machine, and why, found before anything starts. Starts nothing and fetches nothing.

Each check is a function from facts to findings. An error would stop `serve`; a warning would not.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import importlib.util
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blockferry.cluster import run_record
from blockferry.cluster.checkpoint import ModelNotFetchedError, find_model
from blockferry.cluster.deployment import Deployment, is_disaggregated, load_deployment
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.listen import ListenError, bind
from blockferry.cluster.offload_settings import GIB, tier_settings
from blockferry.cluster.plan_facts import PlanFacts, facts_of_instance, summary_of
from blockferry.cluster.speculation_settings import words_of
from blockferry.connectors.transport.hosts import UCX_QUEUE_BYTES, UCX_ROOM_BYTES
from blockferry.engine.config import DeploymentConfig, Device, InstanceConfig, Role
from blockferry.engine.errors import BlockferryError, ConfigError

MIB = 2**20
PROCESS_BYTES = 400 * MIB  # of a worker with torch, without weights and pool
_MAX_HEADER_BYTES = 100 * MIB


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    message: str
    plan: PlanFacts | None = None  # of an instance's cache

    @property
    def is_error(self) -> bool:
        """Whether `serve` would fail."""
        return self.level is Level.ERROR

    def to_json(self) -> dict[str, Any]:
        """Plain values; with the plan where the finding is about one."""
        values: dict[str, Any] = {"level": self.level.value, "subject": self.subject, "message": self.message}
        return values if self.plan is None else values | {"plan": self.plan.to_json()}


def check_deployment(file: Path, *, address: str | None) -> list[Finding]:
    """Everything that can be known now about a deployment file on this machine, or on the cluster at `address`."""
    try:
        deployment = load_deployment(file, resolve=find_model)
    except ModelNotFetchedError as error:
        return [_warning("model", f"{error}; the other checks need it")]
    except ConfigError as error:
        return [_error("config", str(error))]
    config = deployment.config
    findings = [_ok("config", f"{file} describes {len(config.instances)} instance kind(s) of {config.model.name}")]
    for checks in (
        _check_name(config),
        _check_packages(config),
        _check_port(config),
        _check_keys(config),
        check_weights(config.model.path),
        _check_speculation(deployment),
        _check_lengths(deployment),
        _check_cluster(config, address) if address is not None else check_machine(deployment),
    ):
        findings += checks
    return findings


def _check_name(config: DeploymentConfig) -> Iterator[Finding]:
    record = run_record.find_record(config.name)
    if record is not None:
        yield _error("name", f"{config.name!r} already runs here (process {record.pid}); stop it or change `name`")


def _check_packages(config: DeploymentConfig) -> Iterator[Finding]:
    needed = ["ray", "torch", "zmq", "tokenizers", "safetensors"]
    needed += ["libucx"] if is_disaggregated(config) else []
    needed += ["triton"] if config.device is Device.CUDA else []
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        yield _error("packages", f"{', '.join(missing)} cannot be imported; install blockferry with its dependencies")
    else:
        yield _ok("packages", f"ray {importlib.metadata.version('ray')}, torch {importlib.metadata.version('torch')}")
    if config.device is Device.CUDA and not missing:
        import torch  # slow, and only GPUs need it here

        if not torch.cuda.is_available():
            yield _warning("device", "this machine has no usable CUDA GPU; the workers must run on others")


def _check_port(config: DeploymentConfig) -> Iterator[Finding]:
    try:
        bind(config.api.host, config.api.port).close()
    except ListenError as error:
        yield _error("api.port", str(error))
    else:
        yield _ok("api.port", f"{config.api.host}:{config.api.port} is free")


def _check_keys(config: DeploymentConfig) -> Iterator[Finding]:
    api = config.api
    if not api.keys and not api.host.startswith("127.") and api.host not in ("localhost", "::1"):
        yield _warning(
            "api.host", f"{api.host} can be reached from other hosts, and no key is asked for; set api.api_key_file"
        )


def check_weights(folder: Path) -> Iterator[Finding]:
    """Whether a model folder's files are there and whole, from sizes and headers alone."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(folder.glob("*.safetensors"))
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            yield _error("model", f"{index} cannot be read: {error}")
            return
        for name in sorted(named - {file.name for file in files}):
            yield _error("model", f"{folder / name} is missing, which {index.name} names")
    yield from _check_files("model", folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        yield _error("model", f"{folder} holds no tokenizer (tokenizer.json)")


def _check_files(subject: str, folder: Path) -> Iterator[Finding]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield _error(subject, f"{folder} holds no *.safetensors; convert or download the weights")
    damage = [(file, _damage(file)) for file in files]
    for file, reason in damage:
        if reason:
            yield _error(subject, f"{file} is damaged: {reason}; fetch it again")
    if files and not any(reason for _, reason in damage):
        yield _ok(subject, f"{len(files)} safetensors file(s), {sum(f.stat().st_size for f in files) / MIB:.0f} MiB")


def _check_speculation(deployment: Deployment) -> Iterator[Finding]:
    """What is drafted by whom, and whether full steps have room for all of it."""
    config = deployment.config
    speculation = config.instances[0].scheduler.speculation
    if speculation is None:
        return
    yield _ok("speculation", words_of(speculation, deployment.header))
    if speculation.head_path is not None:
        yield from _check_files("speculation.head", speculation.head_path)
    for index, instance in enumerate(config.instances):
        limits = instance.scheduler
        wanted = limits.max_num_seqs * (1 + speculation.num_tokens)
        if wanted > limits.max_num_batched_tokens and instance.role is not Role.PREFILL:
            yield _warning(
                "speculation.num_tokens",
                f"{limits.max_num_seqs} requests of instances[{index}] with {speculation.num_tokens} drafts each take "
                f"{wanted} tokens of a step, which has {limits.max_num_batched_tokens}; some will draft fewer: raise "
                "scheduler.max_num_batched_tokens to avoid that",
            )


def _damage(file: Path) -> str:
    """Why a safetensors file cannot be whole; empty when its header and size agree."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return f"{size} bytes are too few for a header"
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            return f"its header claims {header_bytes} bytes of {size}"
        try:
            header = json.loads(stream.read(header_bytes))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "its header is not readable JSON"
    expected = 8 + header_bytes + end
    return "" if size == expected else f"it has {size} bytes, its header says {expected}"


def _check_lengths(deployment: Deployment) -> Iterator[Finding]:
    """What each instance's pool is cut into, and whether it can hold one sequence of full length."""
    config = deployment.config
    for index, instance in enumerate(config.instances):
        where = f"instances[{index}].cache"
        plan = plan_of(config.model, deployment.header, instance, where=f"instances[{index}]")
        facts = facts_of_instance(plan)
        level, words = Level.OK, summary_of(facts.to_json())
        if plan.longest < config.model.max_model_len:
            level = Level.WARNING
            words += (
                f"; it cannot hold one of max_model_len={config.model.max_model_len} tokens, "
                "longer requests will be rejected"
            )
        yield Finding(level=level, subject=where, message=words, plan=facts)


def check_machine(deployment: Deployment) -> Iterator[Finding]:
    """Memory, cores and shared memory of a deployment that all runs here."""
    config = deployment.config
    pools = weights = tiers = num_all_ranks = 0
    num_threads = 0
    stored = sum(file.stat().st_size for file in config.model.path.glob("*.safetensors"))
    for instance in config.instances:
        num_ranks = instance.tensor_parallel * instance.pipeline_parallel
        plan = plan_of(config.model, deployment.header, instance, where="")
        num_stage_ranks = instance.replicas * instance.tensor_parallel
        pools += num_stage_ranks * sum(stage.pool_bytes for stage in plan.stages)
        settings = tier_settings(plan, instance, where="")
        if settings is not None:
            tiers += num_stage_ranks * sum(settings.memory_bytes(pp_rank) for pp_rank in range(len(plan.stages)))
            words = f"{settings.num_units} units of {max(settings.unit_bytes) / 1024:.0f} KiB a rank"
            yield _ok("offload", f"{words}; at least {settings.useful_fraction:.0%} of a block's units are content")
            yield from _check_disk(instance, num_ranks=instance.replicas * num_ranks)
        weights += instance.replicas * (stored + num_ranks * PROCESS_BYTES)
        num_all_ranks += instance.replicas * num_ranks
        num_threads += instance.replicas * num_ranks * instance.num_threads
    yield from _check_threads(num_threads)
    if config.device is Device.CUDA:
        return
    available = _available_bytes()
    needed = pools + weights + tiers
    words = f"pools {pools / MIB:.0f} MiB + weights and processes {weights / MIB:.0f} MiB"
    remedy = "lower cache.memory"
    if tiers:
        words, remedy = f"{words} + offload {tiers / MIB:.0f} MiB", f"{remedy} or offload.cpu_gib"
    if needed > available:
        yield _error("memory", f"{words} exceed the {available / MIB:.0f} MiB available; {remedy}")
    else:
        yield _ok("memory", f"{words} of {available / MIB:.0f} MiB available")
    ferried = pools + UCX_ROOM_BYTES + num_all_ranks * UCX_QUEUE_BYTES if is_disaggregated(config) else 0
    yield from _check_shared_memory(ferried=ferried, tiers=tiers)


def find_shortage_here(deployment: Deployment, indexes: Sequence[int]) -> str:
    """What this machine lacks, beside all that runs, for one more instance of each of these shapes; empty: nothing."""
    shapes = deployment.config.instances
    more = tuple(dataclasses.replace(shapes[index], replicas=count) for index, count in Counter(indexes).items())
    config = dataclasses.replace(deployment.config, instances=more)
    findings = check_machine(dataclasses.replace(deployment, config=config))
    return next((f"{one.subject}: {one.message}" for one in findings if one.is_error), "")


def _check_shared_memory(*, ferried: int, tiers: int) -> Iterator[Finding]:
    """Pools that are ferried with what UCX needs for them, and tiers, lie in /dev/shm."""
    if not ferried + tiers:
        return
    shared = shutil.disk_usage("/dev/shm").free
    words = " and ".join(
        f"{num_bytes / MIB:.0f} MiB of {name}"
        for name, num_bytes in (("pools with UCX's queues", ferried), ("offload", tiers))
        if num_bytes
    )
    if ferried + tiers > shared:
        yield _error(
            "/dev/shm",
            f"{words} do not fit the {shared / MIB:.0f} MiB that are free; "
            "lower cache.memory or offload.cpu_gib, or enlarge it (docker run --shm-size)",
        )
    else:
        yield _ok("/dev/shm", f"{words} fit the {shared / MIB:.0f} MiB that are free")


def _check_disk(instance: InstanceConfig, *, num_ranks: int) -> Iterator[Finding]:
    """Room for the disk tiers of an instance kind's ranks."""
    offload = instance.offload
    if offload is None or offload.disk_path is None:
        return
    folder = next(folder for folder in (offload.disk_path, *offload.disk_path.parents) if folder.exists())
    free_gib, wanted_gib = shutil.disk_usage(folder).free / GIB, num_ranks * offload.disk_gib
    if wanted_gib > free_gib:
        reason = f"{wanted_gib:g} GiB do not fit the {free_gib:.1f} GiB free in {folder}"
        yield _error("offload.disk", f"{reason}; lower offload.disk.gib or choose another path")
    else:
        yield _ok("offload.disk", f"{wanted_gib:g} of {free_gib:.1f} GiB free in {folder}")


def _check_threads(num_threads: int) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    if num_threads > cores:
        yield _warning("cpu", f"workers use {num_threads} threads on {cores} core(s) and will take turns")
    else:
        yield _ok("cpu", f"workers use {num_threads} of {cores} core(s)")


def _check_cluster(config: DeploymentConfig, address: str) -> Iterator[Finding]:
    from blockferry.cluster import placement, ray_session  # Ray is slow to import, and only clusters need it

    try:
        session = ray_session.connect(address)
    except BlockferryError as error:
        yield _error("ray", str(error))
        return
    try:
        nodes = placement.cluster_nodes()
        shortage = placement.find_shortage(placement.name_instances(config), nodes)
    finally:
        session.close()
    yield _error("ray", shortage) if shortage else _ok("ray", f"{len(nodes)} node(s) have the resources")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _ok(subject: str, message: str) -> Finding:
    return Finding(level=Level.OK, subject=subject, message=message)


def _warning(subject: str, message: str) -> Finding:
    return Finding(level=Level.WARNING, subject=subject, message=message)


def _error(subject: str, message: str) -> Finding:
    return Finding(level=Level.ERROR, subject=subject, message=message)
