"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}.

Owns the translation from our exceptions and pydantic's to that shape. Never writes a stack trace to a client.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from blockferry.engine.errors import BlockferryError, InstanceFailed, QueueFull, RequestRejected

MAX_SHOWN_CHARS = 80


class ApiError(Exception):
    """A request answered with an error object instead of a result."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body, status_code=self.status)

    def event(self) -> bytes:
        """The error as a server-sent event, for a stream that has begun."""
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"


_KINDS = {
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def unsupported(param: str, reason: str) -> ApiError:
    """A feature of OpenAI's API that this server does not have."""
    return ApiError(f"{param} is not supported: {reason}", param=param, code="unsupported_parameter")


def from_engine(error: BlockferryError) -> ApiError:
    """What an error of the engine means to an HTTP client."""
    if isinstance(error, QueueFull):
        return ApiError(str(error), status=429, code="queue_full")
    if isinstance(error, RequestRejected):
        return ApiError(str(error), status=400, code="request_rejected")
    status = 503 if isinstance(error, InstanceFailed) else 500
    return ApiError(f"the engine failed: {error}", status=status, code="engine_failed")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing pydantic found wrong, as "parameter=value: what is allowed"."""
    found = error.errors(include_url=False)
    first = found[0]
    kind = first["type"]
    if kind == "json_invalid":
        return ApiError(f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    param = ".".join(str(part) for part in first["loc"])
    if not param:
        return ApiError(f"the body must be a JSON object, not {shown(first['input'])}", code="invalid_json")
    if kind == "extra_forbidden":
        return ApiError(f"unknown parameter {param!r}; remove it", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(f"missing parameter {param!r}; it is required", param=param, code="missing_parameter")
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return ApiError(f"{param}={shown(first['input'])}: {reason}", param=param, code="invalid_value")


def shown(value: object) -> str:
    """A client's value as JSON, cut to a length that fits a message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
