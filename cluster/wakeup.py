"""A doorbell between threads that a ZeroMQ poller can watch: queue something, wake the one loop that reads it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


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
