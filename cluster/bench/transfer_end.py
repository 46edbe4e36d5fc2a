"""One rank's end of `bench transfer`: a pool behind a real PdWorker that can be filled, checked and measured.

Answers verbs, one at a time, in whatever process it was put: a child of the benchmark or a Ray actor. Owns the
pool, the transport and the plain sockets; starts no process.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blockferry.cluster.bench.plain_socket import Receipt, Sending, Timed, send, wait_until
from blockferry.cluster.bench.transfer_pools import Blocks, Grid, PoolContent
from blockferry.cluster.interfaces import address_of, ucx_devices
from blockferry.connectors import handshake
from blockferry.connectors.base import (
    PoolLayout,
    RankIdentity,
    TransferCommand,
    TransferEvent,
    TransferPart,
    TransferState,
    TransportError,
)
from blockferry.connectors.layout import Runs, intersect_runs, merge_runs
from blockferry.connectors.pd_worker import PdWorker
from blockferry.connectors.transport.native_loops import copy_runs
from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport

SRC, DST = "src", "dst"  # instance ids
_EVENT_PATIENCE_S = 30.0  # beyond a transfer's own deadline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What an end is to be."""

    instance_id: str  # SRC or DST
    rank: int
    options: UcxOptions
    layout: PoolLayout
    peers: tuple[PoolLayout, ...]  # of the other side's ranks
    grid: Grid

    @property
    def identity(self) -> RankIdentity:
        """As its PdWorker has it."""
        return RankIdentity(
            instance_id=self.instance_id, rank=self.rank, tp_rank=self.rank, pp_rank=0, model_fingerprint="bench"
        )


class End:
    """One pool and its PdWorker; made anew for every path and shape."""

    def __init__(self, opening: Opening, host: str) -> None:
        self._opening = opening
        self._host = address_of(opening.options.net_device) or host
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        options = dataclasses.replace(opening.options, net_device=opening.options.net_device or ucx_devices(host))
        self._worker = PdWorker(UcxTransport(options), opening.identity, self._events.put)
        self._pool = self._worker.allocate(opening.layout.num_bytes)
        self.endpoint = self._worker.endpoint((opening.layout,))
        self._content = PoolContent(self._pool, opening.layout, opening.grid)
        # what ceilings copy into, its memory touched
        self._spare = np.ones(max(one.num_bytes for one in (opening.layout, *opening.peers)), np.uint8)
        self._receipt: Receipt | None = None

    def connect(self, endpoints: Sequence[bytes]) -> None:
        """Connect to every rank of the other side."""
        self._worker.connect(endpoints)

    def fill(self, seed: int) -> None:
        """Put this rank's share of a seed's content into the pool."""
        self._content.fill(seed)

    def clear(self) -> None:
        """Put zeros into the pool."""
        self._pool[:] = 0

    def is_right(self, seed: int, blocks: Blocks) -> bool:
        """Whether the pool holds the seed's content as a transfer of `blocks` should have left it."""
        return self._content.is_right(seed, blocks)

    def cpu_s(self) -> float:
        """Processor time of the transfer thread so far."""
        return self._worker.cpu_s

    def ferry(self, command: TransferCommand, at_s: float) -> Timed:
        """Execute a transfer. Raises TransportError when it did not end well."""
        cpu_s = self._worker.cpu_s
        started_s = wait_until(at_s)
        self._worker.start(command)
        event = self._events.get(timeout=command.deadline_s + _EVENT_PATIENCE_S)
        ended_s = time.monotonic()
        if event.state is not TransferState.DONE:
            raise TransportError(f"transfer {event.transfer_id} {event.state}: {event.reason}")
        return Timed(num_bytes=event.num_bytes, started_s=started_s, ended_s=ended_s, cpu_s=self._worker.cpu_s - cpu_s)

    def copy(self, part: TransferPart, at_s: float) -> Timed:
        """Copy this rank's runs of a transfer within this process: what memory allows."""
        runs = self._runs(part)
        mine, theirs = runs.src_offsets, runs.dst_offsets
        if self._opening.instance_id == DST:
            mine, theirs = theirs, mine
        started_s = wait_until(at_s)
        copy_runs(self._spare.ctypes.data, self._pool.ctypes.data, theirs, mine, runs.lengths)
        return Timed(num_bytes=runs.num_bytes, started_s=started_s, ended_s=time.monotonic())

    def listen(self) -> tuple[str, int]:
        """Open a plain socket for one stream; returns its address."""
        self._receipt = Receipt(self._host)
        return self._receipt.address

    def receive(self, num_bytes: int, sending: Sending) -> None:
        """Take the stream that listen() promised."""
        assert self._receipt is not None, "listen() comes first"
        self._receipt.receive(self._spare[:num_bytes], sending)
        self._receipt = None

    def send(self, address: tuple[str, int], part: TransferPart, sending: Sending, at_s: float) -> Timed:
        """Send this rank's runs of a transfer, or as many bytes in one go, to a peer that listens."""
        runs = self._runs(part)
        if sending is Sending.CONTIGUOUS:
            return send(address, [self._pool[: runs.num_bytes]], sending, at_s=at_s)
        pieces = [
            self._pool[offset : offset + length]
            for offset, length in zip(runs.src_offsets.tolist(), runs.lengths.tolist(), strict=True)
        ]
        return send(address, pieces, sending, at_s=at_s)

    def count_bytes(self, part: TransferPart) -> int:
        """Bytes that this rank has of a transfer."""
        return self._runs(part).num_bytes

    def close(self) -> None:
        """End the worker; the pool is gone."""
        del self._pool, self._content
        self._worker.close()

    def _runs(self, part: TransferPart) -> Runs:
        """Everything that this rank exchanges in a transfer."""
        own = self._opening.layout
        if self._opening.instance_id == SRC:
            return merge_runs([intersect_runs(own, peer, part) for peer in self._opening.peers])
        return merge_runs([intersect_runs(peer, own, part) for peer in self._opening.peers])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A new end: its number for later verbs, and what peers need to connect."""

    number: int
    endpoint: bytes


class EndServer:
    """A process's part in the benchmark: makes ends and calls them by verb."""

    def __init__(self, host: str) -> None:
        """`host` is the address on which plain sockets listen."""
        self._host = host
        self._ends: dict[int, End] = {}
        self._next_number = 1

    def answer(self, verb: str, arguments: Sequence[Any]) -> Any:
        """Do what a verb says and return its result: "open" with an Opening, an end's verb with its number first."""
        if verb in _OF_PROCESS:
            return _OF_PROCESS[verb]()
        first, *rest = arguments
        if verb == "open":
            return self._open(first)
        end = self._ends.pop(first) if verb == "close" else self._ends[first]
        return _OF_END[verb](end, *rest)

    def _open(self, opening: Opening) -> Opened:
        number, self._next_number = self._next_number, self._next_number + 1
        end = self._ends[number] = End(opening, self._host)
        return Opened(number=number, endpoint=end.endpoint)


_OF_PROCESS: Mapping[str, Callable[[], Any]] = {"clock": time.monotonic, "host_id": handshake.local_host_id}
_OF_END: Mapping[str, Callable[..., Any]] = {
    method.__name__: method
    for method in (
        End.connect,
        End.fill,
        End.clear,
        End.is_right,
        End.cpu_s,
        End.ferry,
        End.copy,
        End.listen,
        End.receive,
        End.send,
        End.count_bytes,
        End.close,
    )
}
