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


def decode(kv: KVCacheManager, rows: RowTable, *, num_accepted: int = 0) -> None:
    """A step of ROW's last known token and drafts, of which num_accepted come true."""
    kv.start_step()
    assert kv.allocate_decode(ints(ROW)) == 1
    for _ in range(num_accepted + 1):
        rows.append(ints(ROW), ints(7))
    rows.num_computed_tokens[ROW] += num_accepted + 1
    kv.cache_filled(ints(ROW))


def drafting(block_size: int, num_drafts: int, num_tokens: int) -> tuple[KVCacheManager, RowTable]:
    """A row whose tokens but the last are computed."""
    kv, rows = ledger(states(block_size, num_speculative=num_drafts), hash_block_size=block_size)
    start(kv, rows, num_tokens - 1)
    compute(kv, rows, num_tokens - 1)
    rows.append(ints(ROW), ints(7))
    return kv, rows


def test_first_drafts_block_becomes_the_running_states_where_that_moves_on() -> None:
    kv, rows = drafting(4, 2, num_tokens=8)
    before = kv.block_ids(ROW).tolist()
    decode(kv, rows, num_accepted=1)
    decode(kv, rows)
    after = kv.block_ids(ROW).tolist()
    assert after[:4] == [0, 0, before[2], before[3]]
    assert len(after) == 5
    kv.check_integrity()


def test_boundary_that_drafts_went_past_is_found_in_the_running_states_block() -> None:
    kv, rows = drafting(4, 2, num_tokens=7)
    running = int(kv.block_ids(ROW)[1])
    decode(kv, rows, num_accepted=2)
    decode(kv, rows)
    kv.start_step()
    hit = kv.lookup(kv.hash_prompt(rows.tokens(ROW)), int(rows.num_tokens[ROW]))
    assert (hit.num_tokens, hit.block_ids[0].tolist()) == (8, [0, running])
    kv.check_integrity()


def test_drafts_own_blocks_are_neither_found_nor_freed_where_blocks_are_shorter() -> None:
    kv, rows = drafting(2, 3, num_tokens=4)
    drafts = kv.block_ids(ROW)[2:].tolist()
    decode(kv, rows, num_accepted=3)
    kv.start_step()
    assert kv.lookup(kv.hash_prompt(rows.tokens(ROW)), int(rows.num_tokens[ROW])).num_tokens == 4
    decode(kv, rows)
    assert set(drafts) <= set(kv.block_ids(ROW).tolist())
    kv.check_integrity()


def test_rows_whose_states_move_on_in_one_step_take_blocks_as_each_would_alone() -> None:
    rows = RowTable(max_rows=64, max_model_len=64)
    group = KVCacheGroup(layer_ids=(0,), spec=states(4, num_speculative=3))
    kv = KVCacheManager(KVCacheConfig(num_blocks=64 * 6, groups=(group,), hash_block_size=4), rows)
    every = np.arange(64, dtype=np.int32)
    for row in every.tolist():
        tokens = np.arange(9, dtype=np.int32) + 10 * row
        rows.assign(row, tokens, num_prompt_tokens=9)
        kv.start_row(row, kv.hash_prompt(tokens))
        assert kv.allocate(row, 8 + row % 2)
        rows.num_computed_tokens[row] = 8 + row % 2
    before = [kv.block_ids(row).tolist() for row in every.tolist()]
    kv.start_step()
    assert kv.allocate_decode(every) == 64
    after = [kv.block_ids(row).tolist() for row in every.tolist()]
    assert all(mine[1:-1] == old[1:] for mine, old in zip(after[::2], before[::2]))
    assert after[1::2] == before[1::2]
    kv.check_integrity()
