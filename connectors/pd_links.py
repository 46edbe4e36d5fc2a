"""A rank's connections to the pools of other instances, and the batches that a transfer becomes on them.

Owns every Peer. Used by the transfer thread only; starts no thread and reports nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from blockferry.connectors import handshake
from blockferry.connectors.base import (
    Int64Array,
    Peer,
    PoolEndpoint,
    PoolLayout,
    Region,
    TransferCommand,
    TransferMode,
    TransferPart,
    Transport,
    TransportError,
)
from blockferry.connectors.layout import Runs, intersect_runs, merge_runs, overlaps, split_runs
from blockferry.connectors.transport.native_checksum import sum_runs


class Link:
    """One rank of another instance. Reconnects on use after a failure closed it."""

    def __init__(self, transport: Transport, *, local: Region, endpoint: PoolEndpoint) -> None:
        self.endpoint = endpoint
        self._transport = transport
        self._local = local
        self._peer: Peer | None = None

    @property
    def name(self) -> str:
        """How messages name the peer."""
        return handshake.describe(self.endpoint)

    def peer(self) -> Peer:
        """The open connection. Raises TransportError, naming the peer, when a new one cannot be made."""
        if self._peer is None:
            endpoint = self.endpoint
            try:
                self._peer = self._transport.connect(endpoint.address, local=self._local, remote_key=endpoint.region)
            except TransportError as error:
                raise TransportError(f"connecting to {self.name}: {error}") from error
        return self._peer

    def own_checksum(self, offsets: Int64Array, lengths: Int64Array) -> int:
        """The checksum of runs of this rank's pool, to be held against Peer.checksum()."""
        return int(sum_runs(self._local.view.ctypes.data, offsets, lengths))

    def drop(self, peer: Peer) -> None:
        """Close a connection that peer() handed out; the next peer() makes a new one."""
        peer.close()
        if self._peer is peer:
            self._peer = None

    def retire(self, peer: Peer) -> None:
        """Leave a connection open for what it holds, to whoever has it; the next peer() makes a new one."""
        if self._peer is peer:
            self._peer = None

    def close(self) -> None:
        """Close the current connection."""
        if self._peer is not None:
            self.drop(self._peer)


class Connecting:
    """Links that are coming up together. Asked again and again, so that nothing else waits for them."""

    def __init__(self, links: Mapping[str, Sequence[Link]], *, timeout_s: float) -> None:
        """`links`: by instance. Raises TransportError, with all of them closed, when one cannot even begin."""
        self.links = links
        self._timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        try:
            self._flushes = [(link, link.peer().flush()) for group in links.values() for link in group]
        except TransportError:
            self.close()
            raise

    def is_up(self) -> bool:
        """Whether every peer has answered. Raises TransportError for the first that cannot, or not in time."""
        self._flushes = [(link, flush) for link, flush in self._flushes if not flush.poll()]
        if self._flushes and time.monotonic() > self.deadline_s:
            names = ", ".join(link.name for link, _ in self._flushes)
            raise TransportError(f"connecting to {names}: no answer within {self._timeout_s:g} s")
        return not self._flushes

    def close(self) -> None:
        """Give them all up."""
        for group in self.links.values():
            for link in group:
                link.close()


PartCut = Callable[[TransferPart, PoolLayout, PoolLayout], TransferPart]  # of a part, source, destination


class LayoutPair(NamedTuple):
    """Two layouts, of this rank and of a peer, that both store some layer."""

    own: PoolLayout
    peer: PoolLayout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What this rank exchanges with one peer."""

    link: Link
    pairs: tuple[LayoutPair, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A transfer's runs to one peer, cut into batches that are posted and flushed as one."""

    local_offsets: Int64Array  # [R]
    remote_offsets: Int64Array  # [R]
    lengths: Int64Array  # [R]
    ends: Int64Array  # [num batches], run index after each batch
    last_layer_ids: tuple[int, ...]  # [num batches], the last layer that has bytes in it or in one before

    def __len__(self) -> int:
        return len(self.ends)

    def runs_of(self, batch: int) -> slice:
        """Which runs are in a batch."""
        return slice(int(self.ends[batch - 1]) if batch else 0, int(self.ends[batch]))

    def num_bytes(self, batch: int) -> int:
        """Bytes of a batch."""
        return int(self.lengths[self.runs_of(batch)].sum())

    def post(self, peer: Peer, mode: TransferMode, batch: int) -> int:
        """Post one batch; returns its bytes. Raises TransportError."""
        runs = self.runs_of(batch)
        lengths = self.lengths[runs]
        move = peer.write if mode is TransferMode.PUSH else peer.read
        move(self.local_offsets[runs], self.remote_offsets[runs], lengths)
        return self.num_bytes(batch)


def make_batches(
    command: TransferCommand,
    pairs: Sequence[LayoutPair],
    *,
    batch_bytes: int,
    num_waves: int = 1,
    cut: PartCut | None = None,
) -> Batches:
    """What `command` asks of this rank towards one peer, in num_waves waves of layers, first layers first.

    `cut` says how much of a part is moved: in_whole_blocks (None), or exactly(), what checksums need, as the source
    may yet write to the rest of its last block.
    Raises ValueError for blocks that do not fit the pools.
    """
    waves = []
    for layer_ids in _waves(pairs, num_waves):
        runs = split_runs(_runs_of(command, pairs, layer_ids, cut or in_whole_blocks), batch_bytes)
        waves.append(_Wave(runs=runs, ends=_batch_ends(runs, batch_bytes), last_layer_id=layer_ids.stop - 1))
    src = np.concatenate([wave.runs.src_offsets for wave in waves])
    dst = np.concatenate([wave.runs.dst_offsets for wave in waves])
    is_push = command.mode is TransferMode.PUSH
    num_runs_before = np.cumsum([0, *(len(wave.runs) for wave in waves[:-1])])
    return Batches(
        local_offsets=src if is_push else dst,
        remote_offsets=dst if is_push else src,
        lengths=np.concatenate([wave.runs.lengths for wave in waves]),
        ends=np.concatenate([wave.ends + before for wave, before in zip(waves, num_runs_before, strict=True)]),
        last_layer_ids=tuple(wave.last_layer_id for wave in waves for _ in wave.ends),
    )


def _runs_of(command: TransferCommand, pairs: Sequence[LayoutPair], layer_ids: range, cut: PartCut) -> Runs:
    """Everything of some layers that this rank exchanges with one peer."""
    found = []
    for part in command.parts:
        for own, peer in pairs:
            source, target = (own, peer) if command.mode is TransferMode.PUSH else (peer, own)
            if source.group == part.src_group and target.group == part.dst_group:
                moved = cut(part, source, target)
                found.append(intersect_runs(source, target, moved, layer_ids=layer_ids))
    return found[0] if len(found) == 1 else merge_runs(found)  # each is merged in itself


class _Wave(NamedTuple):
    """Runs of some layers, and where their batches end."""

    runs: Runs
    ends: Int64Array
    last_layer_id: int


def _waves(pairs: Sequence[LayoutPair], num_waves: int) -> list[range]:
    """Layer ids cut into at most num_waves ranges that hold equally many of this rank's layers."""
    layer_ids = sorted({layer_id for own, _ in pairs for layer_id in own.layer_ids})
    cuts = np.array_split(np.array(layer_ids, np.int64), max(1, min(num_waves, len(layer_ids))))
    return [range(int(cut[0]), int(cut[-1]) + 1) for cut in cuts if len(cut)] or [range(1)]


def choose_shares(own: PoolEndpoint, links: Sequence[Link], mode: TransferMode) -> list[Share]:
    """The peers that this rank exchanges bytes with, and of which layouts.

    Every byte moves once to each rank that stores it. Of ranks that hold the same (KV heads, or units of a state's
    field, replicated over tensor-parallel ranks; latents) one sends it, another one to each receiving rank so that the
    load spreads.
    """
    shares = []
    for link in links:
        pairs = tuple(pair for pair in _pairs(own, link) if _is_sent(pair, own, link.endpoint, mode))
        if pairs:
            shares.append(Share(link=link, pairs=pairs))
    return shares


def _is_sent(pair: LayoutPair, own: PoolEndpoint, peer: PoolEndpoint, mode: TransferMode) -> bool:
    """Whether the source of a pair is the copy that its target receives."""
    source, receiver = (pair.own, peer) if mode is TransferMode.PUSH else (pair.peer, own)
    return receiver.tp_rank % source.num_copies == source.copy


def _pairs(own: PoolEndpoint, link: Link) -> Iterator[LayoutPair]:
    for mine in own.layouts:
        for layout in link.endpoint.layouts:
            if overlaps(mine, layout):
                yield LayoutPair(own=mine, peer=layout)


def exactly(part: TransferPart, _src: PoolLayout, _dst: PoolLayout) -> TransferPart:
    """The part as it is."""
    return part


def in_whole_blocks(part: TransferPart, src: PoolLayout, dst: PoolLayout) -> TransferPart:
    """The part with its last block whole where both sides have it, which makes its page one run."""
    if not part.num_tokens:
        return part
    stop = part.dst_first_token + part.num_tokens
    rounded = -(-stop // dst.block_size) * dst.block_size - part.dst_first_token
    capacity = min(
        len(part.src_block_ids) * src.block_size - part.first_token,
        len(part.dst_block_ids) * dst.block_size - part.dst_first_token,
    )
    return dataclasses.replace(part, num_tokens=max(part.num_tokens, min(rounded, capacity)))


def _batch_ends(runs: Runs, batch_bytes: int) -> Int64Array:
    """Run indices after which a batch ends: as many runs as start within the same batch_bytes."""
    if not len(runs):
        return np.empty(0, np.int64)
    batch_of_run = (np.cumsum(runs.lengths) - runs.lengths) // batch_bytes
    return np.append(np.flatnonzero(np.diff(batch_of_run)) + 1, len(runs)).astype(np.int64)
