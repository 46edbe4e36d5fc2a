"""Envelopes between scheduler, workers and clients: one type tag and one wire.pack() payload.

Knows what travels, not how: sockets belong to the loops. No pickle; a foreign wire version is refused.

    worker -> scheduler   HELLO  BEAT  RESULT  EVENT  COPIED  TROUBLE
    scheduler -> worker   PLAN  TRANSFER  CANCEL  COPY  STOP
    client -> scheduler   HELLO  REQUEST  ABORT  STATUS
    scheduler -> client   WELCOME  BEAT  OUTPUT  REJECTED  STATUS_REPLY  STOP

Frames: [tag, payload]; a ROUTER socket puts the peer's identity before them.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from blockferry.connectors.base import TransferCommand, TransferEvent, TransferMode, TransferPart, TransferState
from blockferry.connectors.offload_base import CopyCommand, CopyEvent, CopyKind, CopyPart
from blockferry.engine import wire
from blockferry.engine.request import FinishReason, Int32Array, Request, RequestStats
from blockferry.engine.scheduler.outputs import Finished
from blockferry.engine.wire import RowLogprobs

Frames = list[bytes]


class Tag(enum.Enum):
    """What a payload is; the value is the first frame."""

    HELLO = b"h"  # {}
    WELCOME = b"w"  # {}
    BEAT = b"b"  # {}
    PLAN = b"p"  # StepPlan
    RESULT = b"r"  # StepResult
    TRANSFER = b"t"  # TransferCommand
    CANCEL = b"c"  # transfer_id
    EVENT = b"e"  # TransferEvent
    COPY = b"k"  # CopyCommand
    COPIED = b"d"  # CopyEvent
    TROUBLE = b"x"  # reason: this worker can no longer compute
    REQUEST = b"q"  # Request
    ABORT = b"a"  # handle
    OUTPUT = b"o"  # OutputBatch
    REJECTED = b"n"  # Rejection
    STATUS = b"s"  # {}
    STATUS_REPLY = b"v"  # map
    STOP = b"z"  # reason


class Channel(enum.Enum):
    """A worker's two connections: steps belong to its model thread, control to its I/O thread."""

    STEPS = "steps"
    CONTROL = "control"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerId:
    """One connection of one rank; its text is the ZeroMQ identity."""

    instance_id: str
    rank: int
    channel: Channel

    def to_bytes(self) -> bytes:
        """Identity for a ZeroMQ socket."""
        return f"{self.instance_id}/{self.rank}/{self.channel.value}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WorkerId:
        """Raises ValueError for an identity of something else."""
        instance_id, rank, channel = data.decode().rsplit("/", 2)
        return cls(instance_id=instance_id, rank=int(rank), channel=Channel(channel))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandleLogprobs:
    """Log probabilities of one request."""

    handle: int
    logprobs: RowLogprobs


@dataclasses.dataclass(slots=True, kw_only=True)
class OutputBatch:
    """What one step means for one client. handles[i] drew token_ids[i]; both have one length.

    Mutable: its one owner fills it during a pass of the scheduler loop, then sends it.
    """

    handles: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[HandleLogprobs] = dataclasses.field(default_factory=list)
    finished: list[Finished] = dataclasses.field(default_factory=list)


class RejectionKind(enum.StrEnum):
    """Why a request was not queued."""

    NEVER_FITS = "never_fits"  # it can never run here
    QUEUE_FULL = "queue_full"  # try again later
    NO_INSTANCE = "no_instance"  # the instances it needs have failed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A request that was not queued."""

    handle: int
    request_id: str
    kind: RejectionKind
    reason: str


def encode(tag: Tag, value: Any) -> Frames:
    """Frames of one message."""
    return [tag.value, wire.pack(value)]


def split(frames: Frames) -> tuple[Tag, bytes]:
    """Tag and payload of frames without identity. Raises ValueError for anything else."""
    if len(frames) != 2:
        raise ValueError(f"a message has 2 frames, got {len(frames)}")
    return Tag(frames[0]), frames[1]


def request_from(payload: bytes) -> Request:
    """Decode a Request. Raises ValueError or TypeError when it is none."""
    value = wire.unpack(payload)
    sampling = wire.sampling_from_map(value["sampling"])
    arrays = {name: _token_ids(value, name) for name in ("prompt_token_ids", "output_token_ids")}
    if value["encoder_token_ids"] is not None:
        arrays["encoder_token_ids"] = _token_ids(value, "encoder_token_ids")
    return Request(**(value | {"sampling": sampling} | arrays))


def _token_ids(value: dict[str, Any], name: str) -> Int32Array:
    token_ids = np.asarray(value[name], np.int32)
    if token_ids.ndim != 1 or (len(token_ids) and token_ids.min() < 0):
        raise ValueError(f"{name} of shape {list(token_ids.shape)} is no list of token ids; send one of numbers >= 0")
    return token_ids


def command_from(payload: bytes) -> TransferCommand:
    """Decode a TransferCommand."""
    value = wire.unpack(payload)
    parts = tuple(TransferPart(**part) for part in value["parts"])
    return TransferCommand(**(value | {"mode": TransferMode(value["mode"]), "parts": parts}))


def event_from(payload: bytes) -> TransferEvent:
    """Decode a TransferEvent."""
    value = wire.unpack(payload)
    return TransferEvent(**(value | {"state": TransferState(value["state"])}))


def copy_from(payload: bytes) -> CopyCommand:
    """Decode a CopyCommand."""
    value = wire.unpack(payload)
    parts = tuple(CopyPart(**part) for part in value["parts"])
    return CopyCommand(**(value | {"kind": CopyKind(value["kind"]), "parts": parts}))


def copied_from(payload: bytes) -> CopyEvent:
    """Decode a CopyEvent."""
    return CopyEvent(**wire.unpack(payload))


def outputs_from(payload: bytes) -> OutputBatch:
    """Decode an OutputBatch."""
    value = wire.unpack(payload)
    return OutputBatch(
        handles=value["handles"],
        token_ids=value["token_ids"],
        logprobs=[
            HandleLogprobs(handle=entry["handle"], logprobs=wire.logprobs_from_map(entry["logprobs"]))
            for entry in value["logprobs"]
        ],
        finished=[_finished_from(entry) for entry in value["finished"]],
    )


def _finished_from(value: dict[str, Any]) -> Finished:
    stats = RequestStats(**value["stats"])
    return Finished(**(value | {"reason": FinishReason(value["reason"]), "stats": stats}))


def rejection_from(payload: bytes) -> Rejection:
    """Decode a Rejection."""
    value = wire.unpack(payload)
    return Rejection(**(value | {"kind": RejectionKind(value["kind"])}))
