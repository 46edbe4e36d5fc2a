"""The block pool: order of reuse, owners, and what can be found under which hash."""

import numpy as np
import pytest

from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.events import AllBlocksCleared, BlockRemoved, EventLog
from blockferry.engine.kv.prefix_map import PrefixMap
from blockferry.engine.request import Int32Array


def ids(*block_ids: int) -> Int32Array:
    return np.asarray(block_ids, np.int32)


def found(pool: BlockPool, *digests: bytes) -> list[int]:
    return pool.prefix_maps[0].longest_run(digests)


def test_fresh_pool_hands_out_ascending_ids_without_the_null_block() -> None:
    pool = BlockPool(6)
    assert pool.take(5).tolist() == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_unhashed_blocks_are_reused_first_in_the_order_freed() -> None:
    pool = BlockPool(8)
    pool.take(5)
    pool.free(ids(5, 4, 3))
    assert pool.queue.order().tolist() == [5, 4, 3, 6, 7]


def test_hashed_blocks_are_reused_last() -> None:
    pool = BlockPool(8)
    pool.take(5)
    pool.cache(0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(5, 2, 1))
    assert pool.queue.order().tolist() == [5, 6, 7, 2, 1]


def test_touched_block_leaves_the_queue_and_returns_to_its_end() -> None:
    pool = BlockPool(5)
    pool.take(2)
    pool.cache(0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(2, 1))
    pool.touch(ids(2))
    assert pool.queue.order().tolist() == [3, 4, 1]
    pool.free(ids(2))
    assert pool.queue.order().tolist() == [3, 4, 1, 2]


def test_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(4)
    pool.take(1)
    pool.cache(0, ids(1), [b"a"])
    pool.touch(ids(1))
    pool.free(ids(1))
    assert pool.num_free == 2
    pool.free(ids(1))
    assert pool.num_free == 3


def test_reused_block_is_no_longer_found() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool.cache(0, ids(1), [b"a"])
    pool.free(ids(1))
    assert found(pool, b"a") == [1]
    pool.take(1)
    assert found(pool, b"a") == []
    assert pool.num_evicted == 1


def test_removing_one_carrier_keeps_the_other_findable() -> None:
    pool = BlockPool(4)
    pool.take(2)
    pool.cache(0, ids(1, 2), [b"a", b"a"])
    assert found(pool, b"a") == [1]
    pool.drop_hashes(ids(1))
    assert found(pool, b"a") == [2]
    pool.drop_hashes(ids(2))
    assert found(pool, b"a") == []


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(4, num_groups=2)
    pool.take(1)
    pool.cache(0, ids(1), [b"a"])
    assert pool.prefix_maps[1].longest_run([b"a"]) == []


def test_dropping_a_hash_twice_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.take(1)
    pool.cache(0, ids(1), [b"a"])
    pool.drop_hashes(ids(1, 3, NULL_BLOCK_ID))
    pool.drop_hashes(ids(1))
    assert len(pool.prefix_maps[0]) == 0


def test_null_entries_are_neither_cached_nor_freed() -> None:
    pool = BlockPool(4)
    pool.take(1)
    pool.cache(0, ids(NULL_BLOCK_ID, 1), [b"a", b"b"])
    assert found(pool, b"a") == []
    pool.free(ids(1, NULL_BLOCK_ID))
    assert pool.num_free == 3


def test_freeing_a_free_block_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError):
        BlockPool(4).free(ids(1))


def test_clearing_keeps_the_order_of_reuse() -> None:
    pool = BlockPool(5)
    pool.take(2)
    pool.cache(0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(2, 1))
    pool.clear_hashes()
    assert found(pool, b"a") == []
    assert pool.queue.order().tolist() == [3, 4, 2, 1]


def test_events_tell_what_left_the_cache_in_order() -> None:
    events = EventLog()
    pool = BlockPool(3, events=events)
    pool.take(2)
    pool.cache(0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(2, 1))
    pool.take(2)
    pool.clear_hashes()
    assert events.take() == [
        BlockRemoved(group=0, block_hashes=(b"b",)),
        BlockRemoved(group=0, block_hashes=(b"a",)),
        AllBlocksCleared(),
    ]


def test_longest_run_stops_at_the_first_gap() -> None:
    prefix_map = PrefixMap()
    prefix_map.add([b"a", b"c"], [1, 3])
    assert prefix_map.longest_run([b"a", b"b", b"c"]) == [1]


def test_first_of_three_carriers_is_found_until_it_goes() -> None:
    prefix_map = PrefixMap()
    prefix_map.add([b"a", b"a", b"a"], [5, 6, 7])
    prefix_map.remove(b"a", 6)
    assert prefix_map.longest_run([b"a"]) == [5]
    prefix_map.remove(b"a", 5)
    assert prefix_map.longest_run([b"a"]) == [7]
    assert (len(prefix_map), prefix_map.num_carriers()) == (1, 1)
