"""The ledger of a tier through any history of stores, reads and failures, against sets; audited after every step."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockferry.engine.kv.tier_ledger import NO_BLOCK, TierLedger
from blockferry.engine.kv.tier_policies import PolicyName, TierKey, make_policy

keys = st.tuples(st.integers(0, 2), st.integers(0, 12)).map(lambda drawn: TierKey(drawn[0], bytes([drawn[1]])))
subsets = st.lists(st.integers(0, 50), max_size=4)


def choose(places: list[int], blocks: dict[int, Any]) -> np.ndarray:
    """Some of the blocks, none twice."""
    known = sorted(blocks)
    return np.array(sorted({known[place % len(known)] for place in places}) if known else [], np.int32)


class TierMachine(RuleBasedStateMachine):
    @initialize(
        units=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        num_units=st.integers(3, 14),
        policy=st.sampled_from(PolicyName),
    )
    def start(self, units: tuple[int, ...], num_units: int, policy: PolicyName) -> None:
        self.ledger = TierLedger(
            units_per_block=units, num_units=num_units, policy=make_policy(policy, capacity=num_units)
        )
        self.storing: dict[int, TierKey] = {}
        self.ready: dict[int, TierKey] = {}
        self.readers: dict[int, int] = {}  # of ready and leaving blocks
        self.leaving: dict[int, TierKey] = {}
        self.spilled: set[int] = set()

    @rule(wanted=st.lists(keys, min_size=1, max_size=4, unique=True))
    def begin_store(self, wanted: list[TierKey]) -> None:
        known = {*self.storing.values(), *self.ready.values()}
        groups = np.array([key.group for key in wanted], np.int32)
        blocks = self.ledger.begin_store(groups, [key.digest for key in wanted]).tolist()
        for block, key in zip(blocks, wanted):
            assert block == NO_BLOCK or key not in known, key
        self.forget_evicted()
        self.spilled -= set(blocks)
        self.storing |= {block: key for block, key in zip(blocks, wanted) if block != NO_BLOCK}

    def forget_evicted(self) -> None:
        """Only ready blocks that nobody reads may have gone."""
        for block, key in list(self.ready.items()):
            if self.find(key) != block:
                assert not self.readers.get(block), key
                del self.ready[block]

    @rule(places=subsets)
    def end_store(self, places: list[int]) -> None:
        blocks = choose(places, self.storing)
        self.ledger.end_store(blocks)
        self.ready |= {block: self.storing.pop(block) for block in blocks.tolist()}

    @rule(places=subsets)
    def fail_store(self, places: list[int]) -> None:
        blocks = choose(places, self.storing)
        self.ledger.fail_store(blocks)
        for block in blocks.tolist():
            del self.storing[block]

    @rule(places=subsets, counts_as_use=st.booleans())
    def pin(self, places: list[int], counts_as_use: bool) -> None:
        blocks = choose(places, self.ready)
        (self.ledger.pin if counts_as_use else self.ledger.spill)(blocks)
        self.spilled |= set() if counts_as_use else set(blocks.tolist())
        for block in blocks.tolist():
            self.readers[block] = self.readers.get(block, 0) + 1

    @precondition(lambda self: self.readers)
    @rule(places=subsets)
    def unpin(self, places: list[int]) -> None:
        blocks = choose(places, self.readers)
        self.ledger.unpin(blocks)
        for block in blocks.tolist():
            self.readers[block] -= 1
            if not self.readers[block]:
                del self.readers[block]
                self.leaving.pop(block, None)

    @rule(places=subsets)
    def discard(self, places: list[int]) -> None:
        blocks = choose(places, self.ready)
        self.ledger.discard(blocks)
        for block in blocks.tolist():
            key = self.ready.pop(block)
            if self.readers.get(block):
                self.leaving[block] = key

    @rule(count=st.integers(0, 5))
    def ask_for_the_coldest(self, count: int) -> None:
        coldest = self.ledger.coldest(count).tolist()
        assert len(coldest) <= count
        assert all(block in self.ready and block not in self.readers for block in coldest)
        assert not self.spilled & set(coldest)

    def find(self, key: TierKey) -> int:
        return int(self.ledger.find([key.digest])[0, key.group])

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        assert all(self.find(key) == block for block, key in self.ready.items())
        assert all(self.find(key) == NO_BLOCK or self.find(key) in self.ready for key in self.storing.values())
        stats = self.ledger.stats()
        assert stats.num_blocks == len(self.ready)
        units = self.ledger.units_per_block
        held = [*self.storing.values(), *self.ready.values(), *self.leaving.values()]
        assert stats.num_free_units == self.ledger.num_units - sum(units[key.group] for key in held)

    @invariant()
    def blocks_lie_apart(self) -> None:
        if not hasattr(self, "ledger"):
            return
        held = {**self.storing, **self.ready, **self.leaving}
        units = [
            self.ledger.units_of(np.array([block], np.int32), key.group).ravel().tolist() for block, key in held.items()
        ]
        flat = [unit for one in units for unit in one]
        assert len(set(flat)) == len(flat)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_tier_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="give it more memory"):
        TierLedger(units_per_block=(1, 4), num_units=3, policy=make_policy(PolicyName.LRU, capacity=3))
