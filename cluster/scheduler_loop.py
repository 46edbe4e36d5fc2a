"""The scheduler's event loop: ZeroMQ messages in, CentralScheduler calls, plans and outputs out.

Owns both sockets and every call into CentralScheduler; all of it happens in the one thread that calls run().
Other threads may call stop(), report_failure(), report_gone() and read `snapshot`. Knows nothing of Ray: whoever
gives it `end_instance` ends the processes of an instance that was given up, so that a frozen or half-dead one does
nothing more when it wakes.

    one pass:  wait (socket, mailbox or tick) -> take messages -> tick -> plan -> ferry -> deliver
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from blockferry.cluster import messages
from blockferry.cluster.client_table import ClientTable
from blockferry.cluster.health import HealthBoard, TransferTotals
from blockferry.cluster.messages import Frames, Rejection, RejectionKind, Tag, WorkerId
from blockferry.cluster.refusals import Refusals
from blockferry.cluster.router import Candidate, Policy, has_route, prefix_affinity
from blockferry.cluster.sockets import Binding, bind_router, send
from blockferry.cluster.wakeup import Mailbox
from blockferry.engine import wire
from blockferry.engine.config import Role
from blockferry.engine.errors import LedgerCorrupted, QueueFull
from blockferry.engine.request import Request
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.outputs import StepOutput
from blockferry.engine.wire import StepResult

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_PASS = 1024  # then plans go out even if more are waiting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopTiming:
    """Intervals of the loop, in seconds."""

    tick_s: float = 0.05
    beat_s: float = 1.0  # to clients
    silence_limit_s: float = 10.0  # of a worker, before its instance is declared failed
    audit_idle_s: float = 1.0  # the ledgers are checked after so long without a request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance that the loop drives."""

    instance_id: str
    role: Role
    num_ranks: int


class SchedulerLoop:
    """Drives one CentralScheduler until stop(). Closes what it opened."""

    def __init__(
        self,
        central: CentralScheduler,
        members: Sequence[Member],
        *,
        binding: Binding,
        timing: LoopTiming = LoopTiming(),
        choose_route: Policy = prefix_affinity,
        end_instance: Callable[[str], None] = lambda _instance_id: None,
    ) -> None:
        """Bind both sockets. Raises zmq.ZMQError when that fails.

        `end_instance` is called once for each instance that is given up, must return at once and may lead to
        report_gone().
        """
        self._central = central
        self._members = {member.instance_id: member for member in members}
        self._timing = timing
        self._choose_route = choose_route
        self._end_instance = end_instance
        self._clock = time.monotonic
        self._clients = ClientTable()
        self._health = HealthBoard(
            {member.instance_id: member.num_ranks for member in members}, silence_limit_s=timing.silence_limit_s
        )
        self._present: set[bytes] = set()  # identities that have said hello
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()  # calls from other threads
        self._stop_reason: str | None = None
        self._started_s = self._clock()
        self._next_tick_s = self._next_beat_s = self._busy_until_s = self._started_s
        self._audited = False
        self._num_audits = 0
        self._context = zmq.Context()
        workers, clients = (bind_router(self._context, binding) for _ in range(2))
        self._workers, self.worker_endpoints = workers.socket, workers.endpoints
        self._client_socket, self.client_endpoints = clients.socket, clients.endpoints
        self._poller = zmq.Poller()
        self._refusals = Refusals([self._workers, self._client_socket])
        for source in (self._workers, self._client_socket, self._mailbox.fd, *self._refusals.monitors):
            self._poller.register(source, zmq.POLLIN)
        self._transfers = TransferTotals()
        self.snapshot: dict[str, Any] = {}  # replaced as a whole at every beat; read it from any thread
        self._handlers: dict[Tag, Callable[[bytes, bytes], None]] = {
            Tag.HELLO: self._on_client_hello,
            Tag.REQUEST: self._on_request,
            Tag.ABORT: self._on_abort,
            Tag.STATUS: self._on_status,
        }

    def stop(self, reason: str) -> None:
        """End run() soon. Any thread."""
        self._mailbox.put(lambda: self._note_stop(reason))

    def report_failure(self, instance_id: str, reason: str) -> None:
        """An instance's process was seen dead. Any thread."""
        self._mailbox.put(lambda: self._fail(instance_id, reason))

    def report_gone(self, instance_id: str) -> None:
        """No process of a failed instance is left. Any thread."""
        self._mailbox.put(lambda: self._central.instance_gone(instance_id))

    @property
    def is_complete(self) -> bool:
        """Whether every rank has connected. Any thread."""
        return self._health.is_complete

    def run(self) -> str:
        """Serve until stop(), then tell everybody; returns the reason. Raises what broke it, after telling clients."""
        reason = "the scheduler failed"
        try:
            while self._stop_reason is None:
                self._pass()
            reason = self._stop_reason
            return reason
        except Exception as error:
            reason = f"the scheduler failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._say_goodbye(reason)
            self._context.destroy(linger=200)
            self._mailbox.close()

    def _pass(self) -> None:
        now_s = self._clock()
        timeout_ms = max(0, int((self._next_tick_s - now_s) * 1000) + 1)
        ready = dict(self._poller.poll(timeout_ms))
        if self._workers in ready:
            self._drain(self._workers, self._on_worker)
        if self._client_socket in ready:
            self._drain(self._client_socket, self._on_client)
        if self._mailbox.fd in ready:
            self._read_mailbox()
        if any(monitor in ready for monitor in self._refusals.monitors):
            self._refusals.read()
        now_s = self._clock()
        if now_s >= self._next_tick_s:
            self._tick(now_s)
        self._plan()
        self._ferry()
        self._deliver()

    def _drain(self, socket: zmq.Socket[bytes], handle: Callable[[bytes, Tag, bytes], None]) -> None:
        for _ in range(MAX_MESSAGES_PER_PASS):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                tag, payload = messages.split(frames[1:])
            except ValueError as error:
                logger.warning("dropped a message of %r: %s", frames[0], error)
                continue
            handle(frames[0], tag, payload)

    # --- workers

    def _on_worker(self, identity: bytes, tag: Tag, payload: bytes) -> None:
        try:
            worker = WorkerId.from_bytes(identity)
        except ValueError:
            logger.warning("dropped a message of %r, which is no worker", identity)
            return
        if worker.instance_id not in self._members:
            return
        try:
            value = messages.worker_value(tag, payload)
        except ValueError as error:  # what it said is lost, and its instance would wait for it
            self._fail(worker.instance_id, f"rank {worker.rank} sent a {tag.name} that cannot be read: {error}")
            return
        self._take(worker, tag, value)

    def _take(self, worker: WorkerId, tag: Tag, value: Any) -> None:
        if tag is Tag.HELLO:
            self._present.add(worker.to_bytes())
        other = messages.Channel.STEPS if worker.channel is messages.Channel.CONTROL else messages.Channel.CONTROL
        is_sign = tag is Tag.HELLO or worker.channel is messages.Channel.CONTROL  # steps go on where cancels do not
        if is_sign and dataclasses.replace(worker, channel=other).to_bytes() in self._present:
            # both connections stand, so that the rank can be sent work
            self._health.beat(worker.instance_id, worker.rank, now_s=self._clock())
        if tag is Tag.HELLO:
            self._refresh_snapshot()  # whoever asks once the last rank is here must see it healthy
        elif tag is Tag.RESULT:
            self._on_result(worker, value)
        elif tag is Tag.EVENT:
            self._transfers.count(value)
            self._absorb(self._central.on_transfer(value))
        elif tag is Tag.COPIED:
            self._absorb(self._central.on_copy(value))
        elif tag is Tag.TROUBLE:
            self._fail(worker.instance_id, f"rank {worker.rank}: {value}")

    def _on_result(self, worker: WorkerId, result: StepResult) -> None:
        if not self._health.is_alive(worker.instance_id):
            return  # its requests have been failed already
        if result.error:
            self._fail(worker.instance_id, f"rank {worker.rank}, step {result.step_id}: {result.error}")
        else:
            self._absorb(self._central.commit(worker.instance_id, result))

    def _fail(self, instance_id: str, reason: str) -> None:
        if self._health.fail(instance_id, reason):
            logger.error("instance %s failed: %s", instance_id, reason)
            self._absorb(self._central.fail_instance(instance_id, reason))
            self._end_instance(instance_id)
            self._refresh_snapshot()

    # --- clients

    def _on_client(self, identity: bytes, tag: Tag, payload: bytes) -> None:
        handler = self._handlers.get(tag)
        if handler is None:
            logger.warning("dropped a %s message of a client", tag.name)
            return
        self._clients.greet(identity)
        try:
            handler(identity, payload)
        except ValueError as error:
            logger.warning("dropped a %s message of a client: %s", tag.name, error)

    def _on_client_hello(self, identity: bytes, _payload: bytes) -> None:
        self._to_client(identity, messages.encode(Tag.WELCOME, {}))

    def _on_request(self, identity: bytes, payload: bytes) -> None:
        request = messages.request_from(payload)
        rejection = self._try_add(identity, request)
        if rejection is not None:
            self._to_client(identity, messages.encode(Tag.REJECTED, rejection))

    def _try_add(self, identity: bytes, request: Request) -> Rejection | None:
        """Queue a request; why not, when it cannot be."""

        def because(kind: RejectionKind, reason: str) -> Rejection:
            return Rejection(handle=request.handle, request_id=request.request_id, kind=kind, reason=reason)

        newcomer = self._central.meet(request)
        route = self._choose_route(self._candidates(), newcomer)
        if route is None:
            reason = self._health.reason or "the deployment is still starting; try again in a moment"
            return because(RejectionKind.NO_INSTANCE, reason)
        handle: int | None = None
        try:
            handle = self._clients.open(identity, request.handle, route)
            named = dataclasses.replace(request, handle=handle, arrival_s=self._clock())
            self._central.add(named, route, newcomer)
        except ValueError as error:  # RequestRejected is one
            if handle is not None:
                self._clients.close(handle)
            kind = RejectionKind.QUEUE_FULL if isinstance(error, QueueFull) else RejectionKind.NEVER_FITS
            return because(kind, str(error))
        return None

    def _candidates(self) -> list[Candidate]:
        candidates = []
        for member in self._members.values():
            if self._health.is_alive(member.instance_id):
                load = self._central.load(member.instance_id)
                candidates.append(
                    Candidate(
                        instance_id=member.instance_id,
                        role=member.role,
                        num_queued_tokens=load.num_queued_tokens,
                        num_missing_tokens=load.num_missing_tokens,
                        num_assigned=self._clients.num_assigned(member.instance_id),
                        num_free_blocks=load.num_free_blocks,
                        cache_fill=min(1.0, load.num_cached_keys / load.num_usable_blocks),
                    )
                )
        return candidates

    def _on_abort(self, identity: bytes, payload: bytes) -> None:
        handle = self._clients.find(identity, wire.decode(int, payload))
        if handle is not None:
            self._absorb(self._central.abort(handle))

    def _on_status(self, identity: bytes, payload: bytes) -> None:
        self._refresh_snapshot()
        reply = messages.StatusReply(query=wire.decode(int, payload), status=self.snapshot)
        self._to_client(identity, messages.encode(Tag.STATUS_REPLY, reply))

    def _to_client(self, identity: bytes, frames: Frames) -> None:
        if not send(self._client_socket, identity, frames):
            for handle in self._clients.leave(identity):
                self._absorb(self._central.abort(handle))

    # --- every pass

    def _read_mailbox(self) -> None:
        for call in self._mailbox.take():
            call()

    def _note_stop(self, reason: str) -> None:
        self._stop_reason = reason

    def _tick(self, now_s: float) -> None:
        self._next_tick_s = now_s + self._timing.tick_s
        self._absorb(self._central.tick())
        for instance_id, reason in self._health.silent(now_s=now_s):
            self._fail(instance_id, reason)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._timing.beat_s
            self._refresh_snapshot()
            for client in self._clients.clients:
                self._to_client(client, messages.encode(Tag.BEAT, {}))
        self._audit_when_idle(now_s)

    def _audit_when_idle(self, now_s: float) -> None:
        if self._central.num_unfinished:
            self._busy_until_s, self._audited = now_s, False
        elif not self._audited and now_s - self._busy_until_s >= self._timing.audit_idle_s:
            self._audited = True
            try:
                self._central.check_integrity()
            except LedgerCorrupted:
                logger.exception("the ledger is corrupt")
                raise
            self._num_audits += 1

    def _plan(self) -> None:
        for member in self._members.values():
            while self._health.is_alive(member.instance_id):
                plan = self._central.plan(member.instance_id)
                if plan is None:
                    break
                self._to_ranks(member, messages.Channel.STEPS, messages.encode(Tag.PLAN, plan))

    def _ferry(self) -> None:
        for instance_id, command in self._central.take_transfers():
            member = self._members[instance_id]
            self._to_ranks(member, messages.Channel.CONTROL, messages.encode(Tag.TRANSFER, command))
        for instance_id, transfer_id in self._central.take_cancels():
            member = self._members[instance_id]
            self._to_ranks(member, messages.Channel.CONTROL, messages.encode(Tag.CANCEL, transfer_id))

        for instance_id, copy in self._central.take_copies():
            self._to_ranks(self._members[instance_id], messages.Channel.CONTROL, messages.encode(Tag.COPY, copy))

    def _to_ranks(self, member: Member, channel: messages.Channel, frames: Frames) -> None:
        for rank in range(member.num_ranks):
            worker = WorkerId(instance_id=member.instance_id, rank=rank, channel=channel)
            if not send(self._workers, worker.to_bytes(), frames):
                self._fail(member.instance_id, f"rank {rank} has lost its connection")
                return

    def _absorb(self, output: StepOutput) -> None:
        """Gather what a step means for the clients."""
        self._clients.tokens(output.handles.tolist(), output.token_ids.tolist())
        for handle, logprobs in output.logprobs:
            self._clients.logprobs(handle, logprobs)
        for finished in output.finished:
            self._clients.finish(finished)

    def _deliver(self) -> None:
        for client, batch in self._clients.take_batches().items():
            self._to_client(client, messages.encode(Tag.OUTPUT, batch))

    def _refresh_snapshot(self) -> None:
        now_s = self._clock()
        status = self._central.status()
        for entry in status["instances"]:
            instance_id = entry["instance_id"]
            member = self._members[instance_id]
            entry.update({"role": member.role.value, "num_ranks": member.num_ranks})
            entry.update(self._health.status(instance_id, now_s=now_s))
            # the names that /metrics reads
            entry["kv_cache_usage"] = entry["usage"]
            entry["prefix_cache_queries"] = entry["num_queried_tokens"]
            entry["prefix_cache_hits"] = entry["num_hit_tokens"]
            entry.update({f"offload_{key}": value for key, value in entry["tiers"].items()})
        status["transfers"] = dataclasses.asdict(self._transfers)
        status["healthy"] = self._health.is_complete and not self._health.reason
        status["reason"] = self._health.reason
        status["is_serving"] = has_route(self._candidates())
        status["num_audits"] = self._num_audits
        status["num_refused_connections"] = self._refusals.num_refused
        status["uptime_s"] = round(now_s - self._started_s, 3)
        self.snapshot = status

    def _say_goodbye(self, reason: str) -> None:
        for client in self._clients.clients:
            send(self._client_socket, client, messages.encode(Tag.STOP, reason))
        for member in self._members.values():
            for rank in range(member.num_ranks):
                for channel in messages.Channel:
                    worker = WorkerId(instance_id=member.instance_id, rank=rank, channel=channel)
                    send(self._workers, worker.to_bytes(), messages.encode(Tag.STOP, reason))
