"""What fits pools of slabs, against a search through every way to share them out."""

import itertools
import random

import numpy as np
import pytest
from support.slab_ground import Ground
from support.slab_serving import full, geometry, ints, latent, states, window

NOTHING = ints([])


def test_a_wholly_idle_slab_serves_its_own_group_or_another_but_not_both() -> None:
    ground = Ground(geometry((2, 2), 2))
    ground.take(1, 2)
    ground.keep(0, *ground.take(0, 2))
    assert ground.pools.fits([2, 0])
    assert ground.pools.fits([0, 2])
    assert not ground.pools.fits([1, 1])


def test_no_group_claims_a_slab_that_another_was_granted() -> None:
    ground = Ground(geometry((2, 2), 2))
    mine = ground.take(0, 2)
    ground.keep(0, mine[0])
    assert ground.pools.fits([1, 1])
    assert ground.take_granted(0, 1) == mine[:1]  # though a slab of nobody would have kept the cached page
    assert ground.take_granted(1, 1) == [3]


def test_a_hit_counts_the_slabs_that_it_wakes() -> None:
    ground = Ground(geometry((2, 2), 3))
    pages = ground.take(0, 4)
    ground.keep(0, *pages)
    ground.take(1, 1)
    assert ground.pools.fits([2, 1], hits=(ints(pages[:2]), NOTHING))
    assert not ground.pools.fits([2, 2], hits=(ints(pages[::2]), NOTHING))
    assert ground.cached(0) == pages


def test_a_hit_over_more_slabs_than_there_are_is_dropped_when_nothing_is_held() -> None:
    ground = Ground(geometry((2, 2), 2))
    pages = ground.take(0, 4)
    ground.keep(0, *pages)
    assert not ground.pools.fits([2, 1], hits=(ints(pages[::2]), NOTHING))
    assert ground.cached(0) == pages[1::2]
    assert ground.pools.fits([2, 1])


def test_a_hit_stays_when_no_pool_of_this_size_would_do() -> None:
    ground = Ground(geometry((2, 2), 2))
    pages = ground.take(0, 4)
    ground.keep(0, *pages)
    assert not ground.pools.fits([4, 1], hits=(ints(pages[:1]), NOTHING))
    assert ground.cached(0) == pages


def test_a_hit_is_dropped_when_a_sequence_alone_had_stalled_for_want_of_a_slab() -> None:
    ground = Ground(geometry((2, 2), 2))
    pages = ground.take(0, 4)
    ground.keep(0, *pages)
    hit = (ints(pages[:1]), NOTHING)
    ground.pools.pools[0].touch(ints(pages[::2]))
    assert not ground.pools.fits([0, 1])  # though the two pages would fit one slab
    ground.free(0, *pages[::2])
    assert not ground.pools.fits([1, 0], hits=hit)
    assert ground.pools.fits([1, 0])
    ground.keep(0, *ground.take_granted(0, 1))
    assert ground.pools.fits([1, 0], hits=(ints(ground.cached(0)[:1]), NOTHING))


def test_refusal_changes_nothing_while_anything_is_held() -> None:
    ground = Ground(geometry((2, 2), 3))
    pages = ground.take(0, 4)
    ground.keep(0, *pages)
    ground.take(1, 1)
    before = ground.pools.num_free
    assert not ground.pools.fits([4, 2], hits=(ints(pages), NOTHING))
    assert (ground.pools.num_free, ground.cached(0)) == (before, pages)


def test_reserved_units_are_smallest_pages() -> None:
    ground = Ground(geometry((6, 4), 3))
    assert ground.pools.num_usable == 18
    assert ground.pools.fits([0, 3], num_reserved=13)
    assert not ground.pools.fits([0, 3], num_reserved=14)
    assert ground.pools.fits([4, 0], num_reserved=14)


def test_free_units_tell_one_held_page_of_any_group() -> None:
    ground = Ground(geometry((7, 3), 2, tail_group=0, tail_pages=5))
    assert ground.pools.num_free == ground.pools.num_usable == 19
    pages = ground.take(0, 1)
    assert ground.pools.num_free == 18
    ground.free(0, *pages)
    ground.take(1, 1)
    assert ground.pools.num_free < ground.pools.num_usable


@pytest.mark.parametrize(("need", "num_slabs"), [(0, 0), (1, 1), (2, 2), (4, 2), (5, 2), (6, 3), (9, 3)])
def test_a_window_may_begin_and_end_inside_slabs(need: int, num_slabs: int) -> None:
    for specs in ([window(4, 9), full(4)], [states(4), full(4)]):
        ground = Ground(geometry((4, 1), 4), specs=specs)
        assert ground.pools.can_hold([need, 4 - num_slabs])
        assert not ground.pools.can_hold([need, 5 - num_slabs])


@pytest.mark.parametrize(("need", "num_slabs"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_what_is_never_dropped_fills_the_tail_and_slab_after_slab(need: int, num_slabs: int) -> None:
    ground = Ground(geometry((4, 1), 4, tail_group=0, tail_pages=3), specs=[latent(4), window(4, 8)])
    assert ground.pools.can_hold([need, 4 - num_slabs])
    assert not ground.pools.can_hold([need, 5 - num_slabs])


def is_feasible(ground: Ground, needs: list[int], hits: list[list[int]]) -> bool:
    """Whether some way to hand out the idle slabs serves everybody, from nothing but owners and reference counts."""
    pages_per_slab = ground.pools._geometry.pages_per_slab
    num_slabs = ground.pools._geometry.num_slabs
    held: dict[int, bool] = dict.fromkeys(range(num_slabs), False)
    for pool, pages in zip(ground.pools.pools, pages_per_slab, strict=True):
        for page in range(1, pool.num_blocks):
            slab = (page - 1) // pages
            held[slab] = held.get(slab, True) or bool(pool.ref_cnt[page])  # the tail counts as held
    woken = {(page - 1) // pages_per_slab[group] for group, hit in enumerate(hits) for page in hit}
    active = {slab for slab in held if held[slab]} | woken
    at_hand = []
    for group, pages in enumerate(pages_per_slab):
        pool = ground.pools.pools[group]
        mine = [
            page
            for page in range(1, pool.num_blocks)
            if (page - 1) // pages in active and ground.pools._table.owner[1 + (page - 1) // pages] == group
        ]
        at_hand.append(
            sum(not pool.ref_cnt[page] for page in mine) - sum(not pool.ref_cnt[page] for page in hits[group])
        )
    fresh = [
        need - sum(not ground.pools.pools[group].ref_cnt[page] for page in hits[group])
        for group, need in enumerate(needs)
    ]
    num_idle = sum(slab not in active for slab in held)
    return any(
        sum(shares) <= num_idle
        and all(
            need <= have + share * pages for need, have, share, pages in zip(fresh, at_hand, shares, pages_per_slab)
        )
        for shares in itertools.product(range(num_idle + 1), repeat=len(needs))
    )


def stir(ground: Ground, rng: random.Random, held: list[tuple[int, int]]) -> None:
    """Take, free, cache and evict pages at random."""
    for _ in range(12):
        group = rng.randrange(len(ground.pools.pools))
        needs = [0] * len(ground.pools.pools)
        needs[group] = rng.randint(1, 5)
        if rng.random() < 0.5 and ground.pools.fits(needs):
            held += [(group, page) for page in ground.take_granted(group, needs[group])]
        for owned in rng.sample(held, min(len(held), rng.randint(0, 4))):
            held.remove(owned)
            if rng.random() < 0.6:
                ground.cache(*owned)
            ground.free(*owned)
    ground.pools.check()


def a_hit(ground: Ground, rng: random.Random, group: int) -> list[int]:
    cached = ground.cached(group)
    return rng.sample(cached, min(len(cached), rng.choice((0, 1, 2, 4))))


@pytest.mark.parametrize("seed", range(60))
def test_what_fits_is_what_some_share_of_the_slabs_serves_and_is_served_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    num_groups = rng.choice((1, 2, 2, 3))
    pages = tuple(rng.randint(1, 5) for _ in range(num_groups))
    tail_group = rng.randrange(num_groups)
    ground = Ground(
        geometry(pages, rng.randint(2, 6), tail_group=tail_group, tail_pages=rng.randrange(pages[tail_group]))
    )
    held: list[tuple[int, int]] = []
    for _ in range(8):
        stir(ground, rng, held)
        hits = [a_hit(ground, rng, group) for group in range(num_groups)]
        idle_hits = [[page for page in hit if not ground.pools.pools[g].ref_cnt[page]] for g, hit in enumerate(hits)]
        needs = [len(idle) + rng.randint(0, 6) for idle in idle_hits]
        expected = is_feasible(ground, needs, hits)
        assert ground.pools.fits([0] * num_groups)  # nothing has stalled
        assert ground.pools.fits(needs, hits=[ints(hit) for hit in hits]) == expected
        if not expected:
            continue
        for group, hit in enumerate(hits):
            ground.pools.pools[group].touch(ints(hit))
            held += [(group, page) for page in hit]
        orders = [group for group, idle in enumerate(idle_hits) for _ in range(needs[group] - len(idle))]
        rng.shuffle(orders)
        for group, takes in itertools.groupby(orders):
            held += [(group, page) for page in ground.take_granted(group, len(list(takes)))]
        ground.pools.check()


@pytest.mark.parametrize("seed", range(30))
def test_leading_rows_are_as_many_as_can_be_served_together(seed: int) -> None:
    rng = random.Random(seed)
    pages = (rng.randint(1, 5), rng.randint(1, 5))
    ground = Ground(geometry(pages, rng.randint(2, 6)))
    held: list[tuple[int, int]] = []
    for _ in range(5):
        stir(ground, rng, held)
        needs = np.array([[rng.choice((0, 0, 1, 2)) for _ in pages] for _ in range(rng.randint(1, 12))], np.int32)
        feasible = [is_feasible(ground, needs[: n + 1].sum(axis=0).tolist(), [[], []]) for n in range(len(needs))]
        num_served = ground.pools.num_leading(needs)
        assert [True] * num_served == feasible[:num_served]
        assert not any(feasible[num_served:])
        for group in rng.sample((0, 1), 2):
            num_pages = int(needs[:num_served, group].sum())
            held += [(group, page) for page in ground.take_granted(group, num_pages)]
