"""One connection to a scheduler: opened once, lost once. Owns its socket and the tasks that read and watch it.

Knows nothing of requests. Everything happens on the event loop that called open().
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from blockferry.cluster import messages
from blockferry.cluster.messages import Frames, Tag
from blockferry.cluster.resuming import Lost
from blockferry.cluster.sockets import Endpoint, connect_dealer
from blockferry.engine.errors import InstanceFailed

SILENCE_LIMIT_S = 5.0  # the scheduler says something every second


class SchedulerLink:
    """A client's connection. close() what was opened."""

    def __init__(
        self, endpoint: Endpoint, *, on_message: Callable[[Tag, bytes], None], on_lost: Callable[[Lost], None]
    ) -> None:
        """`on_message` may raise ValueError for what it cannot read.

        `on_lost` is called at most once, and nothing is called after it or after close().
        """
        self._endpoint = endpoint
        self._on_message = on_message
        self._on_lost = on_lost
        self._welcomed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._is_open = True

    async def open(self, *, timeout_s: float) -> None:
        """Connect and be welcomed. Raises InstanceFailed when nobody answers in time; then it is closed."""
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        identity = b"client-" + uuid.uuid4().hex.encode()
        connect_dealer(self._socket, self._endpoint, identity=identity, linger_ms=0)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(monitor))]
        self.send(Tag.HELLO, {})
        try:
            await asyncio.wait_for(self._welcomed.wait(), timeout_s)
        except TimeoutError:
            raise InstanceFailed("scheduler", f"no answer from {self._endpoint} within {timeout_s:g} s") from None
        finally:
            if not self._welcomed.is_set():
                self.close()
        if not self._is_open:
            raise InstanceFailed("scheduler", f"{self._endpoint} was lost at once")

    def close(self) -> None:
        """Drop the connection; the scheduler aborts what it still runs for it. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def send(self, tag: Tag, value: Any) -> None:
        """Queue a message; never waits, as the queue has no limit."""
        assert self._is_open, tag
        self._socket.send_multipart(messages.encode(tag, value))

    async def _read(self) -> None:
        while True:
            if not await self._socket.poll(int(SILENCE_LIMIT_S * 1000)):
                self._lose(Lost(reason=f"the scheduler was silent for {SILENCE_LIMIT_S:g} s"))
                return
            frames = await self._socket.recv_multipart()
            try:
                lost = self._take(frames)
            except ValueError as error:  # what it said is lost, and somebody may wait for it
                lost = Lost(reason=f"a message of the scheduler cannot be read: {error}")
            if lost is not None:
                self._lose(lost)
                return
            self._welcomed.set()

    def _take(self, frames: Frames) -> Lost | None:
        tag, payload = messages.split(frames)
        if tag is Tag.STOP:
            farewell = messages.farewell_from(payload)
            return Lost(reason=farewell.reason, is_final=farewell.is_final)
        self._on_message(tag, payload)
        return None

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await recv_monitor_message(monitor)
        await asyncio.sleep(0.1)  # whatever arrived before the end is still read
        self._lose(Lost(reason="the connection to the scheduler was lost: its process has died"))

    def _lose(self, lost: Lost) -> None:
        if self._is_open:
            self.close()
            self._on_lost(lost)
