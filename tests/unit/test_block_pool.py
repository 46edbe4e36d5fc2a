"""The block pool: order of reuse, owners, and what can be found under which hash."""

import numpy as np
import pytest

from blockferry.engine.kv.block_pool import NULL_BLOCK_ID, BlockPool
from blockferry.engine.kv.events import BlockRemoved, EventLog
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.request import Int32Array


def ids(*block_ids: int) -> Int32Array:
    return np.asarray(block_ids, np.int32)


def make(num_blocks: int, *, num_groups: int = 1, events: EventLog | None = None) -> BlockPool:
    return BlockPool(num_blocks, index=PrefixIndex(num_groups, num_expected=num_blocks), events=events)


def cache(pool: BlockPool, group: int, block_ids: Int32Array, digests: list[bytes]) -> None:
    pool.cache(np.full(len(block_ids), group, np.int32), block_ids, pool.index.obtain(digests))


def found(pool: BlockPool, *digests: bytes, group: int = 0) -> list[int]:
    return [block for block in pool.index.blocks[pool.index.find(digests), group].tolist() if block]


def test_fresh_pool_hands_out_ascending_ids_without_the_null_block() -> None:
    pool = make(6)
    assert pool.take(5).tolist() == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_unhashed_blocks_are_reused_first_in_the_order_freed() -> None:
    pool = make(8)
    pool.take(5)
    pool.free(ids(5, 4, 3))
    assert pool.queue.order().tolist() == [5, 4, 3, 6, 7]


def test_hashed_blocks_are_reused_last() -> None:
    pool = make(8)
    pool.take(5)
    cache(pool, 0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(5, 2, 1))
    assert pool.queue.order().tolist() == [5, 6, 7, 2, 1]


def test_touched_block_leaves_the_queue_and_returns_to_its_end() -> None:
    pool = make(5)
    pool.take(2)
    cache(pool, 0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(2, 1))
    pool.touch(ids(2))
    assert pool.queue.order().tolist() == [3, 4, 1]
    pool.free(ids(2))
    assert pool.queue.order().tolist() == [3, 4, 1, 2]


def test_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = make(4)
    pool.take(1)
    cache(pool, 0, ids(1), [b"a"])
    pool.touch(ids(1))
    pool.free(ids(1))
    assert pool.num_free == 2
    pool.free(ids(1))
    assert pool.num_free == 3


def test_reused_block_is_no_longer_found() -> None:
    pool = make(2)
    pool.take(1)
    cache(pool, 0, ids(1), [b"a"])
    pool.free(ids(1))
    assert found(pool, b"a") == [1]
    pool.take(1)
    assert found(pool, b"a") == []
    assert pool.num_evicted == 1


def test_removing_one_carrier_keeps_the_other_findable() -> None:
    pool = make(4)
    pool.take(2)
    cache(pool, 0, ids(1, 2), [b"a", b"a"])
    assert found(pool, b"a") == [1]
    pool.drop_hashes(ids(1))
    assert found(pool, b"a") == [2]
    pool.drop_hashes(ids(2))
    assert found(pool, b"a") == []


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = make(4, num_groups=2)
    pool.take(1)
    cache(pool, 0, ids(1), [b"a"])
    assert found(pool, b"a", group=1) == []


def test_dropping_a_hash_twice_changes_nothing() -> None:
    pool = make(4)
    pool.take(1)
    cache(pool, 0, ids(1), [b"a"])
    pool.drop_hashes(ids(1, 3, NULL_BLOCK_ID))
    pool.drop_hashes(ids(1))
    assert pool.index.num_entries == 0


def test_null_entries_are_not_freed() -> None:
    pool = make(4)
    pool.take(1)
    pool.free(ids(1, NULL_BLOCK_ID))
    assert pool.num_free == 3


def test_freeing_a_free_block_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError):
        make(4).free(ids(1))


def test_clearing_keeps_the_order_of_reuse() -> None:
    pool = make(5)
    pool.take(2)
    cache(pool, 0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(2, 1))
    pool.forget_hashes()
    pool.index.clear()
    assert found(pool, b"a") == []
    assert pool.queue.order().tolist() == [3, 4, 2, 1]


def test_events_tell_what_left_the_cache_in_order() -> None:
    events = EventLog()
    pool = make(3, events=events)
    pool.take(2)
    cache(pool, 0, ids(1, 2), [b"a", b"b"])
    pool.free(ids(2, 1))
    pool.take(2)
    assert events.take() == [
        BlockRemoved(group=0, block_hashes=(b"b",)),
        BlockRemoved(group=0, block_hashes=(b"a",)),
    ]


def test_block_shared_by_rows_that_end_together_is_freed_once() -> None:
    pool = make(4)
    pool.take(2)
    pool.touch(ids(1))
    pool.free(ids(1, 2, 1))
    assert pool.queue.order().tolist() == [1, 2, 3]


def test_full_block_stays_findable_under_the_hash_of_its_head() -> None:
    pool = make(4)
    pool.take(1)
    pool.cache_also(0, 1, int(pool.index.obtain([b"head"]).ids[0]))
    cache(pool, 0, ids(1), [b"whole"])
    assert found(pool, b"head", b"whole") == [1, 1]
    pool.drop_hashes(ids(1))
    assert found(pool, b"head", b"whole") == []
    assert pool.further == {}


def test_moved_hashes_find_the_copy() -> None:
    pool = make(4)
    pool.take(2)
    cache(pool, 0, ids(1), [b"a"])
    pool.cache_also(0, 1, int(pool.index.obtain([b"b"]).ids[0]))
    pool.move_hashes(1, 2)
    assert found(pool, b"a", b"b") == [2, 2]
    pool.drop_hashes(ids(1))
    assert found(pool, b"a", b"b") == [2, 2]
