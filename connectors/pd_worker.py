"""Worker half of the P/D connector: one thread per rank that moves blocks while the model computes.

Owns the transfer thread, the rank's pool region and its links; touches no model and no request. Other threads
only put messages into its queue (start, cancel, connect, close) and wake it; it reports by the EventSink. The
same thread serves the transfers of peers, whose one-sided operations may need this side to make progress.
"""

from __future__ import annotations

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
from blockferry.connectors.compute_progress import ComputeProgress
from blockferry.connectors.pd_links import Link
from blockferry.connectors.pd_transfers import TransferLimits, Transfers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PdWorkerOptions:
    """Limits of the transfer thread."""

    limits: TransferLimits = dataclasses.field(default_factory=TransferLimits)
    connect_timeout_s: float = 20.0
    idle_wait_s: float = 1.0  # longest sleep; UCX's keep-alive needs to be called now and then
    close_timeout_s: float = 10.0


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
        *,
        progress: ComputeProgress | None = None,
    ) -> None:
        """`on_event` is called on the transfer thread and must return at once. Takes over the transport.

        `progress`: of the rank's model thread; without one, transfers that wait for a step never move.
        """
        self._transport = transport
        self._identity = own
        self._on_event = on_event
        self._options = options
        self._progress = progress or ComputeProgress()
        self._region: Region | None = None
        self._own: PoolEndpoint | None = None
        self._links: dict[str, list[Link]] = {}  # by instance
        self._messages: queue.SimpleQueue[Callable[[Transfers], None]] = queue.SimpleQueue()
        self._transfers: Transfers | None = None  # the transfer thread's
        self._is_closing = False
        self._turned_s = 0.0  # when the transfer thread last went round
        self._thread: threading.Thread | None = None

    # --- the model's thread

    def allocate(self, num_bytes: int) -> ByteArray:
        """The pool: zeroed bytes that peers can reach. Valid until close(). Call once, before endpoint()."""
        assert self._region is None, "a rank has one pool"
        self._region = self._transport.allocate(num_bytes)
        return self._region.view

    def endpoint(self, layouts: Sequence[PoolLayout]) -> bytes:
        """This rank's handshake, for connect() of every peer; from now on peers are served.

        `layouts` say where everything lies that is ferried, of all cache groups. Raises ValueError when one reaches
        beyond the pool.
        """
        assert self._region is not None, "allocate() comes first"
        assert self._thread is None, "endpoint() is called once"
        num_bytes = max((layout.num_bytes for layout in layouts), default=0)
        if num_bytes > self._region.view.nbytes:
            raise ValueError(
                f"a layout of {num_bytes} bytes does not fit the pool of {self._region.view.nbytes}; "
                "allocate layout.num_bytes"
            )
        self._own = PoolEndpoint(
            instance_id=self._identity.instance_id,
            tp_rank=self._identity.tp_rank,
            pp_rank=self._identity.pp_rank,
            model_fingerprint=self._identity.model_fingerprint,
            layouts=tuple(layouts),
            transport=self._transport.name,
            host_id=handshake.local_host_id(),
            address=self._transport.address,
            region=self._region.key,
        )
        transfers = Transfers(
            own=self._own,
            rank=self._identity.rank,
            links=self._links,
            on_event=self._on_event,
            limits=self._options.limits,
            progress=self._progress,
        )
        self._transfers = transfers
        name = f"transfer-{self._identity.instance_id}-{self._identity.rank}"
        self._thread = threading.Thread(target=self._run, args=(transfers,), name=name, daemon=True)
        self._turned_s = time.monotonic()
        self._thread.start()
        return handshake.encode_endpoint(self._own)

    def restate(self, layouts: Sequence[PoolLayout]) -> None:
        """The same layouts with the scales that all ranks agreed upon. Before connect(), by the same thread."""
        assert self._own is not None, "endpoint() comes first"
        self._own = dataclasses.replace(self._own, layouts=tuple(layouts))

    # --- any thread

    def connect(self, endpoints: Sequence[bytes]) -> None:
        """Connect to other instances, all ranks of each in one call; endpoints of the own instance are skipped.

        Returns when every connection is up; the peers must have called endpoint(). An instance that was connected
        before is replaced. Raises HandshakeRefused, TransportError.
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
        self._post(lambda _: self._connect(by_instance, done))
        try:
            done.result(self._options.connect_timeout_s + self._options.idle_wait_s)
        except TimeoutError as error:
            raise TransportError(f"the transfer thread of {self._name} does not answer") from error

    def start(self, command: TransferCommand) -> None:
        """Begin a transfer; exactly one event reports how it ended."""
        now_s = time.monotonic()
        if self._thread is not None and self._thread.is_alive():
            self._post(lambda transfers: transfers.start(command, received_s=now_s))
        else:
            self._on_event(
                TransferEvent(
                    transfer_id=command.transfer_id,
                    instance_id=self._identity.instance_id,
                    rank=self._identity.rank,
                    state=TransferState.FAILED,
                    num_bytes=0,
                    num_runs=0,
                    duration_s=0.0,
                    reason=f"start: {self._name} is closed",
                )
            )

    def cancel(self, transfer_id: int) -> None:
        """Stop a transfer: its event comes once no byte of it can land any more; again, if it has come before."""
        self._post(lambda transfers: transfers.cancel(transfer_id))

    def close(self) -> None:
        """Cancel every transfer, close the links and the transport. The pool is gone afterwards. Idempotent."""
        if self._thread is None:  # never started: no thread to do it
            self._transport.close()
            return
        self._post(self._begin_close)
        self._thread.join(self._options.close_timeout_s)
        if self._thread.is_alive():
            logger.warning("the transfer thread of %s does not end; it is left behind", self._name)

    @property
    def num_corrupted(self) -> int:
        """Batches whose checksums differed at the two ends."""
        return 0 if self._transfers is None else self._transfers.num_corrupted

    @property
    def cpu_s(self) -> float:
        """Processor time that the transfer thread has taken; endpoint() must have started it, close() not ended it."""
        assert self._thread is not None, "endpoint() comes first"
        assert self._thread.ident is not None, self._name
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    @property
    def stuck_s(self) -> float:
        """For how long the transfer thread has not gone round; up to idle_wait_s when all is well. Any thread."""
        is_running = self._thread is not None and self._thread.is_alive() and not self._is_closing
        return time.monotonic() - self._turned_s if is_running else 0.0

    @property
    def _name(self) -> str:
        return f"{self._identity.instance_id}[rank {self._identity.rank}]"

    def _post(self, message: Callable[[Transfers], None]) -> None:
        self._messages.put(message)
        self._transport.wake()

    # --- the transfer thread

    def _run(self, transfers: Transfers) -> None:
        try:
            while True:
                self._turned_s = time.monotonic()
                self._take_messages(transfers)
                if self._is_closing and not transfers:
                    return
                has_moved = self._transport.progress()
                has_moved |= transfers.advance()
                if not has_moved and self._messages.empty():
                    self._wait(transfers)
        finally:
            transfers.fail_all("the transfer thread has stopped")
            self._transport.close()  # and with it every link

    def _wait(self, transfers: Transfers) -> None:
        """Sleep until there is something to do: a message, a peer's word, a computed layer, a deadline."""
        mark = transfers.next_mark()
        self._progress.await_mark(mark, self._transport.wake)
        if mark is None or not self._progress.has_reached(mark):
            self._transport.wait(min(self._options.idle_wait_s, transfers.next_deadline_s() - time.monotonic()))

    def _take_messages(self, transfers: Transfers) -> None:
        while not self._messages.empty():
            self._messages.get_nowait()(transfers)

    def _begin_close(self, transfers: Transfers) -> None:
        self._is_closing = True
        self._links.clear()  # what starts after this fails; parts under way hold their links
        transfers.cancel_all("the worker is closing")

    def _connect(self, by_instance: dict[str, list[PoolEndpoint]], done: concurrent.futures.Future[None]) -> None:
        assert self._region is not None
        region = self._region
        links = {
            instance_id: [Link(self._transport, local=region, endpoint=peer) for peer in peers]
            for instance_id, peers in by_instance.items()
        }
        everyone = [link for group in links.values() for link in group]
        try:
            self._bring_up(everyone)
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

    def _bring_up(self, links: Sequence[Link]) -> None:
        """Wait until every connection is up. Serves peers meanwhile, or two ranks would wait for each other."""
        deadline_s = time.monotonic() + self._options.connect_timeout_s
        flushes = [(link, link.peer().flush()) for link in links]
        while flushes := [(link, flush) for link, flush in flushes if not flush.poll()]:
            if time.monotonic() > deadline_s:
                names = ", ".join(link.name for link, _ in flushes)
                raise TransportError(f"connecting to {names}: no answer within {self._options.connect_timeout_s:g} s")
            if not self._transport.progress():
                self._transport.wait(0.05)
