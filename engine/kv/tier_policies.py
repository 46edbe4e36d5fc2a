"""Which block of a tier goes when another needs its room: least recently used, or adaptive (ARC).

Owns the order of blocks that may go and, for ARC, the memory of what went. Knows no memory and no states; whoever asks
says which blocks may not go now. Sizes are in units of the tier.

    missed(key) -> evict_for(key)* -> insert(key) -> used(key)* -> evicted by evict_for(another), or removed
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol


class TierKey(NamedTuple):
    """A block's content: the digest of its tokens and all before them, and the cache group it belongs to."""

    group: int
    digest: bytes


MayGo = Callable[[TierKey], bool]


class PolicyName(enum.StrEnum):
    """Policies by the name that a deployment file gives them."""

    LRU = "lru"
    ARC = "arc"


class EvictionPolicy(Protocol):
    """The blocks of one tier that are ready to be read. Called by its TierLedger only."""

    def missed(self, key: TierKey) -> None:
        """A block that is not here is about to be inserted; room may have to be made for it."""

    def evict_for(self, key: TierKey, may_go: MayGo) -> TierKey | None:
        """Choose the block that goes for `key`, and forget that it is here. None: none of them may go."""

    def insert(self, key: TierKey, size: int) -> None:
        """A block is here from now on."""

    def used(self, key: TierKey) -> None:
        """A block was read."""

    def remove(self, key: TierKey) -> None:
        """A block is here no more, for another reason than room."""

    def coldest(self, count: int) -> list[TierKey]:
        """About the first `count` blocks to go, first to go first."""

    def residents(self) -> set[TierKey]:
        """All blocks that are here."""


class LruPolicy:
    """The least recently used block goes."""

    def __init__(self) -> None:
        self._order: collections.OrderedDict[TierKey, None] = collections.OrderedDict()

    def missed(self, key: TierKey) -> None:
        """Nothing to learn from it."""

    def evict_for(self, key: TierKey, may_go: MayGo) -> TierKey | None:
        """The least recently used block that may go."""
        del key
        victim = next((one for one in self._order if may_go(one)), None)
        if victim is not None:
            del self._order[victim]
        return victim

    def insert(self, key: TierKey, size: int) -> None:
        """As used just now."""
        del size
        self._order[key] = None

    def used(self, key: TierKey) -> None:
        """The last one to go now."""
        self._order.move_to_end(key)

    def remove(self, key: TierKey) -> None:
        """Forget it."""
        del self._order[key]

    def coldest(self, count: int) -> list[TierKey]:
        """In the order of last use."""
        return list(itertools.islice(self._order, count))

    def residents(self) -> set[TierKey]:
        """All of them."""
        return set(self._order)


class _SizedOrder:
    """Keys in the order of last use, with the sum of their sizes."""

    def __init__(self) -> None:
        self.sizes: collections.OrderedDict[TierKey, int] = collections.OrderedDict()
        self.total = 0

    def __contains__(self, key: TierKey) -> bool:
        return key in self.sizes

    def add(self, key: TierKey, size: int) -> None:
        self.sizes[key] = size
        self.total += size

    def pop(self, key: TierKey) -> int:
        size = self.sizes.pop(key)
        self.total -= size
        return size

    def first(self, may_go: MayGo) -> TierKey | None:
        return next((key for key in self.sizes if may_go(key)), None)

    def drop_first(self) -> None:
        _, size = self.sizes.popitem(last=False)
        self.total -= size


class ArcPolicy:
    """Balances recency and frequency by what it should have kept: blocks read once against blocks read again.

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4; for blocks of one
    size the same decisions. Lists are measured in units, so that blocks of several sizes can share a tier. A block
    that may not go just now is passed over, first in its own list.

        new -> once (T1) --went--> once_gone (B1) --comes again--> often (T2) --went--> often_gone (B2) --again--> often
    """

    def __init__(self, capacity: int) -> None:
        """capacity: units of the tier."""
        self._capacity = capacity
        self.target = 0.0  # units that `once` should have: p in the paper
        self.once = _SizedOrder()
        self.often = _SizedOrder()
        self.once_gone = _SizedOrder()
        self.often_gone = _SizedOrder()

    def missed(self, key: TierKey) -> None:
        """A block that went too early says which list should have been longer."""
        if key in self.once_gone:
            step = max(self.often_gone.total / self.once_gone.total, 1.0) * self.once_gone.sizes[key]
            self.target = min(float(self._capacity), self.target + step)
        elif key in self.often_gone:
            step = max(self.once_gone.total / self.often_gone.total, 1.0) * self.often_gone.sizes[key]
            self.target = max(0.0, self.target - step)

    def evict_for(self, key: TierKey, may_go: MayGo) -> TierKey | None:
        """REPLACE of the paper."""
        num_once = self.once.total
        is_long = num_once > self.target or (key in self.often_gone and num_once == self.target)
        lists = [(self.often, self.often_gone), (self.once, self.once_gone)]
        for here, gone in reversed(lists) if num_once and is_long else lists:
            victim = here.first(may_go)
            if victim is not None:
                gone.add(victim, here.pop(victim))
                return victim
        return None

    def insert(self, key: TierKey, size: int) -> None:
        """As read once; as read again where it is remembered."""
        is_again = False
        for gone in (self.once_gone, self.often_gone):
            if key in gone:
                gone.pop(key)
                is_again = True
        (self.often if is_again else self.once).add(key, size)
        self._forget_oldest()

    def used(self, key: TierKey) -> None:
        """Read again."""
        size = self.once.pop(key) if key in self.once else self.often.pop(key)
        self.often.add(key, size)

    def remove(self, key: TierKey) -> None:
        """Without memory of it."""
        (self.once if key in self.once else self.often).pop(key)

    def coldest(self, count: int) -> list[TierKey]:
        """Of the list that is to give next, then of the other one."""
        lists = [self.often.sizes, self.once.sizes]
        if self.once.total > self.target:
            lists.reverse()
        return list(itertools.islice(itertools.chain(*lists), count))

    def residents(self) -> set[TierKey]:
        """Of both lists."""
        return {*self.once.sizes, *self.often.sizes}

    def _forget_oldest(self) -> None:
        """Remember no more than one tier of blocks read once, and two in all."""
        while self.once.total + self.once_gone.total > self._capacity and self.once_gone.sizes:
            self.once_gone.drop_first()
        while self._num_known() > 2 * self._capacity and self.often_gone.sizes:
            self.often_gone.drop_first()

    def _num_known(self) -> int:
        return sum(one.total for one in (self.once, self.often, self.once_gone, self.often_gone))


def make_policy(name: PolicyName, *, capacity: int) -> EvictionPolicy:
    """A policy for a tier of `capacity` units."""
    return LruPolicy() if name is PolicyName.LRU else ArcPolicy(capacity)
