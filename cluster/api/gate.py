"""Who may ask the HTTP server, and how many at once. Wraps the application; knows no engine.

    request -> open path? -> key known? -> fewer than max_concurrent_requests? -> the application
                             else 401      else 429

Every 429 and 503 says when to try again (Retry-After), estimated from what is being answered and how fast answers ended
of late.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockferry.cluster.api.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})  # for probes, which have no key
WINDOW_S = 30.0  # of recent answers
MAX_RETRY_AFTER_S = 120
RECOVERY_S = 10  # what it takes at least until an instance serves again


class ApiKeys:
    """The keys that are accepted; none: everybody is. Holds digests only."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accept(self, authorization: str | None) -> bool:
        """Whether a header holds one of the keys; takes as long for every wrong one."""
        if not self._digests:
            return True
        scheme, _, shown = (authorization or "").partition(" ")
        digest = _digest(shown.strip().encode("utf-8", "surrogateescape"))
        is_known = False
        for own in self._digests:
            is_known |= hmac.compare_digest(digest, own)
        return is_known and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Pace:
    """How many requests are being answered, and how fast answers ended of late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self._clock = clock
        self._ended_s: collections.deque[float] = collections.deque(maxlen=4096)

    def end(self) -> None:
        """Note an answer that was given in full."""
        self._ended_s.append(self._clock())

    def retry_after_s(self, status: int, *, num_others: int) -> int:
        """Seconds after which it is worth to ask again: when the others should have been answered."""
        if status == 503:
            return RECOVERY_S
        now_s = self._clock()
        while self._ended_s and self._ended_s[0] < now_s - WINDOW_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return int(WINDOW_S) if num_others else 1
        per_s = len(self._ended_s) / max(now_s - self._ended_s[0], 1.0)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(num_others / per_s)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GateRules:
    """Whom the gate lets in."""

    keys: ApiKeys = dataclasses.field(default_factory=lambda: ApiKeys(()))
    max_concurrent_requests: int = 4096


EVERYBODY = GateRules()


class Gate:
    """The application behind the rules. On the server's event loop only."""

    def __init__(self, app: ASGIApp, rules: GateRules, pace: Pace) -> None:
        self._app = app
        self._rules = rules
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = None if scope["path"] in OPEN_PATHS else self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, _Answer(send, self._pace, num_own=0).send)
            return
        answer = _Answer(send, self._pace, num_own=1)
        self._pace.num_open += 1
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._pace.num_open -= 1
            if answer.status == 200 and scope["path"] not in OPEN_PATHS:
                self._pace.end()

    def _refusal(self, scope: Scope) -> ApiError | None:
        if not self._rules.keys.accept(Headers(scope=scope).get("authorization")):
            return ApiError(
                "the API key is missing or wrong; send the header `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )
        limit = self._rules.max_concurrent_requests
        if self._pace.num_open >= limit:
            return ApiError(
                f"{limit} requests are being answered, which is the limit; try again later, or raise "
                "api.max_concurrent_requests",
                status=429,
                code="too_many_requests",
            )
        return None


class _Answer:
    """Sends an answer on, with Retry-After where that belongs."""

    def __init__(self, send: Send, pace: Pace, *, num_own: int) -> None:
        """`num_own`: how many of the pace's open requests this is."""
        self.status = 0
        self._num_own = num_own
        self._send = send
        self._pace = pace

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = self._headers()
            if extra:
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        if self.status in (429, 503):
            return [(b"retry-after", str(self._retry_after_s()).encode())]
        return []

    def _retry_after_s(self) -> int:
        return self._pace.retry_after_s(self.status, num_others=self._pace.num_open - self._num_own)


def gated(rules: GateRules) -> dict[str, Any]:
    """Arguments of Starlette's add_middleware() for a gate with a pace of its own."""
    return {"rules": rules, "pace": Pace()}
