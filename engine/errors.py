"""The engine's own exceptions. Callers' mistakes are ValueError; broken invariants are assert.

    BlockferryError
    +-- RequestRejected        a request that can never run here (also a ValueError)
    |   +-- QueueFull          no room to wait just now; the same request may be sent again later
    +-- ConfigError            a deployment that cannot work, with the key's path (also a ValueError)
    |   +-- UnplannableLayers  layers whose caches no plan can hold in one pool
    |   +-- PoolTooSmall       a pool that cannot hold one sequence of max_model_len
    +-- ModelLoadError         a checkpoint that cannot be loaded, with the file or tensor
    +-- LedgerCorrupted        check_integrity found a broken invariant
    +-- RankLost               a rank of an instance no longer answers the others
    +-- InstanceFailed         a worker of an instance died or reported an error

Connectors have a tree of their own, drawn in connectors/base.py.
"""

from __future__ import annotations


class BlockferryError(Exception):
    """Base of every error that blockferry raises on purpose."""


class RequestRejected(BlockferryError, ValueError):
    """A request that can never run on this deployment; the message names value, limit and remedy."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(reason)
        self.request_id = request_id


class QueueFull(RequestRejected):
    """The waiting queue is full: not the request's fault, and worth a retry later (HTTP 429)."""


class ConfigError(BlockferryError, ValueError):
    """A deployment description that cannot work; `path` is the dotted key, e.g. `instances[0].role`."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class UnplannableLayers(ConfigError):
    """Layers whose caches the asked-for planner cannot put into one pool; `layer_id` is one that does not fit."""

    def __init__(self, layer_id: int, reason: str) -> None:
        super().__init__("", f"layer {layer_id}: {reason}")
        self.layer_id = layer_id


class PoolTooSmall(ConfigError):
    """A KV pool that cannot hold one sequence of max_model_len; says how many bytes it takes, null block included."""

    def __init__(self, path: str, reason: str, *, needed_bytes: int) -> None:
        super().__init__(path, reason)
        self.needed_bytes = needed_bytes


class ModelLoadError(BlockferryError):
    """A checkpoint that is missing, corrupt or of an unsupported architecture."""


class LedgerCorrupted(BlockferryError):
    """check_integrity() found a block that is not exactly one of null, free or held."""


class RankLost(BlockferryError):
    """A collective among an instance's ranks failed; names this rank and the phase."""

    def __init__(self, rank: int, phase: str, reason: str) -> None:
        super().__init__(f"rank {rank} failed to {phase}: {reason}")
        self.rank = rank
        self.phase = phase


class InstanceFailed(BlockferryError):
    """An instance can no longer compute; `instance_id` says which, the message says why."""

    def __init__(self, instance_id: str, reason: str) -> None:
        super().__init__(f"instance {instance_id}: {reason}")
        self.instance_id = instance_id
