"""The stamped ring against an OrderedDict that keeps the order the obvious way."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.engine.kv.free_queue import FreeQueue


class OracleQueue:
    """A linked list's order, kept by an OrderedDict."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    def take(self, count: int) -> list[int]:
        return [self.free.popitem(last=False)[0] for _ in range(count)]

    def push_front(self, ids: list[int]) -> None:
        for block_id in reversed(ids):
            self.free[block_id] = None
            self.free.move_to_end(block_id, last=False)

    def push_back(self, ids: list[int]) -> None:
        for block_id in ids:
            self.free[block_id] = None

    def remove(self, ids: list[int]) -> None:
        for block_id in ids:
            del self.free[block_id]


@settings(max_examples=150, deadline=None)
@given(num_blocks=st.integers(2, 40), data=st.data())
def test_order_is_that_of_a_linked_list(num_blocks: int, data: st.DataObject) -> None:
    queue, oracle = FreeQueue(num_blocks), OracleQueue(num_blocks)
    held: list[int] = []
    for verb in data.draw(st.lists(st.sampled_from(["take", "peek", "front", "back", "remove"]), max_size=60)):
        if verb == "take":
            count = data.draw(st.integers(0, len(oracle.free)))
            taken = queue.take(count).tolist()
            assert taken == oracle.take(count)
            held += taken
        elif verb == "peek":
            count = data.draw(st.integers(0, num_blocks))
            assert queue.peek(count).tolist() == list(oracle.free)[:count]
        elif verb == "remove":
            gone = data.draw(st.lists(st.sampled_from(sorted(oracle.free)), unique=True)) if oracle.free else []
            queue.remove(np.asarray(gone, np.int32))
            oracle.remove(gone)
            held += gone
        else:
            back = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
            held = [block_id for block_id in held if block_id not in back]
            getattr(queue, f"push_{verb}")(np.asarray(back, np.int32))
            getattr(oracle, f"push_{verb}")(back)
        assert queue.order().tolist() == list(oracle.free)
        assert queue.num_free == len(oracle.free)


def test_fresh_queue_is_ascending_without_the_null_block() -> None:
    assert FreeQueue(5).order().tolist() == [1, 2, 3, 4]


def test_blocks_before_the_first_free_one_are_not_free() -> None:
    queue = FreeQueue(6, first_free=4)
    assert queue.order().tolist() == [4, 5]
    assert queue.num_free == 2
    assert not queue.is_free(np.array([0, 1, 3], np.int32)).any()
    queue.push_front(np.array([2], np.int32))
    assert queue.take(3).tolist() == [2, 4, 5]


def test_looking_ahead_drops_the_dead_entries_passed() -> None:
    queue = FreeQueue(1000)
    queue.remove(np.arange(3, 900, dtype=np.int32))
    assert queue.peek(4).tolist() == [1, 2, 900, 901]
    assert queue._tail - queue._head == queue.num_free
    assert queue.order().tolist() == [1, 2, *range(900, 1000)]


def test_long_random_history_keeps_the_order_across_many_compactions() -> None:
    rng = np.random.default_rng(7)
    queue, oracle = FreeQueue(100), OracleQueue(100)
    held: list[int] = []
    for _ in range(4000):
        if rng.random() < 0.5:
            count = int(rng.integers(0, min(9, len(oracle.free)) + 1))
            taken = queue.take(count).tolist()
            assert taken == oracle.take(count)
            held += taken
        else:
            rng.shuffle(held)
            cut = int(rng.integers(0, len(held) + 1))
            back, held = held[:cut], held[cut:]
            verb = "push_front" if rng.random() < 0.5 else "push_back"
            getattr(queue, verb)(np.asarray(back, np.int32))
            getattr(oracle, verb)(back)
    assert queue.order().tolist() == list(oracle.free)


@pytest.mark.parametrize("count", [4, 5])
def test_taking_more_than_is_free_is_a_bug_of_ours(count: int) -> None:
    with pytest.raises(AssertionError):
        FreeQueue(4).take(count)
