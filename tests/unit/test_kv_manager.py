"""The ledger's rules, one by one; the stateful and recorded tests cover their combinations."""

import numpy as np
import pytest

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.block_hash import lora_key
from blockferry.engine.kv.events import BlockStored, EventLog
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable


def ints(*values: int) -> Int32Array:
    return np.asarray(values, np.int32)


def tokens(num_tokens: int, first: int = 100) -> Int32Array:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def group(block_size: int = 4) -> KVCacheGroup:
    spec = AttentionSpec(block_size=block_size, content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=2))
    return KVCacheGroup(layer_ids=(0,), spec=spec)


class Ledger:
    """A ledger of 4-token blocks and its rows, with the few lines a scheduler would have."""

    def __init__(self, num_blocks: int = 11, *, events: EventLog | None = None, **options: object) -> None:
        self.rows = RowTable(max_rows=16, max_model_len=64)
        config = KVCacheConfig(num_blocks=num_blocks, groups=(group(),), hash_block_size=4)
        self.kv = KVCacheManager(config, self.rows, options=LedgerOptions(**options), events=events)  # type: ignore[arg-type]

    def admit(self, row: int, prompt: Int32Array, options: AllocateOptions | None = None, salt: str = "") -> bool:
        """Look up, allocate the rest of the prompt and count it as computed."""
        hashes = self.kv.hash_prompt(prompt, cache_salt=salt)
        hit = self.kv.lookup(hashes, len(prompt))
        self.rows.assign(row, prompt, num_prompt_tokens=len(prompt))
        self.kv.start_row(row, hashes)
        ok = self.kv.allocate(row, len(prompt) - hit.num_tokens, options or AllocateOptions(hit=hit))
        if ok:
            self.rows.num_computed_tokens[row] = len(prompt)
        return ok

    def decode(self, row: int, token: int) -> None:
        """The row's newest token is sampled, then one more step is planned for it."""
        self.rows.append(ints(row), ints(token))
        self.kv.cache_filled(ints(row))
        assert self.kv.allocate_decode(ints(row)) == 1
        self.rows.num_computed_tokens[row] += 1

    def hit(self, prompt: Int32Array, salt: str = "") -> int:
        return self.kv.lookup(self.kv.hash_prompt(prompt, cache_salt=salt), len(prompt)).num_tokens


# Lookup


def test_second_request_hits_the_first_ones_full_blocks() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(10))
    assert ledger.hit(tokens(10)) == 8


def test_full_hit_is_capped_below_the_last_token() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(8))
    assert ledger.hit(tokens(8)) == 4


def test_hits_are_shared_blocks() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(10))
    ledger.admit(1, tokens(10))
    assert ledger.kv.block_ids(0).tolist() == [1, 2, 3]
    assert ledger.kv.block_ids(1).tolist() == [1, 2, 4]


def test_salts_do_not_share() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(8), salt="a")
    assert (ledger.hit(tokens(9), salt="a"), ledger.hit(tokens(9), salt="b"), ledger.hit(tokens(9))) == (8, 0, 0)


def test_lora_adapters_do_not_share() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(8))
    hashes = ledger.kv.hash_prompt(tokens(9), extra_keys=(lora_key("adapter", max_model_len=64),))
    assert ledger.kv.lookup(hashes, 9).num_tokens == 0


def test_generated_tokens_extend_the_prefix() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(6))
    for token in (106, 107, 108):
        ledger.decode(0, token)
    assert ledger.hit(tokens(9)) == 8


def test_hit_rate_counts_sequences_that_got_in_not_every_lookup() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(9))
    for _ in range(3):
        ledger.hit(tokens(9))
    ledger.admit(1, tokens(9))
    stats = ledger.kv.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (18, 8)


def test_preempted_request_finds_its_own_blocks_again() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(10))
    ledger.kv.free(0)
    ledger.rows.clear(0)
    assert ledger.hit(tokens(10)) == 8


def test_ledger_without_caching_never_hits_but_accounts() -> None:
    ledger = Ledger(enable_caching=False)
    ledger.admit(0, tokens(8))
    ledger.decode(0, 5)
    assert ledger.hit(tokens(9)) == 0
    ledger.kv.free(0)
    assert ledger.kv.num_free_blocks == 10


# Allocation and refusal


def test_refusal_changes_nothing() -> None:
    ledger = Ledger(num_blocks=6)
    ledger.admit(0, tokens(12))
    before = (ledger.kv.num_free_blocks, ledger.kv.stats().num_keys, len(ledger.kv.take_deltas()))
    assert not ledger.admit(1, np.concatenate([tokens(8), tokens(12, first=500)]))
    assert (ledger.kv.num_free_blocks, ledger.kv.stats().num_keys) == before[:2]
    assert ledger.kv.num_blocks(1) == 0
    assert len(ledger.kv.take_deltas()) == 0


def test_nothing_to_allocate_is_an_error() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="asks for no token"):
        ledger.admit(0, tokens(0))


def test_hit_that_was_evicted_meanwhile_is_refused() -> None:
    ledger = Ledger(num_blocks=4)
    ledger.admit(0, tokens(9))
    hashes = ledger.kv.hash_prompt(tokens(9))
    hit = ledger.kv.lookup(hashes, 9)
    ledger.kv.free(0)
    ledger.admit(1, tokens(9, first=500))
    ledger.kv.free(1)
    ledger.rows.assign(2, tokens(9), num_prompt_tokens=9)
    ledger.kv.start_row(2, hashes)
    with pytest.raises(ValueError, match="out of date"):
        ledger.kv.allocate(2, 1, AllocateOptions(hit=hit))


def test_idle_hit_blocks_count_as_needed() -> None:
    ledger = Ledger(num_blocks=4)
    ledger.admit(0, tokens(9))
    ledger.kv.free(0)
    # 2 of the 3 free blocks are the hit itself, so only one is left for 8 further tokens
    assert not ledger.admit(1, tokens(16))
    assert ledger.admit(2, tokens(12))


def test_watermark_holds_back_blocks_only_when_asked() -> None:
    ledger = Ledger(num_blocks=11, watermark=0.3)
    assert not ledger.admit(0, tokens(32), AllocateOptions(apply_watermark=True))
    ledger.kv.free(0)
    assert ledger.admit(0, tokens(32))


def test_reserved_blocks_stay_free() -> None:
    ledger = Ledger(num_blocks=11)
    assert not ledger.admit(0, tokens(36), AllocateOptions(num_reserved_blocks=2))
    ledger.kv.free(0)
    assert ledger.admit(0, tokens(32), AllocateOptions(num_reserved_blocks=2))


def test_admission_gate_looks_at_the_whole_sequence() -> None:
    ledger = Ledger(num_blocks=6)
    ledger.rows.assign(0, tokens(24), num_prompt_tokens=24)
    ledger.kv.start_row(0, ledger.kv.hash_prompt(tokens(24)))
    assert not ledger.kv.allocate(0, 4, AllocateOptions(full_sequence_must_fit=True))
    assert ledger.kv.allocate(0, 4)


def test_lookahead_takes_slots_but_caches_nothing_of_them() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(4), AllocateOptions(num_lookahead_tokens=5))
    assert (ledger.kv.num_blocks(0), ledger.kv.stats().num_keys) == (3, 1)


def test_lookahead_is_clipped_at_max_model_len() -> None:
    ledger = Ledger(num_blocks=40)
    ledger.admit(0, tokens(62), AllocateOptions(num_lookahead_tokens=9))
    assert ledger.kv.num_blocks(0) == 16


def test_decode_lookahead_comes_from_the_constructor() -> None:
    ledger = Ledger(num_lookahead_tokens=5)
    ledger.admit(0, tokens(4))
    ledger.decode(0, 1)
    assert ledger.kv.num_blocks(0) == 3


def test_what_can_ever_fit_is_the_empty_pool() -> None:
    ledger = Ledger(num_blocks=6)
    ledger.admit(0, tokens(12))
    assert (ledger.kv.room.can_ever_fit(20), ledger.kv.room.can_ever_fit(21)) == (True, False)
    assert ledger.kv.room.max_tokens_that_fit == 20


def test_what_fits_is_also_limited_by_the_model() -> None:
    assert Ledger(num_blocks=100).kv.room.max_tokens_that_fit == 64


# Decode


def test_decode_serves_leading_rows_as_far_as_blocks_go() -> None:
    ledger = Ledger(num_blocks=6)
    for row in range(3):
        ledger.admit(row, tokens(4, first=100 * row))  # each is full: each needs a block
    assert ledger.kv.allocate_decode(ints(2, 0, 1)) == 2
    assert [ledger.kv.num_blocks(row) for row in range(3)] == [2, 1, 2]


def test_rows_with_room_are_served_even_when_the_pool_is_empty() -> None:
    ledger = Ledger(num_blocks=4)
    ledger.admit(0, tokens(3))
    ledger.admit(1, tokens(5, first=300))
    assert ledger.kv.num_free_blocks == 0
    assert ledger.kv.allocate_decode(ints(0, 1)) == 2


def test_no_rows_is_a_decode_step_too() -> None:
    ledger = Ledger()
    assert ledger.kv.allocate_decode(ints()) == 0
    ledger.kv.cache_filled(ints())


def test_decode_equals_allocating_row_by_row() -> None:
    together, apart = Ledger(num_blocks=200), Ledger(num_blocks=200)
    for ledger in (together, apart):
        for row in range(8):
            ledger.admit(row, tokens(row + 1, first=100 * row))
    rows = np.arange(8, dtype=np.int32)
    for step in range(24):
        assert together.kv.allocate_decode(rows) == 8
        for row in range(8):
            assert apart.kv.allocate(row, 1)
        for ledger in (together, apart):
            ledger.rows.num_computed_tokens[rows] += 1
            ledger.rows.append(rows, rows + step)
            ledger.kv.cache_filled(rows)
    for row in range(8):
        assert together.kv.block_ids(row).tolist() == apart.kv.block_ids(row).tolist()
    assert together.kv.stats() == apart.kv.stats()


def test_two_groups_get_blocks_group_by_group() -> None:
    rows = RowTable(max_rows=4, max_model_len=64)
    kv = KVCacheManager(KVCacheConfig(num_blocks=40, groups=(group(4), group(8)), hash_block_size=4), rows)
    for row in range(2):
        rows.assign(row, tokens(8, first=100 * row), num_prompt_tokens=8)
        kv.start_row(row, kv.hash_prompt(tokens(8, first=100 * row)))
        assert kv.allocate(row, 8)
        rows.num_computed_tokens[row] = 8
    assert kv.allocate_decode(ints(0, 1)) == 2
    assert [kv.block_ids(row, g).tolist() for row in (0, 1) for g in (0, 1)] == [[1, 2, 7], [3, 9], [4, 5, 8], [6, 10]]
    assert kv.lookup(kv.hash_prompt(tokens(9, first=100)), 9).num_tokens == 8
    assert (
        kv.lookup(kv.hash_prompt(tokens(8, first=100)), 8).num_tokens == 0
    )  # 7 tokens, floored to whole 8-token blocks
    kv.check_integrity()


# Delayed caching


def test_delayed_blocks_are_found_only_after_arrival() -> None:
    ledger = Ledger()
    ledger.rows.assign(0, tokens(8), num_prompt_tokens=8)
    ledger.kv.start_row(0, ledger.kv.hash_prompt(tokens(8)))
    assert ledger.kv.allocate(0, 0, AllocateOptions(num_external_tokens=8, delay_caching=True))
    assert ledger.hit(tokens(9)) == 0
    ledger.rows.num_computed_tokens[0] = 8
    ledger.kv.cache_filled(ints(0))
    assert ledger.hit(tokens(9)) == 8


def test_load_of_less_than_a_block_caches_nothing() -> None:
    ledger = Ledger()
    ledger.rows.assign(0, tokens(8), num_prompt_tokens=8)
    ledger.kv.start_row(0, ledger.kv.hash_prompt(tokens(3)))
    assert ledger.kv.allocate(0, 0, AllocateOptions(num_external_tokens=3, delay_caching=True))
    ledger.rows.num_computed_tokens[0] = 3
    ledger.kv.cache_filled(ints(0))
    assert ledger.kv.stats().num_keys == 0


def test_failed_load_is_recomputed_in_the_blocks_it_holds() -> None:
    ledger = Ledger()
    ledger.rows.assign(0, tokens(8), num_prompt_tokens=8)
    ledger.kv.start_row(0, ledger.kv.hash_prompt(tokens(8)))
    ledger.kv.allocate(0, 0, AllocateOptions(num_external_tokens=8, delay_caching=True))
    before = ledger.kv.block_ids(0).tolist()
    assert ledger.kv.allocate(0, 8)
    assert ledger.kv.block_ids(0).tolist() == before
    assert ledger.hit(tokens(9)) == 8


# Ends


def test_popped_blocks_stay_held_until_released() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(10))
    block_ids = ledger.kv.pop_blocks_for_free(0)
    ledger.kv.check_integrity()
    assert (ledger.kv.num_free_blocks, ledger.kv.num_blocks(0)) == (7, 0)
    ledger.kv.release(block_ids)
    assert ledger.kv.num_free_blocks == 10


def test_releasing_twice_is_an_error() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(10))
    block_ids = ledger.kv.pop_blocks_for_free(0)
    ledger.kv.release(block_ids)
    with pytest.raises(ValueError, match="not popped"):
        ledger.kv.release(block_ids)


def test_two_popped_rows_cannot_be_released_as_one() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(6))
    ledger.admit(1, tokens(6))
    both = (np.concatenate([ledger.kv.pop_blocks_for_free(0)[0], ledger.kv.pop_blocks_for_free(1)[0]]),)
    with pytest.raises(ValueError, match="repeat"):
        ledger.kv.release(both)
    ledger.kv.check_integrity()


def test_one_shared_block_can_be_popped_by_two_rows() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(6))
    ledger.admit(1, tokens(6))
    first, second = ledger.kv.pop_blocks_for_free(0), ledger.kv.pop_blocks_for_free(1)
    ledger.kv.release(first)
    ledger.kv.check_integrity()
    ledger.kv.release(second)
    assert ledger.kv.num_free_blocks == 10


def test_reset_is_refused_while_a_block_is_held() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(10))
    assert not ledger.kv.reset_prefix_cache()
    ledger.kv.free(0)
    assert ledger.kv.reset_prefix_cache()
    assert ledger.hit(tokens(10)) == 0


def test_evicted_block_is_not_found_but_still_held() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(10))
    ledger.kv.evict_blocks(ints(2))
    assert (ledger.hit(tokens(10)), ledger.kv.num_blocks(0)) == (4, 3)


def test_deltas_of_a_freed_row_are_dropped() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(5))
    ledger.admit(1, tokens(5, first=300))
    ledger.kv.free(0)
    assert ledger.kv.take_deltas().row.tolist() == [1, 1]


def test_usage_is_the_held_share() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(20))
    assert ledger.kv.usage == pytest.approx(0.5)


# Events, audit, arguments


def test_stored_event_carries_what_an_observer_needs_to_rebuild_the_chain() -> None:
    ledger = Ledger(events=EventLog())
    ledger.admit(0, tokens(9))
    ledger.decode(0, 1)
    ledger.admit(1, tokens(13))
    first, second = ledger.kv.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_hash, len(first.block_hashes), first.token_ids.tolist()) == (None, 2, tokens(8).tolist())
    assert (first.kind, first.group, first.block_size, first.sliding_window) == ("full_attention", 0, 4, None)
    assert (second.parent_hash, second.token_ids.tolist()) == (first.block_hashes[-1], [108, 109, 110, 111])


def test_audit_names_a_lost_block() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(5))
    ledger.kv._coordinator.managers[0].drop(0)
    with pytest.raises(LedgerCorrupted, match="ref_cnt differs"):
        ledger.kv.check_integrity()


def test_audit_names_a_hash_that_cannot_be_found() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(5))
    ledger.kv._index.clear()
    with pytest.raises(LedgerCorrupted, match="cannot be found"):
        ledger.kv.check_integrity()


def test_audit_names_a_block_both_free_and_held() -> None:
    ledger = Ledger()
    ledger.admit(0, tokens(5))
    ledger.kv._pools.pools[0].queue.push_back(ints(1))
    with pytest.raises(LedgerCorrupted, match="both free and held"):
        ledger.kv.check_integrity()


def test_block_sizes_must_be_multiples_of_the_hash_block() -> None:
    with pytest.raises(ValueError, match="block_size=6"):
        KVCacheManager(
            KVCacheConfig(num_blocks=4, groups=(group(6),), hash_block_size=4),
            RowTable(max_rows=1, max_model_len=16),
        )


def test_watermark_must_be_a_fraction() -> None:
    with pytest.raises(ValueError, match=r"watermark=1\.5"):
        Ledger(watermark=1.5)


def test_model_shorter_than_a_block_works() -> None:
    rows = RowTable(max_rows=1, max_model_len=3)
    kv = KVCacheManager(KVCacheConfig(num_blocks=4, groups=(group(),), hash_block_size=4), rows)
    rows.assign(0, tokens(2), num_prompt_tokens=2)
    kv.start_row(0, kv.hash_prompt(tokens(2)))
    assert kv.allocate(0, 2)
    rows.num_computed_tokens[0] = 2
    assert kv.allocate_decode(ints(0)) == 1
    kv.cache_filled(ints(0))
    assert kv.num_blocks(0) == 1
