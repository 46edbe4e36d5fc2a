"""States in the ledger, and what goes with them: cases that random histories found, each as small as it gets."""

import dataclasses

import numpy as np
from support.kv_configs import attention, states

from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import FullReach
from blockferry.engine.kv.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, MambaSpec, ScratchRingSpec
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

FULL = attention(4, FullReach())
ROW = 0


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def ledger(
    *specs: KVCacheSpec, num_blocks: int = 20, hash_block_size: int = 4, num_hash_lookahead_tokens: int = 0
) -> tuple[KVCacheManager, RowTable]:
    rows = RowTable(max_rows=2, max_model_len=64)
    groups = tuple(KVCacheGroup(layer_ids=(number,), spec=spec) for number, spec in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks, groups=groups, hash_block_size=hash_block_size)
    options = LedgerOptions(num_hash_lookahead_tokens=num_hash_lookahead_tokens)
    return KVCacheManager(config, rows, options=options), rows


def start(kv: KVCacheManager, rows: RowTable, num_tokens: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.int32)
    rows.assign(ROW, tokens, num_prompt_tokens=num_tokens)
    kv.start_row(ROW, kv.hash_prompt(tokens))


def compute(kv: KVCacheManager, rows: RowTable, stop: int, options: AllocateOptions | None = None) -> bool:
    kv.start_step()
    is_served = kv.allocate(ROW, stop - int(rows.num_computed_tokens[ROW]), options or AllocateOptions())
    rows.num_computed_tokens[ROW] = stop
    return is_served


def test_states_are_freed_that_steps_in_flight_kept_in_reach() -> None:
    kv, rows = ledger(states(4))
    start(kv, rows, 40)
    compute(kv, rows, 4)
    compute(kv, rows, 16)
    compute(kv, rows, 28, AllocateOptions(num_in_flight_tokens=12))
    compute(kv, rows, 32)
    assert np.flatnonzero(kv.block_ids(ROW)).tolist() == [6, 7]


def test_external_state_and_the_running_one_are_two_blocks() -> None:
    kv, rows = ledger(states(4), num_blocks=2)
    start(kv, rows, 12)
    external = AllocateOptions(num_external_tokens=4)
    kv.start_step()
    assert not kv.allocate(ROW, 4, external)
    kv.check_integrity()


def test_hit_state_below_an_external_one_costs_nothing() -> None:
    kv, rows = ledger(states(4), num_blocks=2)
    start(kv, rows, 12)
    compute(kv, rows, 4)
    kv.free(ROW)
    rows.clear(ROW)
    start(kv, rows, 12)
    kv.start_step()
    hit = kv.lookup(kv.hash_prompt(np.arange(12, dtype=np.int32)), 12)
    external = AllocateOptions(hit=hit, num_external_tokens=4, delay_caching=True)
    assert hit.num_tokens == 4
    assert kv.allocate(ROW, 0, external)
    kv.check_integrity()


def test_evicted_tail_is_not_copied() -> None:
    kv, rows = ledger(FULL, states(8))
    start(kv, rows, 14)
    compute(kv, rows, 12)
    kv.evict_blocks(kv.block_ids(ROW, 1)[-1:])
    compute(kv, rows, 14)
    assert not len(kv.take_copies())
    kv.check_integrity()


def test_state_is_not_kept_under_a_shorter_length_than_its_own() -> None:
    kv, rows = ledger(attention(4, FullReach()), states(4), hash_block_size=1, num_hash_lookahead_tokens=1)
    start(kv, rows, 10)
    compute(kv, rows, 8)
    compute(kv, rows, 10)
    hit = kv.lookup(kv.hash_prompt(np.arange(11, dtype=np.int32)), 11)
    assert hit.num_tokens == 8


def test_refused_decode_of_a_model_with_a_ring_changes_nothing() -> None:
    kv, rows = ledger(FULL, ScratchRingSpec(block_size=4, page_bytes=64), num_blocks=3)
    start(kv, rows, 4)
    compute(kv, rows, 4)
    rows.append(ints(ROW), ints(7))
    assert kv.allocate_decode(ints(ROW)) == 0
    kv.check_integrity()


def exporting(block_size: int) -> MambaSpec:
    return dataclasses.replace(states(block_size), num_prefill_checkpoint_blocks=1)


def test_state_from_within_a_chunk_is_found_at_the_prompts_last_boundary() -> None:
    kv, rows = ledger(exporting(4), FULL)
    start(kv, rows, 14)
    compute(kv, rows, 14)
    assert np.flatnonzero(kv.block_ids(ROW)).tolist() == [2, 3]  # of 12 tokens, and running
    kv.check_integrity()
    kv.start_step()
    tokens = np.arange(14, dtype=np.int32)
    assert kv.lookup(kv.hash_prompt(tokens), 14).num_tokens == 12


def test_exported_state_of_part_of_a_block_is_found_under_its_own_length_only() -> None:
    kv, rows = ledger(exporting(16), FULL)
    start(kv, rows, 27)
    compute(kv, rows, 27)
    assert np.flatnonzero(kv.block_ids(ROW)).tolist() == [0, 1]  # the state of 24 tokens is in the block before
    kv.start_step()
    tokens = np.arange(40, dtype=np.int32)
    assert [kv.lookup(kv.hash_prompt(tokens[:count]), count).num_tokens for count in (20, 25, 40)] == [0, 24, 24]
    kv.free(ROW)
    kv.check_integrity()


def test_exported_state_needs_a_block_more() -> None:
    kv, rows = ledger(exporting(4), num_blocks=2)
    start(kv, rows, 14)
    assert not compute(kv, rows, 14)
    kv.check_integrity()
    kv, rows = ledger(exporting(4), num_blocks=3)
    start(kv, rows, 14)
    assert compute(kv, rows, 14)
