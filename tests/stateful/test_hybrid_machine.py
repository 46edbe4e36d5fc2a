"""The ledger of every cache family through any history a scheduler could write; audited after every step.

Each rule is one thing that may happen; support.kv_player does it and checks it against books that know which columns
must hold a block, and against a shadow of what is in the blocks.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.kv_families import FAMILIES
from support.kv_operations import OPERATIONS
from support.kv_player import Player

choices = st.randoms(use_true_random=False)


class HybridMachine(RuleBasedStateMachine):
    player: Player | None = None

    @initialize(family=st.sampled_from(sorted(FAMILIES)))
    def start(self, family: str) -> None:
        self.player = Player(FAMILIES[family], random.Random(0))

    @rule(rng=choices)
    def add(self, rng: random.Random) -> None:
        self.play("add", rng)
        self.play("admit", rng)

    @rule(rng=choices)
    def admit(self, rng: random.Random) -> None:
        self.play("admit", rng)

    @rule(rng=choices, what=st.sampled_from(["prefill", "verify", "decode"]))
    def go_on(self, rng: random.Random, what: str) -> None:
        self.play(what, rng)

    @rule(rng=choices, what=st.sampled_from(["dispatch", "retire", "end_load"]))
    def run(self, rng: random.Random, what: str) -> None:
        self.play(what, rng)

    @rule(rng=choices, what=st.sampled_from(["preempt", "abort", "pop", "release"]))
    def end(self, rng: random.Random, what: str) -> None:
        self.play(what, rng)

    @rule(rng=choices, what=st.sampled_from(["evict", "reset"]))
    def forget(self, rng: random.Random, what: str) -> None:
        self.play(what, rng)

    @rule(seed=st.integers(0, 1_000), num_operations=st.integers(1, 40))
    def go_on_without_aim(self, seed: int, num_operations: int) -> None:
        assert self.player is not None
        rng = self.player.rng = random.Random(seed)
        weights = [operation.weight for operation in OPERATIONS.values()]
        for operation in rng.choices(list(OPERATIONS.values()), weights, k=num_operations):
            operation.run(self.player)
            self.player.books.check()

    def play(self, what: str, rng: random.Random) -> None:
        assert self.player is not None
        self.player.rng = rng
        OPERATIONS[what].run(self.player)

    @invariant()
    def books_agree(self) -> None:
        if self.player is not None:
            self.player.books.check()

    def teardown(self) -> None:
        if self.player is not None:
            self.player.rng = random.Random(0)
            self.player.finish()


TestHybridLedger = HybridMachine.TestCase
TestHybridLedger.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
