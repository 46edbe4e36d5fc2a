"""Everything that may happen to a ledger, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from support.kv_player import Player


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that may happen, and how often it does in a history without aim."""

    run: Callable[[Player], None]
    weight: int


OPERATIONS: dict[str, Operation] = {
    "add": Operation(run=Player.add, weight=10),
    "admit": Operation(run=Player.admit, weight=22),
    "prefill": Operation(run=Player.prefill, weight=12),
    "verify": Operation(run=Player.verify, weight=8),
    "decode": Operation(run=Player.decode, weight=22),
    "dispatch": Operation(run=Player.dispatch, weight=18),
    "retire": Operation(run=Player.retire, weight=8),
    "end_load": Operation(run=Player.end_load, weight=6),
    "preempt": Operation(run=Player.preempt, weight=3),
    "abort": Operation(run=Player.abort, weight=6),
    "pop": Operation(run=Player.pop, weight=2),
    "release": Operation(run=Player.release, weight=3),
    "evict": Operation(run=Player.evict, weight=2),
    "reset": Operation(run=Player.reset, weight=1),
}
