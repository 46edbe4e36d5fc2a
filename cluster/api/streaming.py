"""Answers that end when the client does: server-sent events, and plain results awaited with an eye on it.

Both watch the connection while the engine works; a client that leaves cancels the work, whose cleanup aborts the
engine's requests. An error before the first event is a plain HTTP error, one after it an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blockferry.cluster.api.errors import ApiError

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends events as they come. Owns the iterator: it is closed in every case, also when nobody reads."""

    reader_limit_s = 60.0

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # Response.__init__ would make headers for a body that does not exist yet.
        self.events = events
        self.status_code = 200
        self.background = None
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        await _while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: ApiError | None = None
        try:
            await self._send_events(send)
        except TimeoutError:
            logger.warning("a client read nothing of its stream for %g s; its request was aborted", self.reader_limit_s)
            return
        except ApiError as error:
            failure = error
        except Exception:
            logger.exception("a stream failed")
            failure = ApiError("the server failed; its log says why", status=500)
        if failure is not None and not self._has_begun:
            await failure.response()(scope, receive, send)
            return
        last = b"" if failure is None else failure.event()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with contextlib.aclosing(self.events) as events:
            async for chunk in events:
                # waits while the client reads too slowly for what the connection buffers
                async with asyncio.timeout(self.reader_limit_s):
                    if not self._has_begun:
                        self._has_begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})


def event(chunk: Mapping[str, Any]) -> bytes:
    """A JSON object as a server-sent event."""
    return b"data: " + to_json(chunk) + b"\n\n"


async def result_while_connected(request: HttpRequest, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await `work`, or cancel it when the client leaves. Raises ApiError (status 499, which nobody reads) then."""
    done = await _while_connected(request.receive, work)
    if done is None:
        raise ApiError("the client closed the connection", status=CLIENT_CLOSED_REQUEST)
    return done


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """The result of `work`, or None when the client disconnected and it was cancelled."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = worker.done()
        for task in (worker, watcher):
            task.cancel()
        await asyncio.wait({worker, watcher})
    return worker.result() if is_done else None


async def _disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
