"""Pools of slabs: what fits, which page is reused next, and that memory moves between groups without getting lost."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from support.slab_serving import (
    CHUNK,
    Admission,
    Serving,
    full,
    geometry,
    ints,
    latent,
    slab_config,
    states,
    window,
)

from blockferry.engine.errors import LedgerCorrupted
from blockferry.engine.kv.events import BlockRemoved, EventLog
from blockferry.engine.kv.ledger_config import ledger_config
from blockferry.engine.kv.plan import KVCachePlan, PlanRequest
from blockferry.engine.kv.pools import SharedPool, make_pools
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.reach import SequenceLimits
from blockferry.engine.kv.slab_planner import plan_slab
from blockferry.engine.kv.slab_pools import SlabPools
from blockferry.engine.kv.slab_queue import UNOWNED
from blockferry.engine.kv.spec import KVCacheGroup, KVCacheSpec, SlabGeometry

NOTHING = ints([])


class Ground:
    """Pools and the few lines that a ledger's managers would have. Groups are of full attention unless said."""

    def __init__(
        self, slab: SlabGeometry, *, specs: list[KVCacheSpec] | None = None, events: EventLog | None = None
    ) -> None:
        specs = specs or [full(4) for _ in slab.pages_per_slab]
        groups = [KVCacheGroup(layer_ids=(layer,), spec=spec) for layer, spec in enumerate(specs)]
        self.index = PrefixIndex(len(groups), num_expected=64)
        self.pools = SlabPools(slab, groups, index=self.index, events=events)
        self.num_cached = 0

    def take(self, group: int, num_pages: int) -> list[int]:
        needs = [0] * len(self.pools.pools)
        needs[group] = num_pages
        assert self.pools.fits(needs)
        return self.take_granted(group, num_pages)

    def take_granted(self, group: int, num_pages: int) -> list[int]:
        return self.pools.pools[group].take(num_pages).tolist()

    def cache(self, group: int, *pages: int) -> None:
        for page in pages:
            self.num_cached += 1
            entries = self.index.obtain([self.num_cached.to_bytes(4)])
            self.pools.pools[group].cache(ints([group]), ints([page]), entries)

    def free(self, group: int, *pages: int) -> None:
        self.pools.pools[group].free(ints(list(pages)))

    def keep(self, group: int, *pages: int) -> None:
        """Cache and free."""
        self.cache(group, *pages)
        self.free(group, *pages)

    def cached(self, group: int) -> list[int]:
        pool = self.pools.pools[group]
        return [page for page in range(1, pool.num_blocks) if pool.has_hash(ints([page]))[0]]

    def owners(self) -> list[int]:
        return self.pools._table.owner[1 : self.pools._table.num_slabs + 1].tolist()


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


# What fits


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
    ground = Ground(geometry((6, 2), 3))
    assert ground.pools.num_usable == 18
    assert ground.pools.fits([0, 2], num_reserved=12)
    assert not ground.pools.fits([0, 3], num_reserved=12)
    assert ground.pools.fits([3, 1], num_reserved=12)


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


# As a whole


def shared_and_slab(num_blocks: int, *, watermark: float) -> tuple[Serving, Serving]:
    """The same ledger of one group, with blocks in one pool and with slabs of one page."""
    config = slab_config([full(4)], geometry((1,), num_blocks - 1))
    serve = [Serving(one, watermark=watermark) for one in (dataclasses.replace(config, slab=None), config)]
    return serve[0], serve[1]


@pytest.mark.parametrize("seed", range(12))
def test_slabs_of_one_page_of_one_group_behave_as_blocks_of_one_pool(seed: int) -> None:
    rng = random.Random(seed)
    pair = shared_and_slab(rng.randint(8, 40), watermark=rng.choice((0.0, 0.1)))
    assert isinstance(pair[0].kv._pools, SharedPool)
    assert isinstance(pair[1].kv._pools, SlabPools)
    for _ in range(150):
        state = rng.getstate()
        for serving in pair:
            rng.setstate(state)
            act(serving, rng)
        assert pair[0].journal == pair[1].journal
    assert [str(event) for event in pair[0].heard] == [str(event) for event in pair[1].heard]
    assert any(isinstance(event, BlockRemoved) for event in pair[0].heard)


def act(serving: Serving, rng: random.Random) -> None:
    """Anything a scheduler does, in a way that depends on nothing but the journal so far."""
    choice = rng.random()
    if choice < 0.4 and serving.free_rows():
        tokens = [rng.randrange(2)] * rng.randint(1, 30) + [rng.randrange(2) for _ in range(rng.randint(0, 10))]
        admission = Admission(
            tokens=tokens,
            chunk=rng.randint(1, CHUNK),
            num_external_blocks=rng.choice((0, 0, 1)),
            delay=rng.random() < 0.3,
            must_fit=rng.random() < 0.5,
            num_reserved=rng.choice((0, 0, 3)),
            watermark=rng.random() < 0.5,
        )
        serving.admit(admission)
    elif choice < 0.5 and serving.loading():
        serving.end_load(rng.choice(serving.loading()), arrived=rng.random() < 0.7)
    elif choice < 0.65 and serving.prefilling():
        serving.prefill(rng.choice(serving.prefilling()), rng.randint(1, CHUNK))
    elif choice < 0.85 and serving.decoding():
        serving.decode(serving.decoding(), rng.randrange(2))
    elif choice < 0.95 and serving.running:
        end = serving.free if rng.random() < 0.7 else serving.pop
        end(rng.choice(sorted(serving.running)))
    elif serving.popped:
        serving.release(0)
    elif choice > 0.99:
        serving.reset()


MIB = 1 << 20
LIMITS = SequenceLimits(max_model_len=64, max_in_flight_tokens=CHUNK)


def plan(specs: list[KVCacheSpec]) -> KVCachePlan:
    return plan_slab(PlanRequest(layers=tuple(specs), limits=LIMITS, memory_bytes=MIB))


def test_a_slab_plan_becomes_a_ledger_that_serves() -> None:
    config = ledger_config(plan([full(4), *[window(4, 8)] * 3]))
    assert config.slab is not None
    assert config.num_blocks == 1 + max(config.slab.num_pages(group) for group in range(2))
    serving = Serving(config)
    assert serving.admit(Admission(tokens=[1] * 16))
    assert serving.decode([0], 2) == 1
    serving.kv.check_integrity()
    assert isinstance(serving.kv._pools, SlabPools)


def test_a_slab_plan_of_one_group_needs_no_slab_books() -> None:
    planned = plan([full(4)] * 3)
    config = ledger_config(planned)
    assert (config.slab, config.num_blocks, config.groups) == (None, planned.num_blocks, planned.groups)
    assert isinstance(make_pools(config, PrefixIndex(1, num_expected=8), None), SharedPool)


def test_a_geometry_of_other_groups_is_refused() -> None:
    config = dataclasses.replace(slab_config([full(4), full(4)], geometry((1, 1), 3)), slab=geometry((1,), 3))
    with pytest.raises(ValueError, match="the slab geometry has 1 groups, the KV cache 2"):
        make_pools(config, PrefixIndex(2, num_expected=8), None)


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
