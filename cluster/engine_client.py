"""EngineClient over ZeroMQ: one asyncio connection to the scheduler, many requests on it.

Owns the socket, one reading task and every open stream; all on one event loop. Several clients may exist at
once: handles are scoped to the connection. A lost scheduler fails every stream and all later calls; there is
no reconnecting, a new client does that.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from blockferry.cluster import messages
from blockferry.cluster.api.client import RequestOutput
from blockferry.cluster.messages import Frames, OutputBatch, Rejection, RejectionKind, StatusReply, Tag
from blockferry.cluster.sockets import Endpoint, connect_dealer
from blockferry.engine import wire
from blockferry.engine.errors import BlockferryError, InstanceFailed, QueueFull, RequestRejected
from blockferry.engine.request import FinishReason, Request

CONNECT_TIMEOUT_S = 10.0
SILENCE_LIMIT_S = 5.0  # the scheduler says something every second


class ZmqEngineClient:
    """One client of a deployment. Every method is called on the event loop that called connect()."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Only remembers the endpoint; connect() opens the socket."""
        self._endpoint = endpoint
        self._handles = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[RequestOutput | BlockferryError]] = {}
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._welcomed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = ""
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None

    async def connect(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Open the connection. Raises InstanceFailed when nobody answers in time."""
        self._context = zmq.asyncio.Context()
        socket = self._socket = self._context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect_dealer(socket, self._endpoint, identity=b"client-" + uuid.uuid4().hex.encode(), linger_ms=0)
        self._tasks = [asyncio.create_task(self._read(socket)), asyncio.create_task(self._watch(monitor))]
        self._send(Tag.HELLO, {})
        try:
            await asyncio.wait_for(self._welcomed.wait(), timeout_s)
        except TimeoutError:
            self.close()
            raise InstanceFailed("scheduler", f"no answer from {self._endpoint} within {timeout_s:g} s") from None

    def close(self) -> None:
        """Drop the connection; unfinished requests are aborted by the scheduler. Idempotent."""
        self._lose("the client was closed")
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            self._socket.disable_monitor()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = self._socket = None

    @property
    def lost_reason(self) -> str:
        """Why the scheduler is gone; empty while it is there."""
        return self._lost

    def next_handle(self) -> int:
        """A number that no other request of this client has."""
        return next(self._handles)

    async def submit(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Queue a request; yields its outputs until one has a finish_reason.

        Ending the iteration early aborts the request.

        Raises:
            RequestRejected: it can never run here (QueueFull: not now).
            InstanceFailed: the scheduler is lost, or no instance is left to run it.
        """
        if self._lost:
            raise InstanceFailed("scheduler", self._lost)
        handle = request.handle
        if handle in self._streams:
            raise ValueError(f"handle {handle} belongs to an unfinished request; take one from next_handle()")
        stream = self._streams[handle] = asyncio.Queue()
        is_finished = False
        try:
            self._send(Tag.REQUEST, request)
            while not is_finished:
                output = await _take_joined(stream)
                is_finished = output.finish_reason is not None
                yield output
        finally:
            self._streams.pop(handle, None)
            if not is_finished and not self._lost:
                self._send(Tag.ABORT, handle)

    async def abort(self, handle: int) -> None:
        """End a request; its iterator ends with FinishReason.ABORT. Unknown handles are ignored."""
        if handle in self._streams and not self._lost:
            self._send(Tag.ABORT, handle)

    async def status(self) -> dict[str, Any]:
        """Snapshot of the deployment. Raises InstanceFailed when the scheduler is lost."""
        if self._lost:
            raise InstanceFailed("scheduler", self._lost)
        query = self.next_handle()
        reply = self._queries[query] = asyncio.get_running_loop().create_future()
        self._send(Tag.STATUS, query)
        try:
            return await asyncio.wait_for(reply, SILENCE_LIMIT_S)
        except TimeoutError:
            raise InstanceFailed("scheduler", f"no status within {SILENCE_LIMIT_S:g} s") from None
        finally:
            self._queries.pop(query, None)

    def _send(self, tag: Tag, value: Any) -> None:
        assert self._socket is not None, "connect() first"
        # never waits: the send queue has no limit; the future is done when this returns
        self._socket.send_multipart(messages.encode(tag, value))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            if not await socket.poll(int(SILENCE_LIMIT_S * 1000)):
                self._lose(f"the scheduler was silent for {SILENCE_LIMIT_S:g} s")
                return
            try:
                self._take(await socket.recv_multipart())
            except ValueError as error:  # what it said is lost, and somebody may wait for it
                self._lose(f"a message of the scheduler cannot be read: {error}")
            if self._lost:
                return
            self._welcomed.set()

    def _take(self, frames: Frames) -> None:
        tag, payload = messages.split(frames)
        if tag is Tag.OUTPUT:
            self._on_outputs(messages.outputs_from(payload))
        elif tag is Tag.REJECTED:
            self._on_rejected(messages.rejection_from(payload))
        elif tag is Tag.STATUS_REPLY:
            self._on_status(messages.status_from(payload))
        elif tag is Tag.STOP:
            self._lose(wire.decode(str, payload))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await recv_monitor_message(monitor)
        await asyncio.sleep(0.1)  # whatever arrived before the end is still read
        self._lose("the connection to the scheduler was lost: its process has died")

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = reason
        for handle, stream in self._streams.items():
            stream.put_nowait(RequestOutput(handle=handle, finish_reason=FinishReason.ERROR, error=reason))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(InstanceFailed("scheduler", reason))

    def _on_outputs(self, batch: OutputBatch) -> None:
        for output in _outputs(batch):
            stream = self._streams.get(output.handle)
            if stream is not None:
                stream.put_nowait(output)

    def _on_rejected(self, rejection: Rejection) -> None:
        stream = self._streams.get(rejection.handle)
        if stream is None:
            return
        if rejection.kind is RejectionKind.NO_INSTANCE:
            stream.put_nowait(InstanceFailed("scheduler", rejection.reason))
        elif rejection.kind is RejectionKind.QUEUE_FULL:
            stream.put_nowait(QueueFull(rejection.request_id, rejection.reason))
        else:
            stream.put_nowait(RequestRejected(rejection.request_id, rejection.reason))

    def _on_status(self, reply: StatusReply) -> None:
        query = self._queries.get(reply.query)
        if query is not None and not query.done():
            query.set_result(reply.status)


def _outputs(batch: OutputBatch) -> list[RequestOutput]:
    """One RequestOutput for each request that a batch speaks of."""
    found: dict[int, RequestOutput] = {}

    def of(handle: int) -> RequestOutput:
        return found.setdefault(handle, RequestOutput(handle=handle))

    for handle, token_id in zip(batch.handles, batch.token_ids, strict=True):
        of(handle).token_ids.append(token_id)
    for entry in batch.logprobs:
        output = of(entry.handle)
        target = output.prompt_logprobs if entry.logprobs.is_prompt else output.logprobs
        target.extend(entry.logprobs.entries)
    for end in batch.finished:
        output = of(end.handle)
        found[end.handle] = RequestOutput(
            handle=end.handle,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=end.reason,
            stop_token_id=end.stop_token_id,
            stats=end.stats,
            error=end.message,
        )
    return list(found.values())


async def _take_joined(stream: asyncio.Queue[RequestOutput | BlockferryError]) -> RequestOutput:
    """Everything queued up to the end of the request, as one output. Raises what was queued as an error."""
    outputs: list[RequestOutput] = []
    while not outputs or (outputs[-1].finish_reason is None and not stream.empty()):
        item = await stream.get()
        if isinstance(item, BlockferryError):
            raise item
        outputs.append(item)
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return RequestOutput(
        handle=last.handle,
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        prompt_logprobs=[entry for output in outputs for entry in output.prompt_logprobs],
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        stats=last.stats,
        error=last.error,
    )
