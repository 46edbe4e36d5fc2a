"""The prefix index: entries shared by groups, duplicates in order, and nothing left behind."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockferry.engine.kv.prefix_index import NO_ENTRY, PrefixIndex
from blockferry.engine.request import Int32Array


def ids(*block_ids: int) -> Int32Array:
    return np.asarray(block_ids, np.int32)


def add(index: PrefixIndex, group: int, entries: Int32Array, block_ids: Int32Array) -> None:
    index.add(index.places(np.full(len(entries), group, np.int32), entries), block_ids)


def test_run_stops_at_the_first_gap() -> None:
    index = PrefixIndex(1, num_expected=4)
    add(index, 0, index.obtain([b"a", b"c"]).ids, ids(1, 3))
    assert index.blocks[index.find_run([b"a", b"b", b"c"]), 0].tolist() == [1]


def test_groups_share_an_entry() -> None:
    index = PrefixIndex(2, num_expected=4)
    entries = index.obtain([b"a"]).ids
    add(index, 0, entries, ids(1))
    add(index, 1, index.obtain([b"a"]).ids, ids(2))
    assert index.blocks[entries[0]].tolist() == [1, 2]
    assert (index.num_entries, index.num_keys) == (1, 2)


def test_first_of_three_carriers_is_found_until_it_goes() -> None:
    index = PrefixIndex(1, num_expected=4)
    entries = index.obtain([b"a", b"a", b"a"]).ids
    add(index, 0, entries, ids(5, 6, 7))
    index.remove(index.place(0, int(entries[0])), 6)
    assert index.blocks[entries[0], 0] == 5
    index.remove(index.place(0, int(entries[0])), 5)
    assert index.blocks[entries[0], 0] == 7
    assert (index.num_keys, index.num_carriers()) == (1, 1)


def test_entry_without_carriers_is_used_again() -> None:
    index = PrefixIndex(1, num_expected=1)
    for number in range(5):
        entries = index.obtain([bytes([number])]).ids
        add(index, 0, entries, ids(number + 1))
        index.remove(index.place(0, int(entries[0])), number + 1)
    assert len(index.blocks) == 2
    assert index.find([bytes([4])]).tolist() == [NO_ENTRY]


def test_index_grows_beyond_what_was_expected() -> None:
    index = PrefixIndex(1, num_expected=1)
    add(index, 0, index.obtain([bytes([n]) for n in range(9)]).ids, np.arange(1, 10, dtype=np.int32))
    assert index.blocks[index.find([bytes([8])]), 0].tolist() == [9]


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.booleans()), max_size=40
    )
)
def test_index_finds_what_lists_of_carriers_find(steps: list[tuple[int, list[int], bool]]) -> None:
    index = PrefixIndex(2, num_expected=2)
    carriers: dict[tuple[int, int], list[int]] = {}
    next_block = 1
    for group, numbers, is_removal in steps:
        if is_removal:
            for number in numbers:
                held = carriers.get((group, number))
                if held:
                    gone = held.pop(len(held) // 2)
                    index.remove(index.place(group, int(index.find([bytes([number])])[0])), gone)
            continue
        blocks = list(range(next_block, next_block + len(numbers)))
        next_block += len(numbers)
        add(index, group, index.obtain([bytes([number]) for number in numbers]).ids, ids(*blocks))
        for number, block in zip(numbers, blocks, strict=True):
            carriers.setdefault((group, number), []).append(block)
    for group in range(2):
        for number in range(6):
            wanted = carriers.get((group, number), [])
            found = index.blocks[index.find([bytes([number])])[0], group]
            assert found == (wanted[0] if wanted else 0)
    assert index.num_keys == sum(bool(held) for held in carriers.values())
    assert index.num_carriers() == sum(len(held) for held in carriers.values())
    index.check()
