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
from blockferry.connectors.pd_links import Connecting, Link
from blockferry.connectors.pd_transfers import TransferLimits, Transfers

logger = logging.getLogger(__name__)

_CONNECT_POLL_S = 0.05  # how often links that are coming up are looked at, at least
_Done = concurrent.futures.Future[None]


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
    one thread; start(), cancel(), connect(), disconnect(), reset() and close() may be called from any.
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
        self._connecting: list[tuple[Connecting, _Done]] = []
        self._resets: list[_Done] = []  # that wait until all transfers are settled
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
        done: _Done = _Done()
        self._post(lambda _: self._connect(by_instance, done))
        self._await(done, self._options.connect_timeout_s + self._options.idle_wait_s)

    def disconnect(self, instance_id: str) -> None:
        """Drop the connections to an instance that has left; transfers with it fail. Unknown: no-op."""
        self._post(lambda _: self._disconnect(instance_id))

    def reset(self, *, timeout_s: float) -> None:
        """Cancel every transfer, wait until no byte of any can land, and forget them: numbers may come again.

        For another scheduler; connections stay. Raises TransportError when that takes longer than timeout_s.
        """
        done: _Done = _Done()
        self._post(lambda transfers: self._begin_reset(transfers, done))
        try:
            done.result(timeout_s)
        except TimeoutError as error:
            raise TransportError(f"transfers of {self._name} have not quiesced within {timeout_s:g} s") from error

    def _await(self, done: _Done, timeout_s: float) -> None:
        try:
            done.result(timeout_s)
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
                has_moved |= self._advance_connecting()
                has_moved |= self._advance_resets(transfers)
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
            is_waited_for = bool(self._connecting or self._resets)
            limit_s = _CONNECT_POLL_S if is_waited_for else self._options.idle_wait_s
            self._transport.wait(min(limit_s, transfers.next_deadline_s() - time.monotonic()))

    def _take_messages(self, transfers: Transfers) -> None:
        while not self._messages.empty():
            self._messages.get_nowait()(transfers)

    def _begin_close(self, transfers: Transfers) -> None:
        self._is_closing = True
        self._links.clear()  # what starts after this fails; parts under way hold their links
        transfers.cancel_all("the worker is closing")

    def _connect(self, by_instance: dict[str, list[PoolEndpoint]], done: _Done) -> None:
        assert self._region is not None
        region = self._region
        links = {
            instance_id: [Link(self._transport, local=region, endpoint=peer) for peer in peers]
            for instance_id, peers in by_instance.items()
        }
        try:
            self._connecting.append((Connecting(links, timeout_s=self._options.connect_timeout_s), done))
        except TransportError as error:
            done.set_exception(error)

    def _advance_connecting(self) -> bool:
        """Take in links that are up; True when any are, or are given up. Transfers go on meanwhile, and peers' too."""
        before, self._connecting = self._connecting, []
        for connecting, done in before:
            try:
                if not connecting.is_up():
                    self._connecting.append((connecting, done))
                    continue
            except TransportError as error:
                connecting.close()
                done.set_exception(error)
                continue
            for instance_id, group in connecting.links.items():
                self._disconnect(instance_id)
                self._links[instance_id] = list(group)
            done.set_result(None)
        return len(self._connecting) < len(before)

    def _disconnect(self, instance_id: str) -> None:
        for link in self._links.pop(instance_id, ()):
            link.close()

    def _begin_reset(self, transfers: Transfers, done: _Done) -> None:
        transfers.cancel_all("another scheduler takes over")
        self._resets.append(done)

    def _advance_resets(self, transfers: Transfers) -> bool:
        if not self._resets or not transfers.are_settled:
            return False
        transfers.forget()
        for done in self._resets:
            done.set_result(None)
        self._resets.clear()
        return True
