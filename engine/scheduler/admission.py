"""Who may come in: requests that could never run are refused at once, the others wait in lanes by rank.

Pure checks and one queue; takes no blocks and no rows.

    lane "decode-0"   heap by rank   --.
    lane "decode-1"   heap by rank   ---+--> oldest head of the lanes that are not blocked in this pass
    lane ""           heap by rank   --'     (local: decoded where it is prefilled, or resumed after preemption)

A decode instance without room blocks its own lane only; a prefill instance without room ends the pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from blockferry.engine.errors import QueueFull, RequestRejected
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.request import Request
from blockferry.engine.scheduler.sequence import Rank, Sequence
from blockferry.engine.scheduler.waiting_prefixes import WaitingPrefixes


class WaitingQueue:
    """Sequences without a row, in lanes. Owned by one Scheduler."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[tuple[Rank, Sequence]]] = {}
        self._waiting: dict[Sequence, int] = {}  # digests that prefixes counts of each: rows add to them
        self.num_tokens = 0  # of all waiting sequences
        self.num_expected_tokens = 0  # of those: expected to be found in the prefix cache
        self.prefixes = WaitingPrefixes()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    @property
    def num_digests(self) -> int:
        """Of all waiting sequences. Cost: O(sequences)."""
        return sum(self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        """Add a sequence to its lane."""
        assert sequence not in self._waiting, sequence
        self.num_tokens += len(sequence.token_ids)
        self.num_expected_tokens += sequence.num_expected_tokens
        self._waiting[sequence] = len(sequence.hashes.digests)
        self.prefixes.add(sequence.hashes.digests)
        heapq.heappush(self._lanes.setdefault(sequence.lane, []), (sequence.ticket.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out: a head at once, another (it never comes back) when its heap entry surfaces."""
        num_digests = self._waiting.pop(sequence)
        self.num_tokens -= len(sequence.token_ids)
        self.num_expected_tokens -= sequence.num_expected_tokens
        self.prefixes.remove(sequence.hashes.digests[:num_digests])
        self._head(sequence.lane)

    def peek(self, *, blocked_lanes: Container[str] = ()) -> Sequence | None:
        """The oldest sequence of the lanes that are not blocked, or None."""
        heads = [self._head(lane) for lane in list(self._lanes) if lane not in blocked_lanes]
        return min((head for head in heads if head is not None), key=lambda head: head.ticket.rank, default=None)

    def _head(self, lane: str) -> Sequence | None:
        heap = self._lanes.get(lane, [])
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        if heap:
            return heap[0][1]
        self._lanes.pop(lane, None)
        return None


def token_limit(request: Request, *, max_model_len: int) -> int:
    """Number of tokens, prompt included, at which a request ends for length."""
    return min(len(request.prompt_token_ids) + request.sampling.max_tokens, max_model_len)


def check_lengths(request: Request, *, max_model_len: int) -> None:
    """Raises RequestRejected for a request that no instance of max_model_len could run."""
    num_prompt_tokens = len(request.prompt_token_ids)
    max_tokens = request.sampling.max_tokens
    if num_prompt_tokens == 0:
        raise RequestRejected(request.request_id, "the prompt has 0 tokens; send at least 1")
    if max_tokens < 0:
        raise RequestRejected(request.request_id, f"max_tokens={max_tokens} is negative; use 0 or more")
    longest = max_model_len if max_tokens == 0 else max_model_len - 1
    if num_prompt_tokens > longest:
        raise RequestRejected(
            request.request_id,
            f"the prompt has {num_prompt_tokens} tokens, but with max_tokens={max_tokens} and "
            f"max_model_len={max_model_len} at most {longest} fit; shorten the prompt or raise max_model_len",
        )
    num_output_tokens = len(request.output_token_ids)
    most = token_limit(request, max_model_len=max_model_len) - num_prompt_tokens
    if num_output_tokens > most:
        raise RequestRejected(
            request.request_id,
            f"it comes with {num_output_tokens} tokens of output; after its {num_prompt_tokens} of prompt, "
            f"with max_tokens={max_tokens} and max_model_len={max_model_len}, at most {most} fit; send what was drawn "
            "for this very request",
        )


def check_encoder_input(request: Request, *, max_num_encoder_tokens: int | None) -> None:
    """Raises RequestRejected for an encoder's input that the model cannot read; None: the model has no encoder."""
    encoder_token_ids = request.encoder_token_ids
    if max_num_encoder_tokens is None:
        if encoder_token_ids is None:
            return
        num_tokens = len(encoder_token_ids)
        reason = f"{num_tokens} tokens are sent for an encoder, which the model lacks; send them as the prompt"
    elif encoder_token_ids is None:
        reason = "the model is an encoder-decoder, and nothing is sent for its encoder; send encoder_token_ids"
    elif 1 <= len(encoder_token_ids) <= max_num_encoder_tokens:
        return
    else:
        reason = (
            f"the encoder's input has {len(encoder_token_ids)} tokens, the model's encoder reads 1 to "
            f"{max_num_encoder_tokens}; send an input of that length"
        )
    raise RequestRejected(request.request_id, reason)


def check_fits_pool(request: Request, pool: KVCacheManager, *, num_tokens: int, instance_id: str) -> None:
    """Raises RequestRejected when num_tokens of this request can never be held by the instance's pool."""
    num_encoder_tokens = 0 if request.encoder_token_ids is None else len(request.encoder_token_ids)
    if pool.room.can_ever_fit(num_tokens, num_encoder_tokens):
        return
    beside = f" beside the encoder's {num_encoder_tokens}" if num_encoder_tokens else ""
    raise RequestRejected(
        request.request_id,
        f"the prompt of {len(request.prompt_token_ids)} tokens with max_tokens={request.sampling.max_tokens} needs KV "
        f"blocks for {num_tokens} tokens{beside}, but the pool of instance {instance_id} holds "
        f"{pool.room.max_tokens_that_fit} tokens in {pool.num_usable_blocks} blocks; lower max_tokens, shorten the "
        "prompt or enlarge the cache",
    )


def check_queue(request: Request, *, num_waiting: int, max_queue_len: int, instance_id: str) -> None:
    """Raises QueueFull when the instance's queue is full."""
    if num_waiting < max_queue_len:
        return
    raise QueueFull(
        request.request_id,
        f"{num_waiting} requests already wait for instance {instance_id}, the limit is max_queue_len={max_queue_len}; "
        "retry later, add instances or raise max_queue_len",
    )
