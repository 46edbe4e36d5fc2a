"""Bodies of HTTP requests, read within limits of size, time and of what all of them may take together."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest

from blockferry.cluster.api.errors import ApiError

MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 512 << 20  # of all that are being read
BODY_LIMIT_S = 60.0


class BodyReader:
    """Reads bodies of one server. On its event loop only."""

    def __init__(self, *, limit_s: float = BODY_LIMIT_S, max_bodies_bytes: int = MAX_BODIES_BYTES) -> None:
        self._limit_s = limit_s
        self._max_bodies_bytes = max_bodies_bytes
        self._num_bytes = 0  # of all that are being read

    async def read(self, request: HttpRequest) -> bytes:
        """The body, refused as soon as it is too long or too late. Raises ApiError."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._read(request)
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {self._limit_s:g} s; send it at once", status=408, code="body_too_slow"
            ) from None

    async def _read(self, request: HttpRequest) -> bytes:
        chunks, num_bytes = [], 0
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                self._num_bytes += len(chunk)
                self._check(num_bytes)
                chunks.append(chunk)
        finally:
            self._num_bytes -= num_bytes
        return b"".join(chunks)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > MAX_BODY_BYTES:
            raise ApiError(
                f"the body is longer than {MAX_BODY_BYTES} bytes; send less", status=413, code="body_too_large"
            )
        if self._num_bytes > self._max_bodies_bytes:
            raise ApiError(
                f"the bodies being read exceed {self._max_bodies_bytes} bytes together; try again later",
                status=429,
                code="too_many_bodies",
            )
