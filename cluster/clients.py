"""The clients of a scheduler: their requests are routed and queued, and told what becomes of them.

Owns who has said hello on the clients' socket, and whose request is whose (ClientTable). Knows no ranks: whether an
instance can be given work, the HealthBoard says.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from blockferry.cluster import messages
from blockferry.cluster.client_table import ClientTable
from blockferry.cluster.health import HealthBoard
from blockferry.cluster.messages import Frames, Rejection, RejectionKind, Tag
from blockferry.cluster.router import Candidate, Policy, candidate_of, has_route
from blockferry.cluster.sockets import send
from blockferry.engine import wire
from blockferry.engine.errors import QueueFull
from blockferry.engine.request import Request
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.membership import MemberState
from blockferry.engine.scheduler.outputs import StepOutput

logger = logging.getLogger(__name__)


class Clients:
    """All clients of one CentralScheduler. Called by the scheduler loop's thread."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        central: CentralScheduler,
        *,
        health: HealthBoard,
        choose_route: Policy,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        """`socket`: bound, a ROUTER; whoever made it closes it. `status`: what clients are told that ask for it."""
        self._socket = socket
        self._central = central
        self._health = health
        self._choose_route = choose_route
        self._status = status
        self._table = ClientTable()
        self._handlers: dict[Tag, Callable[[bytes, bytes], None]] = {
            Tag.HELLO: self._on_hello,
            Tag.REQUEST: self._on_request,
            Tag.ABORT: self._on_abort,
            Tag.STATUS: self._on_status,
        }

    @property
    def can_be_served(self) -> bool:
        """Whether new requests can be run."""
        return has_route(self._candidates())

    def take(self, identity: bytes, tag: Tag, payload: bytes) -> None:
        """Do what a client's message asks for."""
        handler = self._handlers.get(tag)
        if handler is None:
            logger.warning("dropped a %s message of a client", tag.name)
            return
        self._table.greet(identity)
        try:
            handler(identity, payload)
        except ValueError as error:
            logger.warning("dropped a %s message of a client: %s", tag.name, error)

    def absorb(self, output: StepOutput) -> None:
        """Gather what a step means for the clients."""
        self._table.tokens(output.handles.tolist(), output.token_ids.tolist())
        for handle, logprobs in output.logprobs:
            self._table.logprobs(handle, logprobs)
        for finished in output.finished:
            self._table.finish(finished)

    def deliver(self) -> None:
        """Tell every client what was gathered for it."""
        for client, batch in self._table.take_batches().items():
            self._send(client, messages.encode(Tag.OUTPUT, batch))

    def send_all(self, frames: Frames) -> None:
        """Tell all clients the same."""
        for client in self._table.clients:
            self._send(client, frames)

    def say_goodbye(self, frames: Frames) -> None:
        """Tell all clients the last thing; what they had is not ended any more."""
        for client in self._table.clients:
            send(self._socket, client, frames)

    # messages of clients

    def _on_hello(self, identity: bytes, _payload: bytes) -> None:
        self._send(identity, messages.encode(Tag.WELCOME, {}))

    def _on_request(self, identity: bytes, payload: bytes) -> None:
        rejection = self._try_add(identity, messages.request_from(payload))
        if rejection is not None:
            self._send(identity, messages.encode(Tag.REJECTED, rejection))

    def _try_add(self, identity: bytes, request: Request) -> Rejection | None:
        """Queue a request; why not, when it cannot be."""

        def because(kind: RejectionKind, reason: str) -> Rejection:
            return Rejection(handle=request.handle, request_id=request.request_id, kind=kind, reason=reason)

        newcomer = self._central.meet(request)
        route = self._choose_route(self._candidates(), newcomer)
        if route is None:
            reason = self._central.members.failures or "instances are starting or draining; try again in a moment"
            return because(RejectionKind.NO_INSTANCE, reason)
        handle: int | None = None
        try:
            handle = self._table.open(identity, request.handle, route)
            named = dataclasses.replace(request, handle=handle, arrival_s=time.monotonic())
            self._central.add(named, route, newcomer)
        except ValueError as error:  # RequestRejected is one
            if handle is not None:
                self._table.close(handle)
            kind = RejectionKind.QUEUE_FULL if isinstance(error, QueueFull) else RejectionKind.NEVER_FITS
            return because(kind, str(error))
        return None

    def _candidates(self) -> list[Candidate]:
        return [
            candidate_of(
                self._central.load(member.instance_id),
                instance_id=member.instance_id,
                role=member.instance.role,
                num_assigned=self._table.num_assigned(member.instance_id),
            )
            for member in self._central.members
            if member.state is MemberState.SERVING and self._health.has_all_ranks(member.instance_id)
        ]

    def _on_abort(self, identity: bytes, payload: bytes) -> None:
        handle = self._table.find(identity, wire.decode(int, payload))
        if handle is not None:
            self.absorb(self._central.abort(handle))

    def _on_status(self, identity: bytes, payload: bytes) -> None:
        reply = messages.StatusReply(query=wire.decode(int, payload), status=self._status())
        self._send(identity, messages.encode(Tag.STATUS_REPLY, reply))

    def _send(self, identity: bytes, frames: Frames) -> None:
        if not send(self._socket, identity, frames):
            for handle in self._table.leave(identity):
                self.absorb(self._central.abort(handle))
