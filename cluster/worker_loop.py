"""A rank's two threads: one executes plans, the other moves transfer commands and signs of life.

Owns one ZeroMQ socket per thread and the order of plans. The model thread is the one that calls run(); transfer
events come from the connector's own thread through a mailbox. Knows nothing of Ray or models.

    model thread     STEPS socket:    PLAN -> execute -> RESULT
    control thread   CONTROL socket:  TRANSFER, CANCEL, COPY -> connectors;  mailbox -> EVENT, COPIED;  BEAT every
                     beat_s; TROUBLE once the connector's thread is stuck: its transfers would never be reported
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Protocol

import zmq

from blockferry.cluster import messages
from blockferry.cluster.messages import Channel, Frames, Tag, WorkerId
from blockferry.cluster.sockets import Endpoint, connect_dealer
from blockferry.cluster.wakeup import Mailbox
from blockferry.connectors.base import TransferCommand, TransferEvent
from blockferry.connectors.offload_base import CopyCommand, CopyEvent
from blockferry.engine import wire
from blockferry.engine.wire import StepPlan, StepResult

logger = logging.getLogger(__name__)


class StepExecutor(Protocol):
    """The engine's worker as this loop needs it."""

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step; None on ranks that do not sample."""


class Ferry(Protocol):
    """The connector's worker half as this loop needs it; every method is thread-safe and returns at once."""

    @property
    def stuck_s(self) -> float:
        """For how long its thread has not gone round."""

    def start(self, command: TransferCommand) -> None:
        """Begin a transfer; its event comes through the mailbox."""

    def cancel(self, transfer_id: int) -> None:
        """Quiesce a transfer; its event comes through the mailbox."""


class Copier(Protocol):
    """The offload connector's worker half as this loop needs it; thread-safe, returns at once."""

    def start(self, command: CopyCommand) -> None:
        """Begin a copy; its event comes through the mailbox."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTiming:
    """Intervals of a worker's threads, in seconds."""

    beat_s: float = 1.0
    stuck_limit_s: float = 10.0  # of the connector's thread, before this rank declares itself unfit
    stop_poll_s: float = 0.25  # how soon the model thread notices stop()


class WorkerLoop:
    """Runs one rank until the scheduler says STOP or stop() is called."""

    def __init__(
        self,
        *,
        instance_id: str,
        rank: int,
        executor: StepExecutor,
        timing: WorkerTiming = WorkerTiming(),
    ) -> None:
        self._instance_id = instance_id
        self._rank = rank
        self._endpoint: Endpoint | None = None
        self._executor = executor
        self._timing = timing
        self._stopped = threading.Event()
        self._events: Mailbox[Frames] = Mailbox()
        self._context = zmq.Context()
        self.stop_reason = ""

    def on_transfer_event(self, event: TransferEvent) -> None:
        """The connector's EventSink. Any thread."""
        self._events.put(messages.encode(Tag.EVENT, event))

    def on_copy_event(self, event: CopyEvent) -> None:
        """The offload connector's CopySink. Any thread."""
        self._events.put(messages.encode(Tag.COPIED, event))

    def stop(self) -> None:
        """End both threads soon. Any thread."""
        self._stopped.set()

    def run(self, endpoint: Endpoint, ferry: Ferry | None, copier: Copier | None = None) -> None:
        """Execute the plans of the scheduler at `endpoint` until stopped; returns when both threads have ended."""
        self._endpoint = endpoint
        control = threading.Thread(target=self._run_control, args=(ferry, copier), name="control", daemon=True)
        control.start()
        try:
            self._run_steps()
        finally:
            self._stopped.set()
            control.join(timeout=5.0)
            if control.is_alive():  # stuck in the connector: do not wait for its socket
                self._context.destroy(linger=0)
            else:
                self._context.term()
            self._events.close()

    def _connect(self, channel: Channel) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        identity = WorkerId(instance_id=self._instance_id, rank=self._rank, channel=channel)
        assert self._endpoint is not None, "run() has it"
        connect_dealer(socket, self._endpoint, identity=identity.to_bytes(), linger_ms=200)
        socket.send_multipart(messages.encode(Tag.HELLO, {}))
        return socket

    # --- model thread

    def _run_steps(self) -> None:
        with self._connect(Channel.STEPS) as socket:
            while not self._stopped.is_set():
                if not socket.poll(int(self._timing.stop_poll_s * 1000)):
                    continue
                try:
                    self._take_step(socket, socket.recv_multipart())
                except ValueError as error:
                    self._report_unreadable(error)

    def _take_step(self, socket: zmq.Socket[bytes], frames: Frames) -> None:
        tag, payload = messages.split(frames)
        if tag is Tag.PLAN:
            result = self._execute(wire.plan_from_bytes(payload))
            if result is not None:
                socket.send_multipart(messages.encode(Tag.RESULT, result))
        elif tag is Tag.STOP:
            self.stop_reason = wire.decode(str, payload)
            self._stopped.set()

    def _report_unreadable(self, error: ValueError) -> None:
        """What the scheduler said is lost, and it would wait for it."""
        logger.error("a message of the scheduler cannot be read: %s", error)
        self._events.put(messages.encode(Tag.TROUBLE, f"a message of the scheduler cannot be read: {error}"))

    def _execute(self, plan: StepPlan) -> StepResult | None:
        try:
            return self._executor.execute(plan)
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            reason = f"{type(error).__name__}: {error}"
            return StepResult(step_id=plan.step_id, token_ids=plan.rows[:0], error=reason)

    # --- control thread

    def _run_control(self, ferry: Ferry | None, copier: Copier | None) -> None:
        with self._connect(Channel.CONTROL) as socket:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._events.fd, zmq.POLLIN)
            next_beat_s = 0.0
            while not self._stopped.is_set():
                now_s = time.monotonic()
                if now_s >= next_beat_s:
                    next_beat_s = now_s + self._timing.beat_s
                    socket.send_multipart(self._sign_of_life(ferry))
                ready = dict(poller.poll(int(min(self._timing.stop_poll_s, next_beat_s - now_s) * 1000) + 1))
                if self._events.fd in ready:
                    for event in self._events.take():
                        socket.send_multipart(event)
                if socket in ready:
                    self._take_commands(socket, ferry, copier)

    def _sign_of_life(self, ferry: Ferry | None) -> messages.Frames:
        stuck_s = 0.0 if ferry is None else ferry.stuck_s
        if stuck_s <= self._timing.stuck_limit_s:
            return messages.encode(Tag.BEAT, {})
        return messages.encode(Tag.TROUBLE, f"its transfer thread has not answered for {stuck_s:.1f} s")

    def _take_commands(self, socket: zmq.Socket[bytes], ferry: Ferry | None, copier: Copier | None) -> None:
        while True:
            try:
                self._take_command(socket.recv_multipart(zmq.NOBLOCK), ferry, copier)
            except zmq.Again:
                return
            except ValueError as error:
                self._report_unreadable(error)

    def _take_command(self, frames: Frames, ferry: Ferry | None, copier: Copier | None) -> None:
        tag, payload = messages.split(frames)
        if tag is Tag.STOP:
            self.stop_reason = wire.decode(str, payload)
            self._stopped.set()
        elif tag is Tag.COPY and copier is not None:
            copier.start(messages.copy_from(payload))
        elif ferry is None:
            logger.warning("dropped a %s message: this deployment ferries nothing", tag.name)
        elif tag is Tag.TRANSFER:
            ferry.start(messages.command_from(payload))
        elif tag is Tag.CANCEL:
            ferry.cancel(wire.decode(int, payload))
