"""What sequences are said to need of a ledger."""

import numpy as np
import pytest
from support.sim_families import family_groups
from support.slab_serving import geometry

from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.rows import RowTable

MAX_MODEL_LEN = 64


def make(family: str, *, num_blocks: int = 100, slab=None) -> KVCacheManager:
    """A ledger of hash blocks of 2 tokens, of which 4 tokens at most are in flight."""
    config = KVCacheConfig(num_blocks=num_blocks, groups=family_groups(family, 2), hash_block_size=2, slab=slab)
    rows = RowTable(max_rows=4, max_model_len=MAX_MODEL_LEN)
    return KVCacheManager(config, rows, options=LedgerOptions(max_in_flight_tokens=4))


def start(kv: KVCacheManager, row: int, num_tokens: int, *, num_new_tokens: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.int32)
    hashes = kv.hash_prompt(tokens)
    hit = kv.lookup(hashes, num_tokens)
    kv._rows.assign(row, tokens, num_prompt_tokens=num_tokens)
    kv.start_row(row, hashes)
    assert kv.allocate(row, num_new_tokens, AllocateOptions(hit=hit))
    kv._rows.num_computed_tokens[row] = hit.num_tokens + num_new_tokens


@pytest.mark.parametrize(
    ("family", "num_blocks"),
    [
        ("full", 5),
        ("full+full", 10),
        ("full+window", 5 + 4),  # 2 tokens of window and 4 in flight, which start and end inside blocks
        ("full+states", 5 + 2),
        ("full+states, hits inside states", 5 + 2 + 1),  # and a state to be copied
        ("full+states, hits inside both", 3 + 1 + 2 + 1),
        ("running states only", 5 + 1),
    ],
)
def test_sequence_of_nine_tokens_fits_exactly_from_the_blocks_on_that_it_may_hold_at_once(family, num_blocks):
    fits = [make(family, num_blocks=1 + count).room.can_ever_fit(9) for count in (num_blocks - 1, num_blocks)]
    assert fits == [False, True]


def test_longest_sequence_that_fits_is_bounded_by_the_model():
    assert make("full", num_blocks=6).room.max_tokens_that_fit == 10
    assert make("window", num_blocks=10).room.max_tokens_that_fit == MAX_MODEL_LEN


def test_blocks_of_a_hit_need_not_be_taken():
    kv = make("full+states")
    assert kv.room.to_hold(9, None) == 7
    start(kv, 0, 8, num_new_tokens=8)
    kv.start_step()
    hit = kv.lookup(kv.hash_prompt(np.arange(9, dtype=np.int32)), 9)
    assert hit.num_tokens == 8
    assert kv.room.to_hold(9, hit) == 7 - 4 - 1


def test_row_in_progress_needs_what_it_does_not_hold_yet():
    kv = make("full+full")
    start(kv, 0, 9, num_new_tokens=4)
    assert kv.room.to_finish(0) == 10 - 4
    assert kv.allocate(0, 5)
    assert kv.room.to_finish(0) == 0


def test_window_that_slides_needs_no_more_than_its_reach():
    kv = make("window")
    start(kv, 0, 60, num_new_tokens=4)
    needs = []
    for computed in range(4, 60, 4):
        kv._rows.num_computed_tokens[0] = computed
        assert kv.allocate(0, 4)
        needs.append(kv.room.to_finish(0))
    assert max(needs) <= 5
    assert needs[-1] == needs[-2]


def test_pages_of_slabs_count_by_their_size():
    kv = make("full+full", num_blocks=41, slab=geometry((1, 4), 10))
    assert kv.num_usable_blocks == 40
    assert kv.room.to_hold(9, None) == 5 * 4 + 5
