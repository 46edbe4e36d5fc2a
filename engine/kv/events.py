"""KV events: what entered and left the prefix cache, for observers outside (routers, offload, metrics).

Owns the events not taken yet. A ledger without an EventLog records nothing.
"""

from __future__ import annotations

import dataclasses

from blockferry.engine.request import Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Consecutive blocks of one sequence became findable."""

    group: int
    kind: str  # cache type of the group, as its spec names it
    block_size: int  # tokens per block of the group
    sliding_window: int | None  # tokens; None where the type has no window
    parent_hash: bytes | None  # of the block before the first one; None at the head of a sequence
    block_hashes: tuple[bytes, ...]
    token_ids: Int32Array  # [len(block_hashes) * block_size]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """One block with each of these hashes left the cache; another block may carry the same hash."""

    group: int
    block_hashes: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events in the order they happened, until taken. Called by the ledger's one thread."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def add(self, event: KVEvent) -> None:
        """Record one event."""
        self._events.append(event)

    def take(self) -> list[KVEvent]:
        """Hand over everything recorded since the last take."""
        events, self._events = self._events, []
        return events
