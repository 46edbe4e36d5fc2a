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

from blockferry.connectors.base import TransferCommand, TransferEvent
from blockferry.connectors.offload_base import CopyCommand, CopyEvent
from blockferry.engine import wire
from blockferry.engine.request import Request
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
    STATUS = b"s"  # query
    STATUS_REPLY = b"v"  # StatusReply
    STOP = b"z"  # Farewell to a client, reason to a worker


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

    A request that drew several tokens is named as often, its tokens in order. Mutable: its one
    owner fills it during a pass of the scheduler loop, then sends it.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply:
    """A snapshot of the deployment, for whoever asked with this number."""

    query: int
    status: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """The scheduler's last word to a client."""

    reason: str
    is_final: bool  # it was told to stop, so that none will come in its place


def encode(tag: Tag, value: Any) -> Frames:
    """Frames of one message."""
    return [tag.value, wire.pack(value)]


def split(frames: Frames) -> tuple[Tag, bytes]:
    """Tag and payload of frames without identity. Raises ValueError for anything else."""
    if len(frames) != 2:
        raise ValueError(f"a message has 2 frames, got {len(frames)}")
    return Tag(frames[0]), frames[1]


def request_from(payload: bytes) -> Request:
    """Decode a Request. Raises ValueError when it is none."""
    request = wire.decode(Request, payload)
    sent = {
        "prompt_token_ids": request.prompt_token_ids,
        "output_token_ids": request.output_token_ids,
        "encoder_token_ids": request.encoder_token_ids,
    }
    for name, token_ids in sent.items():
        if token_ids is not None and len(token_ids) and token_ids.min() < 0:
            raise ValueError(f"{name} has the token id {int(token_ids.min())}; send numbers >= 0")
    return request


def worker_value(tag: Tag, payload: bytes) -> Any:
    """What a worker's message carries; None where that is nothing. Raises ValueError when it is not what `tag` says."""
    if tag is Tag.RESULT:
        return wire.result_from_bytes(payload)
    if tag is Tag.EVENT:
        return event_from(payload)
    if tag is Tag.COPIED:
        return copied_from(payload)
    return wire.decode(str, payload) if tag is Tag.TROUBLE else None


def command_from(payload: bytes) -> TransferCommand:
    """Decode a TransferCommand. Raises ValueError when it is none."""
    return wire.decode(TransferCommand, payload)


def event_from(payload: bytes) -> TransferEvent:
    """Decode a TransferEvent. Raises ValueError when it is none."""
    return wire.decode(TransferEvent, payload)


def copy_from(payload: bytes) -> CopyCommand:
    """Decode a CopyCommand. Raises ValueError when it is none."""
    return wire.decode(CopyCommand, payload)


def copied_from(payload: bytes) -> CopyEvent:
    """Decode a CopyEvent. Raises ValueError when it is none."""
    return wire.decode(CopyEvent, payload)


def outputs_from(payload: bytes) -> OutputBatch:
    """Decode an OutputBatch. Raises ValueError when it is none."""
    batch = wire.decode(OutputBatch, payload)
    if len(batch.handles) != len(batch.token_ids):
        raise ValueError(f"{len(batch.token_ids)} tokens for {len(batch.handles)} handles; send one each")
    return batch


def farewell_from(payload: bytes) -> Farewell:
    """Decode a Farewell. Raises ValueError when it is none."""
    return wire.decode(Farewell, payload)


def rejection_from(payload: bytes) -> Rejection:
    """Decode a Rejection. Raises ValueError when it is none."""
    return wire.decode(Rejection, payload)


def status_from(payload: bytes) -> StatusReply:
    """Decode a StatusReply. Raises ValueError when it is none."""
    return wire.decode(StatusReply, payload)
