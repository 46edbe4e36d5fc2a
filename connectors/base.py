"""The seam between engine and connectors: pools as byte layouts, transfers as data, transports as verbs.

Connectors know block ids and byte regions, never requests. Nothing here imports the engine.

    scheduler half   turns "ferry these blocks" into TransferCommands and follows their events
    worker half      executes commands against a Transport on its own thread and reports events

    ConnectorError
    +-- TransportError       the fabric failed: names the peer and the operation
    +-- CorruptedBytes       both ends of a transfer have different bytes
    +-- HandshakeRefused     two pools cannot exchange blocks: names the field and both values (also a ValueError)
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class ConnectorError(Exception):
    """Base of every error that connectors raise on purpose."""


class TransportError(ConnectorError):
    """The fabric failed: names the peer and the operation."""


class CorruptedBytes(ConnectorError):
    """Both ends of a transfer have different bytes; the message says of what."""


class HandshakeRefused(ConnectorError, ValueError):
    """Two pools that cannot exchange blocks, or what is no handshake; the message names the field and both values."""


class TransferMode(enum.StrEnum):
    """Which side moves the bytes: the source writes (push) or the destination reads (pull)."""

    PUSH = "push"
    PULL = "pull"


class Overlap(enum.StrEnum):
    """When the bytes of a prompt may travel, beside the computing of it."""

    NONE = "none"  # once the whole prompt is computed
    CHUNKS = "chunks"  # chunk by chunk, as each is computed
    LAYERS = "layers"  # layers of a chunk while later ones compute; a push only, as the source alone sees them end


class TransferState(enum.StrEnum):
    """How a transfer ended on one rank. CANCELLED means: quiesced, no byte will land any more."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ContentKind(enum.StrEnum):
    """What the bytes of one token of one head are, and so who holds which."""

    KV = "kv"  # key and value of one KV head; each rank holds some heads
    LATENT = "latent"  # one vector for all heads, the one "head" 0, which every tensor-parallel rank holds
    STATE = "state"  # one field of a recurrent layer's state, one "token" a block; "heads" are the field's units


class Strides(NamedTuple):
    """Bytes from one block, layer slot, head or token of a pool to the next."""

    block: int
    layer: int
    head: int
    token: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """Where every (block, layer, head, token) of layers of one cache group lies in a rank's pool. All in bytes.

    `order` spells the axes outermost first (BHLNC, BLHNC, LBHNC, LBNHC). The C axis (what one token of one head
    stores) is always innermost and contiguous: content_bytes. Several groups share a pool by offset and strides;
    block ids are those of the group.
    """

    order: str
    num_blocks: int
    block_size: int  # tokens
    layer_ids: tuple[int, ...]  # model layers stored here, in slot order
    head_start: int  # first global KV head stored here, or unit of a state's field
    num_heads: int
    content_bytes: int
    dtype: str  # "bfloat16", ...
    group: int = 0
    content: ContentKind = ContentKind.KV
    field: str = ""  # of a state: which of its fields; bytes of other fields mean something else
    num_copies: int = 1  # ranks of the instance that each hold all of this
    copy: int = 0  # which of them this one is
    offset: int = 0  # of block 0, layer slot 0, first head, first token
    strides: Strides | None = None  # None: the axes follow each other without gaps, in `order`
    scales: bytes = b""  # of content in fp8: little-endian float32 [layers, heads, 2], of K and of V

    @property
    def num_bytes(self) -> int:
        """Bytes from the pool's start to the end of what is stored here."""
        sizes = (self.num_blocks, len(self.layer_ids), self.num_heads, self.block_size)
        if self.strides is None:
            return self.offset + math.prod(sizes) * self.content_bytes
        last = sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))
        return self.offset + last + self.content_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Which rank of which instance this process is, before it has a pool."""

    instance_id: str
    rank: int  # within the instance, 0-based, over TP and PP
    tp_rank: int
    pp_rank: int
    model_fingerprint: str  # equal for instances that compute the same KV cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolEndpoint:
    """One rank's pool as peers must know it: the handshake's content. Serialised by handshake.py."""

    instance_id: str
    tp_rank: int
    pp_rank: int
    model_fingerprint: str
    layouts: tuple[PoolLayout, ...]  # of all cache groups that are ferried; layers of a group may need several
    transport: str  # "ucx", "loopback"
    host_id: str  # equal for processes that share memory
    address: bytes  # transport worker address
    region: bytes  # packed memory key and base address


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferPart:
    """What a transfer moves of the layers that are in src_group of the source and in dst_group of the destination.

    `num_tokens` tokens, counted along the blocks of either side: from first_token (an offset into src_block_ids[0])
    on in the source, from dst_first_token (into dst_block_ids[0]) on in the destination. Block sizes may differ;
    where they are equal and so are the offsets, src_block_ids[i] goes to dst_block_ids[i]. Slots of the last
    destination block after num_tokens may be overwritten. A state is one token, and so is its block.
    """

    src_group: int
    dst_group: int  # planners need not group layers alike on both sides
    src_block_ids: Int32Array
    dst_block_ids: Int32Array
    num_tokens: int
    first_token: int = 0
    dst_first_token: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferCommand:
    """Ferry blocks between two instances; every rank of the executing instance gets the same one."""

    transfer_id: int
    mode: TransferMode
    src_instance_id: str
    dst_instance_id: str
    parts: tuple[TransferPart, ...]  # at most one per pair of groups; one without has nothing to move
    deadline_s: float  # seconds from receipt after which the rank gives up
    after_step: int | None = None  # of the source, which executes: bytes of a layer once it has computed it there

    @property
    def executing_instance_id(self) -> str:
        """The instance whose ranks move the bytes and report events."""
        return self.src_instance_id if self.mode is TransferMode.PUSH else self.dst_instance_id

    @property
    def peer_instance_id(self) -> str:
        """The instance at the other end."""
        return self.dst_instance_id if self.mode is TransferMode.PUSH else self.src_instance_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """How one rank's part of a transfer ended.

    is_quiesced is False while a network or a frozen peer may still hold bytes that land in the destination's blocks.
    With is_watched the event comes again: quiesced once they have landed, not watched any more if the connection fails.
    """

    transfer_id: int
    instance_id: str
    rank: int  # of the executing instance
    state: TransferState
    num_bytes: int
    num_runs: int  # contiguous byte runs posted
    duration_s: float
    reason: str = ""
    is_quiesced: bool = True
    is_watched: bool = False


EventSink = Callable[[TransferEvent], None]


class Region(Protocol):
    """Memory registered with a transport. Lives until its transport is closed."""

    @property
    def view(self) -> ByteArray:
        """The whole region as bytes."""

    @property
    def key(self) -> bytes:
        """What a peer needs to reach this region: packed memory key and base address."""


class Peer(Protocol):
    """A connected remote region. Offsets are relative to the region's start."""

    @property
    def is_direct(self) -> bool:
        """True where the region lies in memory that both processes map, so that nothing crosses a network."""

    def write(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post one-sided writes local -> remote; flush() tells when they have landed.

        Costs the copy itself where the peer is direct. Raises TransportError when the connection has failed.
        """

    def read(self, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> None:
        """Post one-sided reads remote -> local; see write()."""

    def flush(self) -> Flush:
        """Begin a flush of all posted operations."""

    def checksum(self, remote_offsets: Int64Array, lengths: Int64Array) -> Checksum:
        """Have the peer sum what its region holds in these runs, each of at most 64 MiB; flush() writes before.

        The sum is that of native_checksum.sum_runs. Raises TransportError, ValueError.
        """

    def close(self) -> None:
        """Drop the connection; never blocks longer than the transport's timeout. Idempotent.

        Reads that were posted touch local memory no more. Writes that a network holds may still land.
        """


class Flush(Protocol):
    """A flush in progress."""

    def poll(self) -> bool:
        """True when every operation has landed remotely (writes) or locally (reads).

        Raises TransportError when the peer or the connection failed.
        """


class Checksum(Protocol):
    """A checksum in progress."""

    def poll(self) -> int | None:
        """The sum in [0, 2**64), once the peer has told it. Raises TransportError when the connection failed."""


class Transport(Protocol):
    """One process's end of a fabric. Every method is called from the one thread that owns it,

    except allocate(), which is called once before that thread starts.
    """

    name: str

    def allocate(self, num_bytes: int) -> Region:
        """Allocate and register zeroed memory that peers may read and write."""

    def adopt(self, view: ByteArray) -> Region:
        """Register memory that somebody else owns and keeps alive."""

    @property
    def address(self) -> bytes:
        """This process's address for connect()."""

    def connect(self, address: bytes, *, local: Region, remote_key: bytes) -> Peer:
        """Connect to a peer's region. Raises TransportError."""

    def progress(self) -> bool:
        """Advance outstanding work; True when something moved."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until there may be something to progress, a wake() or the timeout."""

    def wake(self) -> None:
        """End a wait() from another thread. The only thread-safe method."""

    def close(self) -> None:
        """Release everything. Idempotent."""
