"""Many random operations on a ledger of every cache family: the books agree after each, and all blocks end up free."""

import collections
import random

import pytest
from support.kv_families import FAMILIES
from support.kv_operations import OPERATIONS
from support.kv_player import Player

NUM_OPERATIONS_SHORT = 10_000
NUM_OPERATIONS = 100_000
HISTORY = 400  # operations after which a new ledger is taken


def play(family: str, seed: int, num_operations: int) -> Player:
    """One history without aim."""
    rng = random.Random(f"{family} {seed}")
    player = Player(FAMILIES[family], rng)
    weights = [operation.weight for operation in OPERATIONS.values()]
    for operation in rng.choices(list(OPERATIONS.values()), weights, k=num_operations):
        operation.run(player)
        player.books.check()
    player.finish()
    return player


@pytest.mark.parametrize("family", FAMILIES)
def test_ledger_survives_a_random_history(family: str) -> None:
    player = play(family, 0, NUM_OPERATIONS_SHORT // len(FAMILIES) + 1)
    assert player.kv.num_free_blocks == player.kv.num_usable_blocks


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_ledger_survives_long_random_histories(family: str) -> None:
    num_histories = -(-NUM_OPERATIONS // len(FAMILIES) // HISTORY)
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(1, num_histories + 1):
        counts += play(family, seed, HISTORY).counts
    assert counts["loads"] > 0
    assert counts["hits"] > 0 or not FAMILIES[family].options.enable_caching
