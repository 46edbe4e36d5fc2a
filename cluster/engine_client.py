"""EngineClient over ZeroMQ: one asyncio connection to the scheduler, many requests on it, each resumed where needed.

Owns the connection and every open request; all on one event loop. Several clients may exist at once: handles are
scoped to the connection. A request that lost its instance is sent again with the tokens it has, and so is every one
when the scheduler is lost and reconnect() finds a new one; resuming.py holds the rule.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from blockferry.cluster import messages
from blockferry.cluster.api.client import RequestOutput
from blockferry.cluster.inbox import Inbox, Taken, outputs_of
from blockferry.cluster.messages import Tag
from blockferry.cluster.resuming import Lost, ResumableAnswer, Standing
from blockferry.cluster.scheduler_link import SILENCE_LIMIT_S, SchedulerLink
from blockferry.cluster.sockets import Endpoint
from blockferry.engine.config import HealthConfig
from blockferry.engine.errors import InstanceFailed, QueueFull
from blockferry.engine.request import Request

CONNECT_TIMEOUT_S = 10.0
MOST_WAITING = 4096  # requests that nobody has taken in yet, while nobody is there; more are refused
MOST_UNREAD = 4096  # outputs of one request, some 2 MiB: whoever reads no faster fills the memory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One unfinished request."""

    answer: ResumableAnswer
    inbox: Inbox = dataclasses.field(default_factory=Inbox)


class ZmqEngineClient:
    """One client of a deployment. Every method is called on the event loop that called connect()."""

    def __init__(self, endpoint: Endpoint, *, resume_timeout_s: float = HealthConfig().resume_timeout_s) -> None:
        """Only remembers the endpoint; connect() opens the socket.

        `resume_timeout_s`: how long a request may be without anybody to run it, before it ends with an error.
        """
        self._endpoint = endpoint
        self._resume_timeout_s = resume_timeout_s
        self._handles = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._link: SchedulerLink | None = None  # None: there is no scheduler
        self._lost = Lost(reason="connect() was not called", is_final=True)
        self._num_waiting = 0

    async def connect(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Open the connection. Raises InstanceFailed when nobody answers in time."""
        link = SchedulerLink(self._endpoint, on_message=self._on_message, on_lost=self._lose)
        await link.open(timeout_s=timeout_s)
        self._link = link
        for call in self._calls.values():
            call.inbox.put(Taken())

    async def reconnect(self, endpoint: Endpoint, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Go on with another scheduler: every open request is sent to it, with the tokens that it has.

        Raises InstanceFailed when nobody answers in time; open requests wait on, until their time is over.
        """
        self._endpoint = endpoint
        if self._link is not None:
            self._link.close()
            self._lose(Lost(reason="the scheduler was replaced"))
        await self.connect(timeout_s=timeout_s)

    def close(self) -> None:
        """Drop the connection; unfinished requests are aborted by the scheduler. Idempotent."""
        if self._link is not None:
            self._link.close()
        self._lose(Lost(reason="the client was closed", is_final=True))

    @property
    def lost_reason(self) -> str:
        """Why the scheduler is gone; empty while it is there."""
        return "" if self._link is not None else self._lost.reason

    def next_handle(self) -> int:
        """A number that no other request of this client has."""
        return next(self._handles)

    async def submit(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Queue a request; yields its outputs until one has a finish_reason.

        Ending the iteration early aborts the request.

        Raises:
            RequestRejected: it can never run here (QueueFull: not now).
            InstanceFailed: nobody was there to run it, for too long.
        """
        handle = request.handle
        if handle in self._calls:
            raise ValueError(f"handle {handle} belongs to an unfinished request; take one from next_handle()")
        answer = ResumableAnswer(request, timeout_s=self._resume_timeout_s, now_s=time.monotonic())
        if self._link is None:
            answer.on_lost(self._lost, time.monotonic())
        call = self._calls[handle] = _Call(answer=answer)
        try:
            while answer.standing is not Standing.ENDED:
                output = await self._next(call)
                if output is not None:
                    yield output
        finally:
            del self._calls[handle]
            if answer.standing is Standing.SUBMITTED:
                self._tell(Tag.ABORT, handle)

    async def abort(self, handle: int) -> None:
        """End a request; its iterator ends with FinishReason.ABORT. Unknown handles are ignored."""
        call = self._calls.get(handle)
        if call is None:
            return
        call.answer.is_aborted = True
        if call.answer.standing is Standing.SUBMITTED:
            self._tell(Tag.ABORT, handle)
        call.inbox.put(Taken())

    async def status(self) -> dict[str, Any]:
        """Snapshot of the deployment. Raises InstanceFailed when the scheduler is lost."""
        if self._link is None:
            raise InstanceFailed("scheduler", self._lost.reason)
        query = self.next_handle()
        reply = self._queries[query] = asyncio.get_running_loop().create_future()
        self._tell(Tag.STATUS, query)
        try:
            return await asyncio.wait_for(reply, SILENCE_LIMIT_S)
        except TimeoutError:
            raise InstanceFailed("scheduler", f"no status within {SILENCE_LIMIT_S:g} s") from None
        finally:
            self._queries.pop(query, None)

    # steps of the above

    async def _next(self, call: _Call) -> RequestOutput | None:
        """One move of a request; None when there is nothing to pass on."""
        answer, now_s = call.answer, time.monotonic()
        if answer.standing is Standing.WAITING:
            if answer.is_aborted:
                return answer.end_aborted()
            if self._link is not None and answer.can_submit(now_s):
                call.inbox.clear()  # whatever it says is of before
                self._link.send(Tag.REQUEST, answer.submit())
                return None
            if now_s >= answer.deadline_s:
                return answer.expire()
            taken = await self._wait(call, answer.act_s(is_connected=self._link is not None) - now_s)
        else:
            taken = await call.inbox.take(None)
        return _move(answer, taken, time.monotonic())

    async def _wait(self, call: _Call, timeout_s: float) -> Taken:
        if self._num_waiting >= MOST_WAITING and not call.answer.was_accepted:
            raise QueueFull(
                call.answer.request_id, f"{MOST_WAITING} requests wait for somebody to run them; retry later"
            )
        self._num_waiting += 1
        try:
            return await call.inbox.take(timeout_s)
        finally:
            self._num_waiting -= 1

    def _tell(self, tag: Tag, value: Any) -> None:
        """Say something to the scheduler, if there is one."""
        if self._link is not None:
            self._link.send(tag, value)

    def _lose(self, lost: Lost) -> None:
        self._link, self._lost = None, lost
        for call in self._calls.values():
            call.inbox.put(Taken(lost=lost))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(InstanceFailed("scheduler", lost.reason))

    def _on_message(self, tag: Tag, payload: bytes) -> None:
        if tag is Tag.OUTPUT:
            for output in outputs_of(messages.outputs_from(payload)):
                self._deliver(output.handle, Taken(output=output))
        elif tag is Tag.REJECTED:
            rejection = messages.rejection_from(payload)
            self._deliver(rejection.handle, Taken(rejection=rejection))
        elif tag is Tag.STATUS_REPLY:
            reply = messages.status_from(payload)
            query = self._queries.get(reply.query)
            if query is not None and not query.done():
                query.set_result(reply.status)

    def _deliver(self, handle: int, taken: Taken) -> None:
        call = self._calls.get(handle)
        if call is None:
            return
        if call.inbox.num_unread < MOST_UNREAD:
            call.inbox.put(taken)
            return
        reason = f"{MOST_UNREAD} outputs of request {call.answer.request_id!r} lay unread, so it was aborted"
        logger.warning("%s", reason)
        call.inbox.end(Taken(lost=Lost(reason=reason, is_final=True)))
        self._tell(Tag.ABORT, handle)


def _move(answer: ResumableAnswer, taken: Taken, now_s: float) -> RequestOutput | None:
    if taken.output is not None:
        return answer.on_output(taken.output, now_s)
    if taken.rejection is not None:
        return answer.on_rejection(taken.rejection, now_s)
    if taken.lost is not None:
        return answer.on_lost(taken.lost, now_s)
    return None
