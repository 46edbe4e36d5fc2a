"""The seam between a scheduler and the tiers outside of an instance's pool, and its answers where there are none.

Owns nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from blockferry.connectors.offload_base import CopyCommand, CopyEvent
from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.scheduler.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """A request that ends because its blocks did not come; its row still waits for them."""

    sequence: Sequence
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadsEnded:
    """What became of loads that went wrong."""

    failed: tuple[LoadFailed, ...] = ()
    restarted: tuple[Sequence, ...] = ()  # they wait again, to be computed


NOTHING_ENDED = LoadsEnded()


class Tiers(Protocol):
    """One instance's memory and disk outside of its pool. Called by the scheduler's thread."""

    def num_loadable_tokens(self, hashes: RequestHashes, num_tokens: int, hit: PrefixHit) -> int:
        """Tokens of a sequence of num_tokens that would be loaded beyond what the pool holds; takes nothing."""

    def load(self, sequence: Sequence, hit: PrefixHit | None, *, num_kept_blocks: int, now_s: float) -> bool:
        """Give a waiting sequence a row and blocks, and load what tiers hold of it and the pool does not (LOADING).

        hit: what the pool holds. False when it is not worth it or there is no room; then nothing has changed.
        """

    def give_back(self, row: int) -> None:
        """Free the blocks of a row in LOADING, which ends, once no byte can land in them any more."""

    def job_to_wait_for(self) -> int:
        """The store that must have ended before the step being planned is computed; 0 for none."""

    def take_commands(self) -> list[CopyCommand]:
        """Jobs for every rank of the instance, since the last take, in order."""

    def on_event(self, event: CopyEvent, now_s: float) -> LoadsEnded:
        """A rank has ended its part of a job."""

    def expire(self, now_s: float) -> LoadsEnded:
        """Give up loads that take too long."""

    def close(self) -> None:
        """The instance has failed: no job will end any more."""

    def status(self) -> Mapping[str, int | float]:
        """Counters, for status and metrics."""

    def check(self) -> None:
        """Prove that the books of all tiers agree. Raises LedgerCorrupted."""


class NoTiers:
    """An instance whose blocks are gone when its pool evicts them."""

    def num_loadable_tokens(self, hashes: RequestHashes, num_tokens: int, hit: PrefixHit) -> int:
        """None."""
        del hashes, num_tokens, hit
        return 0

    def load(self, sequence: Sequence, hit: PrefixHit | None, *, num_kept_blocks: int, now_s: float) -> bool:
        """Never worth it."""
        del sequence, hit, num_kept_blocks, now_s
        return False

    def give_back(self, row: int) -> None:
        """No row is ever LOADING."""
        raise AssertionError(row)

    def job_to_wait_for(self) -> int:
        """None."""
        return 0

    def take_commands(self) -> list[CopyCommand]:
        """None."""
        return []

    def on_event(self, event: CopyEvent, now_s: float) -> LoadsEnded:
        """Of no job of ours."""
        del event, now_s
        return NOTHING_ENDED

    def expire(self, now_s: float) -> LoadsEnded:
        """Nothing to give up."""
        del now_s
        return NOTHING_ENDED

    def close(self) -> None:
        """Nothing to forget."""

    def status(self) -> Mapping[str, int | float]:
        """Nothing to show."""
        return {}

    def check(self) -> None:
        """Nothing to prove."""


NO_TIERS = NoTiers()
