"""Pools of slabs: which page is reused next, memory that moves between groups, and the audit of both."""

import pytest
from support.slab_ground import Ground
from support.slab_serving import geometry, ints

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.events import BlockRemoved, EventLog
from blockferry.engine.kv.slab_queue import UNOWNED

# Whose the slabs are


def test_a_group_that_takes_pages_gets_slabs_one_after_the_other() -> None:
    ground = Ground(geometry((2, 3), 4))
    assert ground.take(0, 3) == [1, 2, 3]
    assert ground.take(1, 1) == [7]
    assert ground.owners() == [0, 0, 1, UNOWNED]


def test_pages_left_in_a_slab_go_before_another_slab_is_claimed() -> None:
    ground = Ground(geometry((4, 4), 4))
    ground.take(0, 1)
    ground.take(1, 1)
    assert ground.take(0, 3) == [2, 3, 4]


def test_a_slab_moves_to_another_group_once_its_last_page_is_free() -> None:
    ground = Ground(geometry((2, 3), 1))
    ground.take(0, 2)
    assert not ground.pools.fits([0, 1])
    ground.free(0, 1)
    assert not ground.pools.fits([0, 1])
    ground.free(0, 2)
    assert ground.take(1, 3) == [1, 2, 3]
    ground.pools.check()


def test_pages_of_the_tail_stay_with_their_group() -> None:
    ground = Ground(geometry((3, 2), 1, tail_group=0, tail_pages=2))
    assert ground.take(1, 2) == [1, 2]
    assert ground.take(0, 2) == [4, 5]
    assert not ground.pools.fits([1, 0])
    ground.free(1, 1, 2)
    assert ground.take(0, 3) == [1, 2, 3]


def test_all_slabs_are_unowned_after_everything_is_freed_and_forgotten() -> None:
    ground = Ground(geometry((2, 3), 4, tail_group=1, tail_pages=1))
    ground.keep(0, *ground.take(0, 3))
    ground.keep(1, *ground.take(1, 4))
    ground.pools.clear_hashes()
    ground.pools.check()
    assert ground.owners() == [UNOWNED] * 4
    assert ground.pools.fits([8, 0])
    assert ground.pools.fits([0, 13])


# What is reused next


def test_pages_without_a_hash_go_before_a_slab_of_nobody() -> None:
    ground = Ground(geometry((4, 4), 3))
    pages = ground.take(0, 4)
    ground.free(0, *pages[1:])
    assert sorted(ground.take(0, 3)) == pages[1:]


def test_a_slab_of_nobody_goes_before_cached_pages() -> None:
    ground = Ground(geometry((2, 2), 3))
    first = ground.take(0, 2)
    ground.keep(0, first[0])
    assert ground.take(0, 1) == [3]
    assert ground.cached(0) == first[:1]


def test_the_page_used_longest_ago_goes_when_it_is_older_than_every_idle_slab() -> None:
    ground = Ground(geometry((2, 2), 2))
    mine, others = ground.take(0, 2), ground.take(1, 2)
    ground.keep(0, mine[0])
    ground.keep(1, *others)
    assert ground.take(0, 1) == mine[:1]
    assert ground.cached(1) == others


def test_a_slab_of_another_group_goes_when_all_of_it_is_older_than_the_own_pages() -> None:
    events = EventLog()
    ground = Ground(geometry((2, 2), 2), events=events)
    mine, others = ground.take(0, 2), ground.take(1, 2)
    ground.keep(1, *others)
    ground.keep(0, mine[0])
    assert ground.take(0, 1) == [3]
    assert ground.cached(0) == mine[:1]
    removed = [event for event in events.take() if isinstance(event, BlockRemoved)]
    assert [event.group for event in removed] == [1, 1]
    assert ground.pools.pools[1].num_evicted == 2


def test_a_slab_is_as_old_as_its_most_recently_used_page() -> None:
    ground = Ground(geometry((2, 2), 2))
    mine, others = ground.take(0, 2), ground.take(1, 2)
    ground.keep(1, others[0])
    ground.keep(0, mine[0])
    ground.keep(1, others[1])
    assert ground.take(0, 1) == mine[:1]


def test_a_slab_that_caches_nothing_goes_before_one_that_does() -> None:
    ground = Ground(geometry((2, 2), 2))
    mine, others = ground.take(0, 2), ground.take(1, 2)
    ground.keep(1, *others)
    ground.free(0, *mine)
    assert ground.take(1, 2) == [1, 2]
    assert ground.cached(1) == others


def test_touching_a_page_of_an_idle_slab_keeps_the_others_findable_and_at_hand() -> None:
    ground = Ground(geometry((3, 3), 1))
    pages = ground.take(0, 3)
    ground.keep(0, *pages[::-1])
    ground.pools.pools[0].touch(ints(pages[:1]))
    assert not ground.pools.fits([0, 1])
    assert ground.cached(0) == pages
    assert ground.take(0, 1) == pages[2:]  # freed first
    ground.pools.check()


def test_reuse_is_in_the_order_of_use_though_slabs_were_idle_in_between() -> None:
    ground = Ground(geometry((4, 4), 1))
    pages = ground.take(0, 4)
    for page in (3, 1, 4, 2):
        ground.keep(0, page)
    ground.pools.pools[0].touch(ints([4]))
    assert [*ground.take(0, 1), *ground.take(0, 1), *ground.take(0, 1)] == [3, 1, 2]
    assert len(pages) == 4


# What the audit finds


def held_and_idle() -> Ground:
    """Slab 1: group 0, a page held. Slab 2: group 1, idle and cached. Slab 3: nobody's. A tail of group 1."""
    ground = Ground(geometry((2, 3), 3, tail_group=1, tail_pages=2))
    ground.take(0, 1)
    tail = ground.take(1, 2)
    ground.keep(1, *ground.take(1, 3))
    ground.free(1, *tail)
    ground.pools.check()
    assert ground.owners() == [0, 1, UNOWNED]
    return ground


@pytest.mark.parametrize("slab", [1, 2, 3, 4])
@pytest.mark.parametrize("array", ["owner", "num_held"])
def test_the_audit_finds_a_wrong_entry_of_the_slab_table(array: str, slab: int) -> None:
    ground = held_and_idle()
    table = ground.pools._table
    books = {"owner": table.owner, "num_held": table.num_held}[array]
    books[slab] += 1 if array == "num_held" or books[slab] != 1 else -1
    if array == "owner" and slab == 3:
        return  # an idle slab that caches nothing may be anybody's
    with pytest.raises(LedgerCorrupted):
        ground.pools.check()


def test_the_audit_finds_a_slab_that_is_idle_and_held() -> None:
    ground = held_and_idle()
    ground.pools._table.idle.push_back(ints([1]))
    with pytest.raises(LedgerCorrupted, match="pages of group 0 do not wait where they should"):
        ground.pools.check()


def test_the_audit_finds_a_page_that_nobody_can_get() -> None:
    ground = held_and_idle()
    ground.pools._queues[0].waiting.remove(ints([2]))
    with pytest.raises(LedgerCorrupted, match="pages of group 0 do not wait where they should: \\[1\\]"):
        ground.pools.check()
