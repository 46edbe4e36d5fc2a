"""Worker half of the P/D connector: one thread per rank that moves blocks while the model computes.

Owns the transfer thread, the rank's pool region and its links; touches no model and no request. Other threads
only put messages into its queue (start, cancel, connect, close) and wake it; it reports by the EventSink.

    start() -> POSTING ------- all batches landed -----------------------------> DONE
                  | cancel()                    -> QUIESCING -- flushed -------> CANCELLED
                  | error, deadline, bad blocks -> QUIESCING -- flushed or ----> FAILED
                                                   link closed after quiesce_timeout_s

A transfer is cut into batches of batch_bytes, of which num_batches_in_flight are posted and not yet flushed per
peer, so that memory, cancellation and other transfers never wait for more than that.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from blockferry.connectors import handshake
from blockferry.connectors.base import (
    ByteArray,
    EventSink,
    Flush,
    Peer,
    PoolEndpoint,
    PoolLayout,
    RankIdentity,
    Region,
    TransferCommand,
    TransferEvent,
    TransferState,
    Transport,
    TransportError,
)
from blockferry.connectors.pd_links import Batches, Link, choose_sources, make_batches

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PdWorkerOptions:
    """Limits of the transfer thread."""

    batch_bytes: int = 8 << 20
    num_batches_in_flight: int = 2
    connect_timeout_s: float = 20.0
    quiesce_timeout_s: float = 2.0  # after a deadline: how long to wait for what was posted before the link is closed
    idle_wait_s: float = 1.0  # longest sleep; UCX's keep-alive needs to be called now and then


@dataclasses.dataclass(slots=True, kw_only=True)
class _Part:
    """One peer's share of a transfer. Mutated by the transfer thread."""

    link: Link
    peer: Peer
    batches: Batches
    num_posted: int = 0  # batches
    flushes: collections.deque[Flush] = dataclasses.field(default_factory=collections.deque)

    @property
    def is_done(self) -> bool:
        return self.num_posted == len(self.batches) and not self.flushes


@dataclasses.dataclass(slots=True, kw_only=True)
class _Transfer:
    """A transfer under way. Mutated by the transfer thread."""

    command: TransferCommand
    started_s: float
    parts: list[_Part]
    num_bytes: int = 0
    ending: TransferState | None = None  # quiescing, to be reported as this
    reason: str = ""
    quiesce_deadline_s: float = 0.0

    @property
    def deadline_s(self) -> float:
        return self.quiesce_deadline_s if self.ending else self.started_s + self.command.deadline_s


class PdWorker:
    """A rank's end of every transfer that its instance executes, and the server of those of its peers.

    allocate() -> endpoint() -> connect() -> start()/cancel() ... -> close(). allocate() and endpoint() belong to
    one thread; start(), cancel(), connect() and close() may be called from any.
    """

    def __init__(
        self,
        transport: Transport,
        own: RankIdentity,
        on_event: EventSink,
        options: PdWorkerOptions = PdWorkerOptions(),
    ) -> None:
        """`on_event` is called on the transfer thread and must return at once. Takes over the transport."""
        self._transport = transport
        self._identity = own
        self._on_event = on_event
        self._options = options
        self._region: Region | None = None
        self._own: PoolEndpoint | None = None
        self._links: dict[str, list[Link]] = {}  # by instance
        self._transfers: dict[int, _Transfer] = {}
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"transfer-{own.instance_id}-{own.rank}", daemon=True)

    # --- the model's thread

    def allocate(self, num_bytes: int) -> ByteArray:
        """The pool: zeroed bytes that peers can reach. Valid until close(). Call once, before endpoint()."""
        assert self._region is None, "a rank has one pool"
        self._region = self._transport.allocate(num_bytes)
        return self._region.view

    def endpoint(self, layout: PoolLayout) -> bytes:
        """This rank's handshake, for connect() of every peer; from now on peers are served.

        Raises ValueError when the layout is larger than the pool.
        """
        assert self._region is not None, "allocate() comes first"
        if layout.num_bytes > self._region.view.nbytes:
            raise ValueError(
                f"a layout of {layout.num_bytes} bytes does not fit the pool of {self._region.view.nbytes}; "
                "allocate layout.num_bytes"
            )
        self._own = PoolEndpoint(
            instance_id=self._identity.instance_id,
            tp_rank=self._identity.tp_rank,
            pp_rank=self._identity.pp_rank,
            model_fingerprint=self._identity.model_fingerprint,
            layout=layout,
            transport=self._transport.name,
            host_id=handshake.local_host_id(),
            address=self._transport.address,
            region=self._region.key,
        )
        self._thread.start()
        return handshake.encode_endpoint(self._own)

    # --- any thread

    def connect(self, endpoints: Sequence[bytes]) -> None:
        """Connect to other instances, all ranks of each in one call; endpoints of the own instance are skipped.

        Returns when every connection is up; the peers must have called endpoint(). Raises HandshakeRefused,
        TransportError.
        """
        assert self._own is not None, "endpoint() comes first"
        by_instance: dict[str, list[PoolEndpoint]] = {}
        for data in endpoints:
            peer = handshake.decode_endpoint(data)
            if peer.instance_id != self._own.instance_id:
                handshake.check_compatible(self._own, peer)
                by_instance.setdefault(peer.instance_id, []).append(peer)
        for peers in by_instance.values():
            handshake.check_coverage(self._own, peers)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._post(lambda: self._connect(by_instance, done))
        try:
            done.result(self._options.connect_timeout_s + 1.0)
        except TimeoutError as error:
            raise TransportError(f"the transfer thread of {self._name} does not answer") from error

    def start(self, command: TransferCommand) -> None:
        """Begin a transfer; exactly one event reports how it ended."""
        now_s = time.monotonic()
        if self._thread.is_alive():
            self._post(lambda: self._start(command, now_s))
        else:
            self._report(
                _Transfer(command=command, started_s=now_s, parts=[]),
                TransferState.FAILED,
                "start: the worker is closed",
            )

    def cancel(self, transfer_id: int) -> None:
        """Stop a transfer: its event comes once no byte of it can land any more. Unknown ids are ignored."""
        self._post(lambda: self._cancel(transfer_id))

    def close(self) -> None:
        """Cancel every transfer, close the links and the transport. The pool is gone afterwards. Idempotent."""
        if self._thread.ident is None:  # never started: no thread to do it
            self._transport.close()
            return
        self._post(self._begin_close)
        self._thread.join(2 * self._options.quiesce_timeout_s + 5.0)
        if self._thread.is_alive():
            logger.warning("the transfer thread of %s does not end; it is left behind", self._name)

    @property
    def _name(self) -> str:
        return f"{self._identity.instance_id}[rank {self._identity.rank}]"

    def _post(self, message: Callable[[], None]) -> None:
        self._messages.put(message)
        self._transport.wake()

    # --- the transfer thread

    def _run(self) -> None:
        try:
            while True:
                self._take_messages()
                if self._is_closing and not self._transfers:
                    break
                has_moved = self._transport.progress()
                for transfer in list(self._transfers.values()):
                    has_moved |= self._advance(transfer)
                if not has_moved and self._messages.empty():
                    self._transport.wait(self._wait_s())
        finally:
            for transfer in list(self._transfers.values()):
                self._report(transfer, TransferState.FAILED, "the transfer thread has stopped")
            for links in self._links.values():
                for link in links:
                    link.close()
            self._transport.close()

    def _take_messages(self) -> None:
        while not self._messages.empty():
            self._messages.get_nowait()()

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        deadlines = (transfer.deadline_s - now_s for transfer in self._transfers.values())
        return max(0.0, min(self._options.idle_wait_s, *deadlines, self._options.idle_wait_s))

    def _begin_close(self) -> None:
        self._is_closing = True
        for transfer in self._transfers.values():
            self._end(transfer, TransferState.CANCELLED, "the worker is closing")

    def _connect(self, by_instance: dict[str, list[PoolEndpoint]], done: concurrent.futures.Future[None]) -> None:
        assert self._region is not None
        region = self._region
        links = {
            instance_id: [Link(self._transport, local=region, endpoint=peer) for peer in peers]
            for instance_id, peers in by_instance.items()
        }
        everyone = [link for group in links.values() for link in group]
        try:
            self._flush_all(everyone)
        except TransportError as error:
            for link in everyone:
                link.close()
            done.set_exception(error)
            return
        for instance_id, group in links.items():
            for old in self._links.get(instance_id, ()):
                old.close()
            self._links[instance_id] = group
        done.set_result(None)

    def _flush_all(self, links: Sequence[Link]) -> None:
        """Wait until every connection is up. Serves peers meanwhile, or two ranks would wait for each other."""
        deadline_s = time.monotonic() + self._options.connect_timeout_s
        flushes = [(link, link.peer().flush()) for link in links]
        while flushes:
            flushes = [(link, flush) for link, flush in flushes if not flush.poll()]
            if flushes and time.monotonic() > deadline_s:
                names = ", ".join(link.name for link, _ in flushes)
                raise TransportError(f"connecting to {names}: no answer within {self._options.connect_timeout_s:g} s")
            if flushes and not self._transport.progress():
                self._transport.wait(0.05)

    def _start(self, command: TransferCommand, now_s: float) -> None:
        transfer = _Transfer(command=command, started_s=now_s, parts=[])
        if command.transfer_id in self._transfers:
            logger.warning("transfer %d is already under way; the second command is dropped", command.transfer_id)
            return
        self._transfers[command.transfer_id] = transfer
        try:
            transfer.parts = self._make_parts(command)
        except (ValueError, TransportError) as error:
            self._end(transfer, TransferState.FAILED, f"start with {command.peer_instance_id}: {error}")

    def _make_parts(self, command: TransferCommand) -> list[_Part]:
        assert self._own is not None
        if self._is_closing:
            raise TransportError("the worker is closing")
        if command.executing_instance_id != self._own.instance_id:
            raise ValueError(f"{command.mode} is executed by {command.executing_instance_id}, not by {self._name}")
        links = self._links.get(command.peer_instance_id)
        if links is None:
            raise TransportError(f"{self._name} is not connected to it; connect() comes first")
        chosen = choose_sources(self._own, links, command.mode)
        batch_bytes = self._options.batch_bytes
        return [
            _Part(
                link=link,
                peer=link.peer(),
                batches=make_batches(command, own=self._own.layout, peer=link.endpoint.layout, batch_bytes=batch_bytes),
            )
            for link in chosen
        ]

    def _cancel(self, transfer_id: int) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._end(transfer, TransferState.CANCELLED, "cancelled")

    def _advance(self, transfer: _Transfer) -> bool:
        """Reap and post what is possible without waiting; True when anything moved."""
        has_moved = False
        for part in transfer.parts:
            try:
                has_moved |= self._reap(part)
                if transfer.ending is None:
                    has_moved |= self._post_batch(transfer, part)
            except TransportError as error:
                self._drop(part)
                self._end(transfer, TransferState.FAILED, f"{transfer.command.mode} with {part.link.name}: {error}")
                has_moved = True
        return self._finish(transfer) or has_moved

    def _finish(self, transfer: _Transfer) -> bool:
        """Report what has ended, end what is late; True when it did either."""
        if transfer.ending is None and all(part.is_done for part in transfer.parts):
            self._report(transfer, TransferState.DONE, "")
        elif transfer.ending is not None and not any(part.flushes for part in transfer.parts):
            self._report(transfer, transfer.ending, transfer.reason)
        elif time.monotonic() >= transfer.deadline_s:
            self._expire(transfer)
        else:
            return False
        return True

    def _reap(self, part: _Part) -> bool:
        has_moved = False
        while part.flushes and part.flushes[0].poll():
            part.flushes.popleft()
            has_moved = True
        return has_moved

    def _post_batch(self, transfer: _Transfer, part: _Part) -> bool:
        if part.num_posted == len(part.batches) or len(part.flushes) >= self._options.num_batches_in_flight:
            return False
        transfer.num_bytes += part.batches.post(part.peer, transfer.command.mode, part.num_posted)
        part.num_posted += 1
        part.flushes.append(part.peer.flush())
        return True

    def _expire(self, transfer: _Transfer) -> None:
        if transfer.ending is None:
            limit_s = transfer.command.deadline_s
            late = ", ".join(part.link.name for part in transfer.parts if not part.is_done)
            self._end(
                transfer, TransferState.FAILED, f"{transfer.command.mode} with {late}: not done within {limit_s:g} s"
            )
            return
        for part in transfer.parts:  # posted operations do not end: drop the connections that hold them
            if part.flushes:
                transfer.reason += f"; connection to {part.link.name} dropped, it did not quiesce"
                self._drop(part)
        self._report(transfer, TransferState.FAILED, transfer.reason)

    def _drop(self, part: _Part) -> None:
        """Close a connection that failed; other transfers over it fail at their next poll."""
        part.flushes.clear()
        part.link.drop(part.peer)

    def _end(self, transfer: _Transfer, state: TransferState, reason: str) -> None:
        """Post no more; report once what was posted has landed or its link is closed."""
        if transfer.ending is None:
            transfer.ending, transfer.reason = state, reason
            transfer.quiesce_deadline_s = time.monotonic() + self._options.quiesce_timeout_s

    def _report(self, transfer: _Transfer, state: TransferState, reason: str) -> None:
        self._transfers.pop(transfer.command.transfer_id, None)
        if state is TransferState.FAILED:
            logger.warning("transfer %d on %s failed: %s", transfer.command.transfer_id, self._name, reason)
        self._on_event(
            TransferEvent(
                transfer_id=transfer.command.transfer_id,
                instance_id=self._identity.instance_id,
                rank=self._identity.rank,
                state=state,
                num_bytes=transfer.num_bytes,
                num_runs=sum(len(part.batches.lengths) for part in transfer.parts),
                duration_s=time.monotonic() - transfer.started_s,
                reason=reason,
            )
        )
