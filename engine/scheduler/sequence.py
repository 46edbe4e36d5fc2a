"""Tickets and sequences: what the scheduler keeps in Python per request, apart from the row arrays.

A Ticket is a request's identity through the whole deployment; a Sequence is its presence on one instance. While
a sequence has a row, its tokens live in that instance's RowTable; outside a row they live here. Computes nothing
about time or blocks; never imports NumPy operations into the hot path: only arrivals, prefills and ends touch it.
"""

from __future__ import annotations

import dataclasses
import secrets

from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.request import Int32Array, Request, RequestStats, SamplingParams
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import RowLogprobs

LOCAL_LANE = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rank:
    """Who goes first: smaller is older and wins. Total: `order` is unique."""

    priority: int
    arrival_s: float
    order: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One request's bookkeeping from add to finish. Owned by CentralScheduler; schedulers fill the counters."""

    request: Request
    sampling: SamplingParams  # seed resolved
    route: Route
    rank: Rank
    sequence: Sequence | None = None  # where it is now; while it is handed over, the prefill side
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_logprobs_sent: int = 0  # positions, counted from position 1
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    transfer_blocks: int = 0
    transfer_saved_bytes: int = 0
    num_loaded_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def handle(self) -> int:
        """The caller's number of the request."""
        return self.request.handle

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_given_tokens(self) -> int:
        """Tokens that the request came with: the prompt, and output that had been passed on before it was resumed."""
        return self.request.num_given_tokens

    @property
    def num_encoder_tokens(self) -> int:
        """Length of the encoder's input; 0 without one."""
        encoder_token_ids = self.request.encoder_token_ids
        return 0 if encoder_token_ids is None else len(encoder_token_ids)

    def mark_scheduled(self, now_s: float, *, num_cached_tokens: int) -> None:
        """Note the first time that anything of the request was planned; later admissions change nothing."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s
            self.num_cached_tokens = num_cached_tokens

    def mark_prefilled(self, now_s: float) -> None:
        """Note when the whole prompt had been computed for the first time."""
        if self.first_token_s is None:
            self.first_token_s = now_s

    def unsent(self, logprobs: RowLogprobs) -> RowLogprobs | None:
        """Cut off prompt positions that were delivered before a recomputation; None when nothing is left."""
        end = logprobs.first_position + len(logprobs.entries)
        first_new = self.num_prompt_logprobs_sent + 1
        if end <= first_new:
            return None
        self.num_prompt_logprobs_sent = end - 1
        if logprobs.first_position >= first_new:
            return logprobs
        entries = logprobs.entries[first_new - logprobs.first_position :]
        return dataclasses.replace(logprobs, first_position=first_new, entries=entries)

    def stats(self, now_s: float) -> RequestStats:
        """What the request has cost by now."""
        scheduled_s = self.first_scheduled_s
        queued_until_s = now_s if scheduled_s is None else scheduled_s
        prefilled_s = now_s if self.first_token_s is None else self.first_token_s
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=min(self.num_cached_tokens, self.num_prompt_tokens),  # given output may be cached too
            num_preemptions=self.num_preemptions,
            queued_s=max(0.0, queued_until_s - self.request.arrival_s),
            prefill_s=0.0 if scheduled_s is None else max(0.0, prefilled_s - scheduled_s),
            transfer_s=self.transfer_s,
            transfer_bytes=self.transfer_bytes,
            transfer_blocks=self.transfer_blocks,
            transfer_saved_bytes=self.transfer_saved_bytes,
            num_loaded_tokens=self.num_loaded_tokens,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A ticket's presence on one instance. Owned by that instance's Scheduler.

    `limit` is the number of tokens at which this instance stops planning it: on a prefill instance that hands
    over, one more than were given; else the request's own end. `lane` names the decode instance it will be handed to.
    """

    ticket: Ticket
    instance_id: str
    limit: int
    lane: str = LOCAL_LANE
    token_ids: Int32Array  # known tokens; current only while row is None
    hashes: RequestHashes
    row: int | None = None
    num_hit_tokens: int = 0  # prefix hit of the current admission, what is loaded from tiers included
    num_expected_tokens: int = 0  # that were found here when it came; an estimate, for the router only
    can_load: bool = True  # False: a load has failed, and what it was for is to be computed
    junction: int = 0  # end of a longer prefix that others share, whose states are to be kept now; 0: none

    @property
    def is_ferried(self) -> bool:
        """True when another instance decodes it."""
        return self.lane != LOCAL_LANE

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while prompt positions are still to be scored, which takes computing them."""
        ticket = self.ticket
        if ticket.sampling.num_prompt_logprobs is None:
            return False
        return ticket.num_prompt_logprobs_sent < ticket.num_prompt_tokens - 1

    def sampling_to_send(self) -> SamplingParams:
        """What workers must know; prompt positions that were scored already are not asked for again."""
        if self.needs_prompt_logprobs:
            return self.ticket.sampling
        return dataclasses.replace(self.ticket.sampling, num_prompt_logprobs=None)


def resolve_seed(sampling: SamplingParams) -> SamplingParams:
    """Give a request that named no seed one of its own, so that repeated draws agree."""
    if sampling.seed is not None:
        return sampling
    return dataclasses.replace(sampling, seed=secrets.randbits(31))
