"""The policies of a tier: LRU, and ARC decision for decision as in the paper."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from blockferry.engine.kv.tier_policies import ArcPolicy, EvictionPolicy, LruPolicy, TierKey


def key(number: int) -> TierKey:
    return TierKey(0, number.to_bytes(2, "big"))


def anything(_key: TierKey) -> bool:
    return True


class Cache:
    """A cache of `capacity` blocks of one size under a policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity

    def request(self, number: int, may_go: Callable[[TierKey], bool] = anything) -> TierKey | None:
        wanted, victim = key(number), None
        if wanted in self.policy.residents():
            self.policy.used(wanted)
            return None
        if len(self.policy.residents()) == self.capacity:
            self.policy.missed(wanted)
            victim = self.policy.evict_for(wanted, may_go)
        self.policy.insert(wanted, 1)
        return victim


class PaperArc:
    """Figure 4 of the paper, line by line, with plain lists whose last element is the most recently used."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, x: int) -> None:
        if len(self.t1) >= 1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, x: int) -> None:
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            else:
                total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
                if total >= self.c:
                    if total == 2 * self.c:
                        self.b2.pop(0)
                    self.replace(x)
            self.t1.append(x)


@given(capacity=st.integers(1, 6), requests=st.lists(st.integers(0, 14), max_size=120))
def test_arc_decides_as_the_paper_does(capacity: int, requests: list[int]) -> None:
    paper, policy = PaperArc(capacity), ArcPolicy(capacity)
    cache = Cache(policy, capacity)
    for number in requests:
        cache.request(number)
        paper.request(number)
        for mine, theirs in (
            (policy.once, paper.t1),
            (policy.often, paper.t2),
            (policy.once_gone, paper.b1),
            (policy.often_gone, paper.b2),
        ):
            assert list(mine.sizes) == [key(one) for one in theirs], (requests, policy.target, paper.p)
        assert policy.target == paper.p


@given(
    capacity=st.integers(2, 30),
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), max_size=80),
)
def test_arc_remembers_no_more_than_two_tiers_of_blocks_of_any_size(
    capacity: int, requests: list[tuple[int, int]]
) -> None:
    policy = ArcPolicy(capacity)
    for number, size in requests:
        wanted = TierKey(size, key(number).digest)
        if wanted in policy.residents():
            policy.used(wanted)
            continue
        while policy.once.total + policy.often.total + min(size, capacity) > capacity:
            policy.missed(wanted)
            assert policy.evict_for(wanted, anything) is not None
        policy.insert(wanted, min(size, capacity))
        lists = (policy.once, policy.often, policy.once_gone, policy.often_gone)
        assert all(one.total == sum(one.sizes.values()) for one in lists)
        assert sum(one.total for one in lists) <= 2 * capacity
        assert 0.0 <= policy.target <= capacity


def test_lru_evicts_what_was_used_longest_ago() -> None:
    cache = Cache(LruPolicy(), 3)
    for number in (1, 2, 3, 1):
        cache.request(number)
    assert [cache.request(4), cache.request(5)] == [key(2), key(3)]


def test_arc_keeps_what_is_read_again_through_a_scan() -> None:
    cache = Cache(ArcPolicy(4), 4)
    for number in (1, 2, 1, 2, *range(10, 30)):
        cache.request(number)
    assert {key(1), key(2)} <= cache.policy.residents()


def test_blocks_that_may_not_go_are_passed_over() -> None:
    for policy in (LruPolicy(), ArcPolicy(3)):
        cache = Cache(policy, 3)
        for number in (1, 2, 3):
            cache.request(number)
        assert cache.request(4, lambda one: one != key(1)) == key(2)


def test_nothing_is_evicted_when_nothing_may_go() -> None:
    for policy in (LruPolicy(), ArcPolicy(3)):
        policy.insert(key(1), 1)
        assert policy.evict_for(key(2), lambda _: False) is None
        assert policy.residents() == {key(1)}


def test_coldest_blocks_come_first() -> None:
    for policy in (LruPolicy(), ArcPolicy(3)):
        for number in (1, 2, 3):
            policy.insert(key(number), 1)
        assert policy.coldest(2) == [key(1), key(2)]
