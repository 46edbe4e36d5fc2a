"""What callers of the scheduler exchange with it: routes in; tokens, endings and load out. Plain values."""

from __future__ import annotations

import dataclasses

import numpy as np

from blockferry.engine.request import FinishReason, Int32Array, Int64Array, RequestStats
from blockferry.engine.wire import RowLogprobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which instance computes a request's prompt and which decodes it; one mixed instance may be both."""

    prefill: str
    decode: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request's end; comes exactly once per accepted request. `message` explains ERROR.

    `is_resumable`: it ended as its instance failed or drained away; it may be sent again with its tokens so far as
    Request.output_token_ids, and its answer goes on as if nothing had happened.
    """

    handle: int
    reason: FinishReason
    stop_token_id: int | None
    stats: RequestStats
    message: str = ""
    is_resumable: bool = False


def _no_handles() -> Int64Array:
    return np.empty(0, np.int64)


def _no_tokens() -> Int32Array:
    return np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """New tokens by request and the requests that ended.

    handles[i] got token_ids[i]; a request that got several is named as often, its tokens in order.
    """

    handles: Int64Array = dataclasses.field(default_factory=_no_handles)  # [T]
    token_ids: Int32Array = dataclasses.field(default_factory=_no_tokens)  # [T]
    logprobs: tuple[tuple[int, RowLogprobs], ...] = ()  # (handle, entries)
    finished: tuple[Finished, ...] = ()

    def __bool__(self) -> bool:
        """True when there is anything to deliver."""
        return bool(len(self.handles) or self.logprobs or self.finished)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """How busy an instance is, for the router."""

    num_queued_tokens: int  # prompt tokens waiting or not yet computed
    num_missing_tokens: int  # in flight, or queued and not expected to be found in the prefix cache
    num_waiting: int
    num_running: int  # rows in use, of any kind
    num_free_blocks: int
    num_usable_blocks: int
    num_cached_keys: int  # that can be found in the prefix cache
