"""What the offload connector's halves say to each other: copies between a rank's pool, its memory tier and its disk.

Plain values. A copy is a job that every rank of an instance does for its own bytes; block ids and units are the same on
all of them. Nothing here knows requests.

    STORE    pool -> memory       LOAD    memory -> pool
    DEMOTE   memory -> disk       FETCH   disk -> pool
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import numpy as np

from blockferry.connectors.base import ConnectorError, Int32Array
from blockferry.connectors.typed_maps import TWO_AXES

DIGEST_BYTES = 28


class OffloadError(ConnectorError):
    """A tier that cannot be opened, written or read: names the file and the remedy."""


class CopyKind(enum.StrEnum):
    """From where to where."""

    STORE = "store"
    LOAD = "load"
    DEMOTE = "demote"
    FETCH = "fetch"

    @property
    def is_on_disk(self) -> bool:
        """Whether the disk has a part in it."""
        return self in (CopyKind.DEMOTE, CopyKind.FETCH)

    @property
    def is_into_pool(self) -> bool:
        """Whether bytes land in blocks."""
        return self in (CopyKind.LOAD, CopyKind.FETCH)


_NO_UNITS: Int32Array = np.empty((0, 0), np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyPart:
    """Blocks of one cache group; what the kind of copy does not need is empty."""

    group: int
    block_ids: Int32Array = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))  # [N], of the pool
    # [N, units of a block], of the memory
    units: Int32Array = dataclasses.field(default_factory=lambda: _NO_UNITS, metadata=TWO_AXES)
    # the same, of the disk
    disk_units: Int32Array = dataclasses.field(default_factory=lambda: _NO_UNITS, metadata=TWO_AXES)
    digests: bytes = b""  # N times DIGEST_BYTES: what the disk's blocks are known by

    @property
    def num_blocks(self) -> int:
        """Blocks to copy."""
        return max(len(self.block_ids), len(self.units))

    def digest(self, number: int) -> bytes:
        """That of one block."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyCommand:
    """One job; every rank of the instance gets the same one. Jobs are numbered in the order they are given."""

    job_id: int
    kind: CopyKind
    after_step: int  # the pool is touched once the rank has executed the steps up to here
    parts: tuple[CopyPart, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyEvent:
    """A rank has ended a job: no byte of it moves any more."""

    job_id: int
    instance_id: str
    rank: int
    is_done: bool  # False: bytes are missing, reason says why
    num_bytes: int
    duration_s: float  # of the copy itself
    reason: str = ""


CopySink = Callable[[CopyEvent], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """How a tier is cut on one rank."""

    units_per_block: tuple[int, ...]  # per cache group
    unit_bytes: int

    def check_holds(self, group: int, page_bytes: int) -> None:
        """Raises ValueError when the units of a block are too small for its bytes."""
        num_bytes = self.units_per_block[group] * self.unit_bytes
        if page_bytes > num_bytes:
            raise ValueError(
                f"a block of group {group} has {page_bytes} bytes, its {self.units_per_block[group]} units hold "
                f"{num_bytes}; take the shape from the plan that the pool was made of"
            )
