"""Connections of the HTTP server that ask nothing: closed when they take too long, or when there are too many.

uvicorn ends idle connections after an answer, but waits without limit for the first byte and for the rest of a
request's head. Belongs to the server's event loop; reads uvicorn's set of connections, which it does not own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Collection
from typing import Any

logger = logging.getLogger(__name__)

HEAD_LIMIT_S = 20.0
POLL_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """How long a connection has been waited for; `answered` is the request that it asked before."""

    answered: Any
    since_s: float


class ConnectionLimits:
    """Closes connections without a request."""

    def __init__(self, *, max_connections: int, head_limit_s: float = HEAD_LIMIT_S) -> None:
        self.num_closed = 0
        self._max_connections = max_connections
        self._head_limit_s = head_limit_s
        self._waits: dict[Any, _Wait] = {}

    async def watch(self, connections: Collection[Any]) -> None:
        """Look at uvicorn's connections every POLL_S, until cancelled."""
        while True:
            self.check(connections, now_s=time.monotonic())
            await asyncio.sleep(POLL_S)

    def check(self, connections: Collection[Any], *, now_s: float) -> None:
        """Close those that wait for too long, and of too many those that have waited longest."""
        self._waits = {one: self._wait_of(one, now_s) for one in connections if _has_no_request(one)}
        late = [one for one, wait in self._waits.items() if now_s - wait.since_s > self._head_limit_s]
        num_excess = len(connections) - len(late) - self._max_connections
        if num_excess > 0:
            others = sorted(self._waits.keys() - set(late), key=lambda one: self._waits[one].since_s)
            late += others[:num_excess]
        for connection in late:
            self._close(connection)

    def _wait_of(self, connection: Any, now_s: float) -> _Wait:
        wait = self._waits.get(connection)
        if wait is not None and wait.answered is connection.cycle:
            return wait
        return _Wait(answered=connection.cycle, since_s=now_s)

    def _close(self, connection: Any) -> None:
        self.num_closed += 1
        if self.num_closed == 1:
            logger.warning(
                "closed a connection of %s that asked nothing: it took longer than %g s, or there are more than %d; "
                "more are only counted",
                connection.client,
                self._head_limit_s,
                self._max_connections,
            )
        del self._waits[connection]
        connection.transport.abort()


def _has_no_request(connection: Any) -> bool:
    """Whether uvicorn waits for a request's head."""
    return connection.cycle is None or bool(connection.cycle.response_complete)
