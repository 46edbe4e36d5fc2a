"""A rank's connections to the pools of other instances, and the batches that a transfer becomes on them.

Owns every Peer. Used by the transfer thread only; starts no thread and reports nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
    Transport,
    TransportError,
)
from blockferry.connectors.layout import Runs, intersect_runs, overlaps, split_runs


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

    def drop(self, peer: Peer) -> None:
        """Close a connection that peer() handed out; the next peer() makes a new one."""
        peer.close()
        if self._peer is peer:
            self._peer = None

    def close(self) -> None:
        """Close the current connection."""
        if self._peer is not None:
            self.drop(self._peer)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A transfer's runs to one peer, cut into batches that are posted and flushed as one."""

    local_offsets: Int64Array  # [R]
    remote_offsets: Int64Array  # [R]
    lengths: Int64Array  # [R]
    ends: Int64Array  # [num batches], run index after each batch

    def __len__(self) -> int:
        return len(self.ends)

    def post(self, peer: Peer, mode: TransferMode, batch: int) -> int:
        """Post one batch; returns its bytes. Raises TransportError."""
        runs = slice(int(self.ends[batch - 1]) if batch else 0, int(self.ends[batch]))
        lengths = self.lengths[runs]
        move = peer.write if mode is TransferMode.PUSH else peer.read
        move(self.local_offsets[runs], self.remote_offsets[runs], lengths)
        return int(lengths.sum())


def make_batches(command: TransferCommand, *, own: PoolLayout, peer: PoolLayout, batch_bytes: int) -> Batches:
    """What `command` asks of this rank towards one peer. Raises ValueError for blocks that do not fit the pools."""
    is_push = command.mode is TransferMode.PUSH
    src, dst = (own, peer) if is_push else (peer, own)
    runs = split_runs(
        intersect_runs(
            src,
            dst,
            src_block_ids=command.src_block_ids,
            dst_block_ids=command.dst_block_ids,
            num_tokens=_whole_blocks(command, src, dst),
            first_token=command.first_token,
        ),
        batch_bytes,
    )
    local, remote = (runs.src_offsets, runs.dst_offsets) if is_push else (runs.dst_offsets, runs.src_offsets)
    return Batches(
        local_offsets=local, remote_offsets=remote, lengths=runs.lengths, ends=_batch_ends(runs, batch_bytes)
    )


def choose_sources(own: PoolEndpoint, links: Sequence[Link], mode: TransferMode) -> list[Link]:
    """The peers that this rank exchanges bytes with.

    A pull reads each head once: of peers that hold the same slice (KV heads replicated over tensor-parallel
    ranks) one is read, another one by each reading rank so that the load spreads. A push writes to every peer.
    """
    sharing = [link for link in links if overlaps(own.layout, link.endpoint.layout)]
    if mode is TransferMode.PUSH:
        return sharing
    replicas: dict[tuple[tuple[int, ...], int, int], list[Link]] = {}
    for link in sharing:
        layout = link.endpoint.layout
        replicas.setdefault((layout.layer_ids, layout.head_start, layout.num_heads), []).append(link)
    return [group[own.tp_rank % len(group)] for group in replicas.values()]


def _whole_blocks(command: TransferCommand, src: PoolLayout, dst: PoolLayout) -> int:
    """Tokens to move: the last block whole where both sides have it, which makes its page one run."""
    if not command.num_tokens:
        return 0
    rounded = -(-command.num_tokens // dst.block_size) * dst.block_size
    capacity = min(
        len(command.src_block_ids) * src.block_size - command.first_token,
        len(command.dst_block_ids) * dst.block_size,
    )
    return max(command.num_tokens, min(rounded, capacity))


def _batch_ends(runs: Runs, batch_bytes: int) -> Int64Array:
    """Run indices after which a batch ends: as many runs as start within the same batch_bytes."""
    if not len(runs):
        return np.empty(0, np.int64)
    batch_of_run = (np.cumsum(runs.lengths) - runs.lengths) // batch_bytes
    return np.append(np.flatnonzero(np.diff(batch_of_run)) + 1, len(runs)).astype(np.int64)
