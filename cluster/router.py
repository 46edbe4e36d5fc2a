"""Which instances run a request: a pure choice from each instance's load at this moment.

Keeps no state and no sockets. Equal loads are decided by the deployment's order, so a choice can be repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from blockferry.engine.config import Role
from blockferry.engine.scheduler.outputs import Route


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One live instance as the router sees it."""

    instance_id: str
    role: Role
    num_queued_tokens: int  # prompt tokens that wait for, or are in, prefill here
    num_assigned: int  # unfinished requests that are or will be here
    num_free_blocks: int


def choose(candidates: Iterable[Candidate]) -> Route | None:
    """Instances for the next request, or None when a needed role has no live instance.

    Prefill: the fewest queued tokens. Decode: the fewest assigned requests, then the most free blocks.
    """
    alive = list(candidates)
    mixed = _least(alive, Role.MIXED, lambda one: (one.num_queued_tokens, one.num_assigned, -one.num_free_blocks))
    if mixed is not None:
        return Route(prefill=mixed.instance_id, decode=mixed.instance_id)
    prefill = _least(alive, Role.PREFILL, lambda one: (one.num_queued_tokens, one.num_assigned, -one.num_free_blocks))
    decode = _least(alive, Role.DECODE, lambda one: (one.num_assigned, -one.num_free_blocks, one.num_queued_tokens))
    if prefill is None or decode is None:
        return None
    return Route(prefill=prefill.instance_id, decode=decode.instance_id)


def _least(
    candidates: list[Candidate], role: Role, load: Callable[[Candidate], tuple[int, int, int]]
) -> Candidate | None:
    # min() keeps the first of equals: the deployment's order decides ties
    return min((one for one in candidates if one.role is role), key=load, default=None)
