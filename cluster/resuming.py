"""How one request goes on after it has lost its instance or its scheduler. A state machine on a given clock.

Owns the tokens that were passed on and the rule when to ask again; knows no sockets and no tasks. What comes for the
request goes in, what its reader gets comes out: every token once, and one end.

                    connected, and the pause is over                 an end for good
    WAITING ------------------------------------------> SUBMITTED --------------------> ENDED
     ^   |                                                  |                             ^
     |   +-- aborted, or not taken in within timeout_s -----|-----------------------------+
     |                                                      |
     +-- an end that can be resumed, no instance, scheduler lost; queue full, if it had been in one before

A request is sent with the tokens it has, so that whoever takes it in draws the next one. Pauses grow while nobody does,
and the time is counted anew once somebody has. A request that ends its instance MOST_FRUITLESS times in a row without
a token more is given up: it may be what ends them.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from blockferry.cluster.api.client import RequestOutput
from blockferry.cluster.messages import Rejection, RejectionKind
from blockferry.engine.errors import InstanceFailed, QueueFull, RequestRejected
from blockferry.engine.request import FinishReason, Request, RequestStats
from blockferry.engine.scheduler.sequence import resolve_seed

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
MOST_FRUITLESS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The scheduler is gone; for good when it was told to stop, or the client was closed."""

    reason: str
    is_final: bool = False


class Standing(enum.Enum):
    """See the module's drawing."""

    WAITING = "waiting"
    SUBMITTED = "submitted"
    ENDED = "ended"


class ResumableAnswer:
    """One request from its first submission to its end. Owned by its reader's task."""

    def __init__(self, request: Request, *, timeout_s: float, now_s: float) -> None:
        """`timeout_s`: how long nobody may be there to run it; 0: it is never resumed."""
        # a seed of the scheduler's choice would be another one the next time
        self._request = dataclasses.replace(request, sampling=resolve_seed(request.sampling))
        self._timeout_s = timeout_s
        self._token_ids = request.output_token_ids.tolist()
        self._num_prompt_logprobs = 0  # passed on
        self._num_repeated = 0  # of those that came with this submission
        self._earlier: RequestStats | None = None  # of submissions before this one
        self._num_resumes = 0
        self._num_fruitless = 0  # submissions in a row that were cut without a token more
        self._is_cut = False  # between a loss and the next sign of being taken in
        self._retry_s = now_s
        self.deadline_s = now_s + timeout_s  # of WAITING
        self._pause_s = 0.0
        self._reason = "nobody was there to run it"
        self.standing = Standing.WAITING
        self.was_accepted = False  # somebody had taken it in once
        self.is_aborted = False  # its reader wants no more: it is not resumed

    @property
    def request_id(self) -> str:
        """The request's."""
        return self._request.request_id

    # the way out

    def act_s(self, *, is_connected: bool) -> float:
        """While WAITING: when to submit() or, without a connection or too late, to expire()."""
        return min(self._retry_s, self.deadline_s) if is_connected else self.deadline_s

    def can_submit(self, now_s: float) -> bool:
        """Whether the pause is over."""
        return now_s >= self._retry_s

    def submit(self) -> Request:
        """What to send now."""
        assert self.standing is Standing.WAITING, self.standing
        self.standing = Standing.SUBMITTED
        self._num_repeated = 0
        return dataclasses.replace(self._request, output_token_ids=np.array(self._token_ids, np.int32))

    # the way in; each returns what to pass on, if anything

    def expire(self) -> RequestOutput:
        """Nobody has taken it in for too long. Raises InstanceFailed where nobody ever had."""
        waited = f"; nobody could take it over within {self._timeout_s:g} s" if self._timeout_s else ""
        return self._fail(self._reason + waited)

    def end_aborted(self) -> RequestOutput:
        """It was aborted while nobody had it."""
        assert self.standing is Standing.WAITING, self.standing
        return self._end(FinishReason.ABORT)

    def on_output(self, output: RequestOutput, now_s: float) -> RequestOutput | None:
        """Tokens, an end, or both."""
        self._note_accepted()
        fresh = self._without_repeated(output)
        self._token_ids += output.token_ids
        if output.token_ids:
            self._num_fruitless = 0
        if output.finish_reason is None:
            return fresh
        stats = self._whole_stats(output.stats)
        if output.is_resumable:
            self._earlier = stats
            end = self._lose(output.error, now_s)
            if end is None:
                end = RequestOutput(handle=output.handle)
                if not (fresh.token_ids or fresh.prompt_logprobs):
                    return None
        else:
            self.standing = Standing.ENDED
            end = dataclasses.replace(fresh, stats=stats)
        return dataclasses.replace(
            end, token_ids=fresh.token_ids, logprobs=fresh.logprobs, prompt_logprobs=fresh.prompt_logprobs
        )

    def on_rejection(self, rejection: Rejection, now_s: float) -> RequestOutput | None:
        """It was not taken in. Raises RequestRejected or QueueFull where nobody ever had taken it in."""
        if rejection.kind is RejectionKind.NO_INSTANCE:
            return self._wait_longer(rejection.reason, now_s)
        is_full = rejection.kind is RejectionKind.QUEUE_FULL
        if not self.was_accepted:
            self.standing = Standing.ENDED
            raise (QueueFull if is_full else RequestRejected)(rejection.request_id, rejection.reason)
        if is_full:
            return self._wait_longer(rejection.reason, now_s)
        return self._fail(f"{self._reason}; it cannot go on elsewhere: {rejection.reason}")

    def on_lost(self, lost: Lost, now_s: float) -> RequestOutput | None:
        """The scheduler is gone."""
        if lost.is_final:
            return self._fail(f"{self._reason}; {lost.reason}" if self._is_cut else lost.reason)
        if self.standing is Standing.SUBMITTED:
            self._note_accepted()  # as far as anybody knows
            return self._lose(lost.reason, now_s)
        if not self._is_cut:
            self._reason = lost.reason
        return None

    # steps of the above

    def _note_accepted(self) -> None:
        self.was_accepted = True
        if self._is_cut:
            self._is_cut = False
            self._num_resumes += 1
        self._pause_s, self.deadline_s = 0.0, math.inf

    def _lose(self, reason: str, now_s: float) -> RequestOutput | None:
        """What had been taken in is cut; None: it will be asked for again."""
        self._reason, self._is_cut = reason, True
        if self.is_aborted:
            return self._end(FinishReason.ABORT)
        if self._timeout_s == 0.0:
            return self._fail(reason)
        if self._num_fruitless == MOST_FRUITLESS:
            return self._fail(f"{reason}; it was cut {MOST_FRUITLESS} times before without a token more")
        self._num_fruitless += 1
        self.deadline_s = now_s + self._timeout_s
        self._retry_s = now_s
        self.standing = Standing.WAITING
        return None

    def _wait_longer(self, reason: str, now_s: float) -> RequestOutput | None:
        if self.is_aborted:
            return self._end(FinishReason.ABORT)
        if not self._is_cut:
            self._reason = reason  # else what had cut it says more
        self.deadline_s = min(self.deadline_s, now_s + self._timeout_s)
        if now_s >= self.deadline_s:
            return self.expire()
        self._pause_s = min(LONGEST_PAUSE_S, 2.0 * self._pause_s) or FIRST_PAUSE_S
        self._retry_s = min(now_s + self._pause_s, self.deadline_s)
        self.standing = Standing.WAITING
        return None

    def _fail(self, error: str) -> RequestOutput:
        if not self.was_accepted:
            self.standing = Standing.ENDED
            raise InstanceFailed("scheduler", error)
        return dataclasses.replace(self._end(FinishReason.ERROR), error=error)

    def _end(self, reason: FinishReason) -> RequestOutput:
        self.standing = Standing.ENDED
        return RequestOutput(handle=self._request.handle, finish_reason=reason, stats=self._whole_stats(None))

    def _without_repeated(self, output: RequestOutput) -> RequestOutput:
        """Prompt positions that were scored before it was cut are scored again if no token had followed them."""
        if not output.prompt_logprobs:
            return output
        num_old = max(0, self._num_prompt_logprobs - self._num_repeated)
        self._num_repeated += len(output.prompt_logprobs)
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._num_repeated)
        return dataclasses.replace(output, prompt_logprobs=output.prompt_logprobs[num_old:])

    def _whole_stats(self, last: RequestStats | None) -> RequestStats | None:
        """What all submissions cost. Cached and loaded tokens are those of the last: what the answer was made from."""
        earlier, num_resumes = self._earlier, self._num_resumes
        if last is None or earlier is None:
            known = last or earlier
            return None if known is None else dataclasses.replace(known, num_resumes=num_resumes)
        return dataclasses.replace(
            last,
            num_resumes=num_resumes,
            num_preemptions=earlier.num_preemptions + last.num_preemptions,
            queued_s=earlier.queued_s + last.queued_s,
            prefill_s=earlier.prefill_s + last.prefill_s,
            transfer_s=earlier.transfer_s + last.transfer_s,
            transfer_bytes=earlier.transfer_bytes + last.transfer_bytes,
            transfer_blocks=earlier.transfer_blocks + last.transfer_blocks,
            transfer_saved_bytes=earlier.transfer_saved_bytes + last.transfer_saved_bytes,
            num_drafted_tokens=earlier.num_drafted_tokens + last.num_drafted_tokens,
            num_accepted_tokens=earlier.num_accepted_tokens + last.num_accepted_tokens,
        )
