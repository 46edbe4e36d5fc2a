"""The seam between the HTTP server and the engine: requests go down, token outputs come up.

Holds the protocol and its values only. Knows no sockets and no HTTP; the cluster implements it over ZeroMQ,
tests implement it in process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any, Protocol

from blockferry.engine.request import FinishReason, Request, RequestStats, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What happened to one request since its last output; the last one has a finish_reason.

    `token_ids` may hold none (only prompt logprobs, or an abort) or several tokens (the reader was slow and
    outputs were joined). `logprobs` has one entry per token, or is empty when none were asked for.
    `prompt_logprobs` describe prompt tokens 1, 2, ...: the first token has none.
    """

    handle: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it; it is also the last of token_ids
    stats: RequestStats | None = None  # with the last output
    error: str = ""  # with FinishReason.ERROR: what failed
    is_resumable: bool = False  # with FinishReason.ERROR: it may go on elsewhere. A client that resumes never says so


class EngineClient(Protocol):
    """One API process's connection to the scheduler. Every method is called on the server's event loop."""

    def next_handle(self) -> int:
        """A number that no other request of this deployment has."""

    def submit(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Queue a request; iterate its outputs until one has a finish_reason, which is the last.

        Raises at the first iteration: RequestRejected when it can never run, QueueFull when the waiting queue
        is full. A request whose engine is lost goes on elsewhere, without a token twice or missing; where that is
        not possible in time it ends with FinishReason.ERROR, or raises InstanceFailed if nobody had ever taken it in.
        Closing the iterator does not abort the request: call abort().
        """

    async def abort(self, handle: int) -> None:
        """End a request at any moment; unknown or finished handles are ignored. Idempotent.

        An iterator still being read ends with FinishReason.ABORT.
        """

    async def status(self) -> dict[str, Any]:
        """Snapshot of the deployment; plain JSON values. Raises BlockferryError, OSError or TimeoutError when the
        scheduler does not answer. The keys that /health and /metrics read (all optional):

        {"instances": [{"instance_id": str, "role": str, "num_running": int, "num_waiting": int,
                        "usage": float, "num_preemptions": int,     # usage: share of KV blocks held
                        "num_queried_tokens": int, "num_hit_tokens": int}],     # of the prefix cache
         "is_serving": bool}    # whether new requests can be run
        """
