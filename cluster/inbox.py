"""What the scheduler has said of one request and its reader has not read yet; and how a batch is taken apart.

Owned by the client's event loop. A slow reader gets what has come meanwhile as one output.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses

from blockferry.cluster.api.client import RequestOutput
from blockferry.cluster.messages import OutputBatch, Rejection
from blockferry.cluster.resuming import Lost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The oldest thing in an inbox: exactly one of these, or none after a wake-up."""

    output: RequestOutput | None = None
    rejection: Rejection | None = None
    lost: Lost | None = None


class Inbox:
    """One request's."""

    def __init__(self) -> None:
        self._items: collections.deque[Taken] = collections.deque()
        self._filled = asyncio.Event()
        self._has_ended = False

    @property
    def num_unread(self) -> int:
        """What has come and was not taken."""
        return len(self._items)

    def put(self, item: Taken) -> None:
        """Add what has come; an empty Taken wakes the reader."""
        if not self._has_ended:
            self._items.append(item)
            self._filled.set()

    def end(self, item: Taken) -> None:
        """Put this in the place of all that was not taken, and let nothing follow it."""
        self.clear()
        self.put(item)
        self._has_ended = True

    def clear(self) -> None:
        """Forget what has come."""
        self._items.clear()
        self._filled.clear()

    async def take(self, timeout_s: float | None) -> Taken:
        """The next thing, an output joined with those that follow it; an empty Taken when nothing comes in time."""
        if not self._items:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._filled.wait(), timeout_s)
        item = self._items.popleft() if self._items else Taken()
        if item.output is not None:
            outputs = [item.output]
            while self._items and (following := self._items[0].output) is not None:
                self._items.popleft()
                outputs.append(following)
            item = Taken(output=_joined(outputs))
        if not self._items:
            self._filled.clear()
        return item


def outputs_of(batch: OutputBatch) -> list[RequestOutput]:
    """One RequestOutput for each request that a batch speaks of."""
    found: dict[int, RequestOutput] = {}

    def of(handle: int) -> RequestOutput:
        return found.setdefault(handle, RequestOutput(handle=handle))

    for handle, token_id in zip(batch.handles, batch.token_ids, strict=True):
        of(handle).token_ids.append(token_id)
    for entry in batch.logprobs:
        output = of(entry.handle)
        target = output.prompt_logprobs if entry.logprobs.is_prompt else output.logprobs
        target.extend(entry.logprobs.entries)
    for end in batch.finished:
        found[end.handle] = dataclasses.replace(
            of(end.handle),
            finish_reason=end.reason,
            stop_token_id=end.stop_token_id,
            stats=end.stats,
            error=end.message,
            is_resumable=end.is_resumable,
        )
    return list(found.values())


def _joined(outputs: list[RequestOutput]) -> RequestOutput:
    if len(outputs) == 1:
        return outputs[0]
    return dataclasses.replace(
        outputs[-1],
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        prompt_logprobs=[entry for output in outputs for entry in output.prompt_logprobs],
    )
