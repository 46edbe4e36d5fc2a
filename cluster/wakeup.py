"""A doorbell between threads that a ZeroMQ poller can watch: queue something, wake the one loop that reads it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

ANSWER_TIMEOUT_S = 30.0  # of a loop, to another thread that waits

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Mailbox(Generic[ItemT]):
    """Items from any thread for one reading loop, which polls `fd` beside its sockets."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: deque[ItemT] = deque()
        self._lock = threading.Lock()  # a closed descriptor's number may already mean another file

    def put(self, item: ItemT) -> None:
        """Queue an item and wake the reader. Any thread; harmless after close()."""
        self._items.append(item)
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[ItemT]:
        """Everything queued so far. Reader's thread only; never blocks."""
        with contextlib.suppress(BlockingIOError):  # nobody rang since the last take
            os.eventfd_read(self.fd)
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Release the descriptor; idempotent. Call when no thread reads any more."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1


class Calls:
    """Calls that other threads want made by one loop, which polls `fd` beside its sockets."""

    def __init__(self) -> None:
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self.fd = self._mailbox.fd

    def tell(self, call: Callable[[], None]) -> None:
        """Have the loop call, some time. Any thread; harmless after close()."""
        self._mailbox.put(call)

    def ask(self, call: Callable[[], ResultT]) -> ResultT:
        """Have the loop call, and wait for what comes of it. Any thread but the loop's.

        A ValueError is the asking thread's alone; anything else that is raised ends the loop too. Raises TimeoutError
        when the loop does not come to it.
        """
        answer: concurrent.futures.Future[ResultT] = concurrent.futures.Future()

        def make_call() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
                if not isinstance(error, ValueError):
                    raise

        self._mailbox.put(make_call)
        return answer.result(ANSWER_TIMEOUT_S)

    def make_all(self) -> None:
        """Make the calls that were wanted so far. The loop's thread."""
        for call in self._mailbox.take():
            call()

    def close(self) -> None:
        """Release the descriptor; idempotent. Call when no thread makes calls any more."""
        self._mailbox.close()
