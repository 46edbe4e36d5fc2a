"""Which instances run a request: a pure choice from each instance's load and from what it has of the prompt.

Keeps no state and no sockets; a choice can be repeated. Two policies:

    prefix_affinity   prefill: the least waiting, of this request and of those behind it: what is queued there, and what
                      the instance lacks of the prompt, once for this request, once for each that is expected behind,
                      which are as many as are found there, and once more where prefixes are evicted for it. So an idle
                      instance is preferred to a hit behind a queue that is longer than what the hit saves, and a hit to
                      computing a prompt twice where everybody is busy. Costs that differ by less than a hit of 1/16 of
                      the prompt are equal: the emptiest cache is taken, so that a short common prefix draws nobody.
                      decode: of those with about the fewest requests, the one that holds most of the prompt.
    least_loaded      the fewest queued tokens, the fewest requests, the most free blocks
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from blockferry.engine.config import Role
from blockferry.engine.scheduler.newcomer import Found
from blockferry.engine.scheduler.outputs import InstanceLoad, Route

NEAR_SHARE = 16
"""Shares of a prompt, or of a pool, are counted in parts of this many; what differs by less is equal."""

MAX_BEHIND = 3
"""Requests expected behind a newcomer, at most: as many as there are where prefill is busy 3/4 of the time (M/M/1)."""

ROW_TOKENS = 64
"""What a request that is decoded on a mixed instance costs others, in tokens of prefill."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One live instance as the router sees it."""

    instance_id: str
    role: Role
    num_queued_tokens: int  # prompt tokens that wait for, or are in, prefill here
    num_missing_tokens: int  # in flight, or queued and not expected to be found in the prefix cache
    num_assigned: int  # unfinished requests that are or will be here
    num_free_blocks: int
    cache_fill: float  # findable blocks, held or not, of all that there are; 0 to 1


def candidate_of(load: InstanceLoad, *, instance_id: str, role: Role, num_assigned: int) -> Candidate:
    """A live instance by its load and the unfinished requests that were sent there."""
    return Candidate(
        instance_id=instance_id,
        role=role,
        num_queued_tokens=load.num_queued_tokens,
        num_missing_tokens=load.num_missing_tokens,
        num_assigned=num_assigned,
        num_free_blocks=load.num_free_blocks,
        cache_fill=min(1.0, load.num_cached_keys / load.num_usable_blocks),
    )


class Arrival(Protocol):
    """The request, as far as it matters: scheduler.newcomer.Newcomer."""

    @property
    def key(self) -> bytes:
        """The same for equal prompts; decides ties."""

    def found_on(self, instance_id: str) -> Found:
        """What an instance has of it."""


Policy = Callable[[Sequence[Candidate], Arrival], Route | None]
"""Instances for a request, or None when a needed role has no live instance."""

_Pick = Callable[[Sequence[Candidate]], Candidate]


def has_route(candidates: Sequence[Candidate]) -> bool:
    """Whether every role that a request needs has a live instance."""
    roles = {one.role for one in candidates}
    return Role.MIXED in roles or roles >= {Role.PREFILL, Role.DECODE}


def least_loaded(candidates: Sequence[Candidate], arrival: Arrival) -> Route | None:
    """By load alone; equal loads are decided by the deployment's order. Looks nothing up."""
    del arrival

    def pick_prefill(choices: Sequence[Candidate]) -> Candidate:
        return min(choices, key=lambda one: (one.num_queued_tokens, one.num_assigned, -one.num_free_blocks))

    def pick_decode(choices: Sequence[Candidate]) -> Candidate:
        return min(choices, key=lambda one: (one.num_assigned, -one.num_free_blocks, one.num_queued_tokens))

    return _route(candidates, pick_prefill, pick_decode)


def prefix_affinity(candidates: Sequence[Candidate], arrival: Arrival) -> Route | None:
    """By what would have to be computed and ferried; ties by a hash of the prompt."""
    return _route(
        candidates, lambda choices: _soonest(choices, arrival), lambda choices: _best_stocked(choices, arrival)
    )


POLICIES: Mapping[str, Policy] = {"prefix_affinity": prefix_affinity, "least_loaded": least_loaded}
"""By their name in a deployment's file."""


def _route(candidates: Sequence[Candidate], pick_prefill: _Pick, pick_decode: _Pick) -> Route | None:
    if not has_route(candidates):
        return None
    mixed = [one for one in candidates if one.role is Role.MIXED]
    if mixed:
        chosen = pick_prefill(mixed).instance_id
        return Route(prefill=chosen, decode=chosen)
    return Route(
        prefill=pick_prefill([one for one in candidates if one.role is Role.PREFILL]).instance_id,
        decode=pick_decode([one for one in candidates if one.role is Role.DECODE]).instance_id,
    )


def _soonest(choices: Sequence[Candidate], arrival: Arrival) -> Candidate:
    """Where the request costs the least waiting, its own and that of others, counted in tokens to compute."""
    found = {one.instance_id: arrival.found_on(one.instance_id) for one in choices}
    costs = {one.instance_id: _waiting(one, found[one.instance_id]) for one in choices}
    limit = min(costs.values()) + found[choices[0].instance_id].num_tokens / NEAR_SHARE
    near = [one for one in choices if costs[one.instance_id] <= limit]
    return min(near, key=lambda one: (int(NEAR_SHARE * one.cache_fill), one.num_assigned, _tie(one, arrival)))


def _waiting(one: Candidate, found: Found) -> float:
    num_behind = min(MAX_BEHIND, one.num_missing_tokens / found.num_tokens)
    decoding = ROW_TOKENS * one.num_assigned if one.role is Role.MIXED else 0
    return one.num_missing_tokens + decoding + found.num_missing_tokens * (1 + num_behind + one.cache_fill)


def _best_stocked(choices: Sequence[Candidate], arrival: Arrival) -> Candidate:
    """Who holds most of the prompt among those with room and, within an eighth, the fewest requests."""
    found = {one.instance_id: arrival.found_on(one.instance_id) for one in choices}
    roomy = [one for one in choices if found[one.instance_id].has_room] or choices
    fewest = min(one.num_assigned for one in roomy)
    near = [one for one in roomy if one.num_assigned <= fewest + 1 + fewest // 8]

    def held_share(one: Candidate) -> int:
        mine = found[one.instance_id]
        return NEAR_SHARE * mine.num_held_tokens // max(1, mine.num_tokens)

    return min(near, key=lambda one: (-held_share(one), one.num_assigned, -one.num_free_blocks, _tie(one, arrival)))


def _tie(one: Candidate, arrival: Arrival) -> int:
    return zlib.crc32(arrival.key + one.instance_id.encode())
