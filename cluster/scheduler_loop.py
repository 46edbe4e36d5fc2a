"""The scheduler's event loop: ZeroMQ messages in, CentralScheduler calls, plans and outputs out.

Owns both sockets and every call into CentralScheduler; all of it happens in the one thread that calls run().
What other threads may call is done in it too (wakeup.Calls). Knows nothing of Ray: whoever gives it `end_instance`
ends the processes of an instance that was given up, so that a frozen or half-dead one does nothing more when it wakes.

    one pass:  wait (socket, mailbox or tick) -> take messages -> tick -> plan -> ferry -> deliver
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from blockferry.cluster import messages, snapshot
from blockferry.cluster.clients import Clients
from blockferry.cluster.health import HealthBoard, TransferTotals
from blockferry.cluster.idle_audit import IdleAudit
from blockferry.cluster.messages import Farewell, Frames, Tag, WorkerId
from blockferry.cluster.ranks import Ranks
from blockferry.cluster.refusals import Refusals
from blockferry.cluster.router import Policy, prefix_affinity
from blockferry.cluster.sockets import Binding, Endpoints, bind_remote, bind_router
from blockferry.cluster.wakeup import Calls
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.membership import MemberState
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


class SchedulerLoop:
    """Drives one CentralScheduler until stop(). Closes what it opened."""

    def __init__(
        self,
        central: CentralScheduler,
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
        self._timing = timing
        self._end_instance = end_instance
        self._clock = time.monotonic
        self._health = HealthBoard(silence_limit_s=timing.silence_limit_s)
        self._calls = Calls()  # of other threads
        self._stop_reason: str | None = None
        self._started_s = self._clock()
        self._next_tick_s = self._next_beat_s = self._started_s
        self._audit = IdleAudit(central, idle_s=timing.audit_idle_s, now_s=self._started_s)
        self._context = zmq.Context()
        workers, clients = (bind_router(self._context, binding) for _ in range(2))
        self._binding = binding
        self._workers, self.worker_endpoints = workers.socket, workers.endpoints
        self._ranks = Ranks(self._workers, self._health)
        for instance in central.members.instances.values():
            self._ranks.add(instance.instance_id, num_ranks=instance.num_ranks)
        self._client_socket, self.client_endpoints = clients.socket, clients.endpoints
        self._clients = Clients(
            self._client_socket,
            central,
            health=self._health,
            choose_route=choose_route,
            status=self._fresh_snapshot,
        )
        self._poller = zmq.Poller()
        self._refusals = Refusals([self._workers, self._client_socket])
        for source in (self._workers, self._client_socket, self._calls.fd, *self._refusals.monitors):
            self._poller.register(source, zmq.POLLIN)
        self._transfers = TransferTotals()
        self.snapshot: dict[str, Any] = {}  # replaced as a whole at every beat; read it from any thread

    def stop(self, reason: str) -> None:
        """End run() soon. Any thread."""
        self._calls.tell(lambda: self._note_stop(reason))

    def report_failure(self, instance_id: str, reason: str) -> None:
        """An instance's process was seen dead. Any thread."""
        self._calls.tell(lambda: self._fail(instance_id, reason))

    def report_gone(self, instance_id: str) -> None:
        """No process of a failed instance is left. Any thread."""
        self._calls.tell(lambda: self._note_gone(instance_id))

    def open_to_others(self, host: str) -> Endpoints:
        """Let ranks on other hosts connect to `host`, an address of this one; where workers connect. Any thread.

        While run() does. Raises ValueError when it cannot be bound, TimeoutError when the loop does not answer.
        """
        return self._calls.ask(lambda: self._bind_remote(host))

    def add_instance(self, instance: Instance) -> None:
        """Take an instance in; it serves once every rank has said hello. Any thread but that of run(), while it runs.

        Raises what CentralScheduler.add_instance() raises, TimeoutError when the loop does not answer.
        """
        self._calls.ask(lambda: self._add_instance(instance))

    def drain(self, instance_id: str, deadline_s: float) -> None:
        """Route nothing to an instance any more, see CentralScheduler.drain(). As add_instance()."""
        self._calls.ask(lambda: self._drain_instance(instance_id, deadline_s))

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance, now or when no byte of it can land, and tell its ranks. As add_instance().

        One that is still starting is given up first. See CentralScheduler.remove_instance().
        """
        self._calls.ask(lambda: self._remove_instance(instance_id))

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
            self._calls.close()

    def _pass(self) -> None:
        now_s = self._clock()
        timeout_ms = max(0, int((self._next_tick_s - now_s) * 1000) + 1)
        ready = dict(self._poller.poll(timeout_ms))
        if self._workers in ready:
            self._take_from(self._workers, self._on_worker)
        if self._client_socket in ready:
            self._take_from(self._client_socket, self._clients.take)
        if self._calls.fd in ready:
            self._calls.make_all()
        if any(monitor in ready for monitor in self._refusals.monitors):
            self._refusals.read()
        now_s = self._clock()
        if now_s >= self._next_tick_s:
            self._tick(now_s)
        self._plan()
        self._ferry()
        self._clients.deliver()

    def _take_from(self, socket: zmq.Socket[bytes], handle: Callable[[bytes, Tag, bytes], None]) -> None:
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
        worker = self._ranks.find(identity)
        if worker is None:
            return
        try:
            value = messages.worker_value(tag, payload)
        except ValueError as error:  # what it said is lost, and its instance would wait for it
            self._fail(worker.instance_id, f"rank {worker.rank} sent a {tag.name} that cannot be read: {error}")
            return
        self._take(worker, tag, value)

    def _take(self, worker: WorkerId, tag: Tag, value: Any) -> None:
        self._ranks.hear(worker, tag, now_s=self._clock())
        if tag is Tag.HELLO:
            self._refresh_snapshot()  # whoever asks once the last rank is here must see it healthy
        elif tag is Tag.RESULT:
            self._on_result(worker, value)
        elif tag is Tag.EVENT:
            self._transfers.count(value)
            self._clients.absorb(self._central.on_transfer(value))
        elif tag is Tag.COPIED:
            self._clients.absorb(self._central.on_copy(value))
        elif tag is Tag.TROUBLE:
            self._fail(worker.instance_id, f"rank {worker.rank}: {value}")

    def _on_result(self, worker: WorkerId, result: StepResult) -> None:
        if result.error:
            self._fail(worker.instance_id, f"rank {worker.rank}, step {result.step_id}: {result.error}")
            return
        try:
            output = self._central.commit(worker.instance_id, result)
        except ValueError as error:  # of no step that it was to answer
            self._fail(worker.instance_id, f"rank {worker.rank}: {error}")
        else:
            self._clients.absorb(output)

    def _fail(self, instance_id: str, reason: str) -> None:
        """Give an instance up, unless it was before, or has left."""
        members = self._central.members
        if instance_id not in members or members.find(instance_id).state is MemberState.FAILED:
            return
        logger.error("instance %s failed: %s", instance_id, reason)
        self._clients.absorb(self._central.fail_instance(instance_id, reason))
        self._end_instance(instance_id)
        self._refresh_snapshot()

    # --- instances

    def _bind_remote(self, host: str) -> Endpoints:
        if self.worker_endpoints.remote is None:
            try:
                remote = bind_remote(self._workers, dataclasses.replace(self._binding, host=host))
            except zmq.ZMQError as error:
                raise ValueError(f"no port of {host} can be bound: {error}; name an address of this host") from error
            self.worker_endpoints = dataclasses.replace(self.worker_endpoints, remote=remote)
        return self.worker_endpoints

    def _add_instance(self, instance: Instance) -> None:
        self._central.add_instance(instance)
        self._ranks.add(instance.instance_id, num_ranks=instance.num_ranks)
        self._refresh_snapshot()

    def _drain_instance(self, instance_id: str, deadline_s: float) -> None:
        self._central.drain(instance_id, deadline_s)
        self._refresh_snapshot()

    def _remove_instance(self, instance_id: str) -> None:
        member = self._central.members.find(instance_id)
        if member.state is MemberState.SERVING and not self._health.has_all_ranks(instance_id):
            self._fail(instance_id, "it was removed before all of its ranks had connected")
        self._central.remove_instance(instance_id)
        self._forget_removed()
        self._refresh_snapshot()

    def _note_gone(self, instance_id: str) -> None:
        if instance_id in self._central.members:
            self._central.instance_gone(instance_id)

    def _forget_removed(self) -> None:
        for instance_id in self._central.take_removed():
            logger.info("instance %s has left", instance_id)
            self._ranks.remove(instance_id, "its instance was removed")

    # --- every pass

    def _note_stop(self, reason: str) -> None:
        self._stop_reason = reason

    def _tick(self, now_s: float) -> None:
        self._next_tick_s = now_s + self._timing.tick_s
        self._clients.absorb(self._central.tick())
        self._forget_removed()
        for instance_id, reason in self._health.silent(now_s=now_s):
            self._fail(instance_id, reason)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._timing.beat_s
            self._refresh_snapshot()
            self._clients.send_all(messages.encode(Tag.BEAT, {}))
        self._audit.look(now_s)

    def _plan(self) -> None:
        for instance_id in self._central.members.instances:
            while self._health.has_all_ranks(instance_id):
                plan = self._central.plan(instance_id)
                if plan is None:
                    break
                self._to_ranks(instance_id, messages.Channel.STEPS, messages.encode(Tag.PLAN, plan))

    def _ferry(self) -> None:
        control = messages.Channel.CONTROL
        for instance_id, command in self._central.take_transfers():
            self._to_ranks(instance_id, control, messages.encode(Tag.TRANSFER, command))
        for instance_id, transfer_id in self._central.take_cancels():
            self._to_ranks(instance_id, control, messages.encode(Tag.CANCEL, transfer_id))
        for instance_id, copy in self._central.take_copies():
            self._to_ranks(instance_id, control, messages.encode(Tag.COPY, copy))

    def _to_ranks(self, instance_id: str, channel: messages.Channel, frames: Frames) -> None:
        trouble = self._ranks.send(instance_id, channel, frames)
        if trouble:
            self._fail(instance_id, trouble)

    def _refresh_snapshot(self) -> None:
        now_s = self._clock()
        status = self._central.status()
        snapshot.complete(status, self._health, now_s=now_s)
        status["transfers"] = dataclasses.asdict(self._transfers)
        status["is_serving"] = self._clients.can_be_served
        status["num_audits"] = self._audit.num_audits
        status["num_refused_connections"] = self._refusals.num_refused
        status["uptime_s"] = round(now_s - self._started_s, 3)
        self.snapshot = status

    def _fresh_snapshot(self) -> dict[str, Any]:
        self._refresh_snapshot()
        return self.snapshot

    def _say_goodbye(self, reason: str) -> None:
        farewell = Farewell(reason=reason, is_final=self._stop_reason is not None)
        self._clients.say_goodbye(messages.encode(Tag.STOP, farewell))
        self._ranks.stop_all(reason)
