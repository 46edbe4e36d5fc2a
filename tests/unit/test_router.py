"""The router's choice, from loads and from what instances hold of a prompt."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockferry.cluster.router import POLICIES, Candidate, has_route, least_loaded, prefix_affinity
from blockferry.engine.config import Role, RouterConfig
from blockferry.engine.scheduler.newcomer import Found


def candidate(instance_id, role, *, queued=0, missing=None, assigned=0, free=100, fill=0.0):
    return Candidate(
        instance_id=instance_id,
        role=role,
        num_queued_tokens=queued,
        num_missing_tokens=queued if missing is None else missing,
        num_assigned=assigned,
        num_free_blocks=free,
        cache_fill=fill,
    )


@dataclasses.dataclass
class Prompt:
    """A request of num_tokens of which instances hold some."""

    num_tokens: int = 320
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    full: tuple[str, ...] = ()  # instances without room for it
    key: bytes = b"prompt"

    def found_on(self, instance_id):
        return Found(
            num_tokens=self.num_tokens,
            num_held_tokens=self.held.get(instance_id, 0),
            has_room=instance_id not in self.full,
        )


class Unasked(Prompt):
    def found_on(self, instance_id):
        raise AssertionError(instance_id)


def prefills(**queued):
    return [candidate(name, Role.PREFILL, queued=count) for name, count in queued.items()]


DECODE = candidate("decode-0", Role.DECODE)
PREFILL = candidate("prefill-0", Role.PREFILL)


@pytest.mark.parametrize("choose", POLICIES.values())
def test_prefill_goes_where_the_fewest_tokens_wait(choose):
    route = choose(
        [
            candidate("prefill-0", Role.PREFILL, queued=900),
            candidate("prefill-1", Role.PREFILL, queued=100, assigned=5),
            DECODE,
        ],
        Prompt(),
    )
    assert (route.prefill, route.decode) == ("prefill-1", "decode-0")


def test_decode_goes_where_the_fewest_requests_are_then_the_most_blocks():
    busy, full, free = (
        candidate("decode-0", Role.DECODE, assigned=3),
        candidate("decode-1", Role.DECODE, assigned=2, free=10),
        candidate("decode-2", Role.DECODE, assigned=2, free=50),
    )
    assert least_loaded([PREFILL, busy, full, free], Unasked()).decode == "decode-2"
    assert prefix_affinity([PREFILL, busy, full, free], Prompt()).decode == "decode-2"


@pytest.mark.parametrize("choose", POLICIES.values())
def test_mixed_instance_does_both(choose):
    route = choose([candidate("mixed-0", Role.MIXED, queued=500), candidate("mixed-1", Role.MIXED)], Prompt())
    assert route.prefill == route.decode == "mixed-1"


@pytest.mark.parametrize("choose", POLICIES.values())
def test_no_route_without_both_roles(choose):
    for alive in ([PREFILL], [DECODE], []):
        assert choose(alive, Prompt()) is None
        assert not has_route(alive)
    assert has_route([PREFILL, DECODE])


def test_equal_loads_are_decided_by_order_where_only_load_counts():
    pair = [*(candidate(name, Role.PREFILL) for name in ("prefill-1", "prefill-0")), DECODE]
    assert {least_loaded(pair, Unasked()).prefill for _ in range(10)} == {"prefill-1"}


def test_prefill_goes_where_most_of_the_prompt_is_held():
    assert prefix_affinity([*prefills(a=0, b=0), DECODE], Prompt(held={"b": 160})).prefill == "b"


def test_idle_instance_is_preferred_to_a_hit_behind_a_longer_queue():
    prompt = Prompt(held={"b": 160})
    assert prefix_affinity([*prefills(a=0, b=60), DECODE], prompt).prefill == "b"
    assert prefix_affinity([*prefills(a=0, b=200), DECODE], prompt).prefill == "a"


def test_hit_draws_further_where_everybody_is_busy():
    prompt = Prompt(held={"b": 160})
    assert prefix_affinity([*prefills(a=1000, b=1200), DECODE], prompt).prefill == "b"
    assert prefix_affinity([*prefills(a=1000, b=2000), DECODE], prompt).prefill == "a"


def test_full_cache_is_spared_where_another_is_empty():
    full, empty = candidate("a", Role.PREFILL, fill=1.0), candidate("b", Role.PREFILL)
    assert prefix_affinity([full, empty, DECODE], Prompt(held={"a": 120})).prefill == "b"
    assert prefix_affinity([full, empty, DECODE], Prompt(held={"a": 240})).prefill == "a"


def test_waiting_tokens_that_will_be_hits_are_no_queue():
    a, b = candidate("a", Role.PREFILL), candidate("b", Role.PREFILL, queued=2000, missing=50)
    assert prefix_affinity([a, b, DECODE], Prompt(held={"b": 160})).prefill == "b"


def test_short_common_prefix_does_not_draw_everybody():
    full, empty = candidate("a", Role.PREFILL, fill=0.6), candidate("b", Role.PREFILL, fill=0.1)
    assert prefix_affinity([full, empty, DECODE], Prompt(held={"a": 16})).prefill == "b"


def test_equal_instances_are_decided_by_a_hash_of_the_prompt():
    pair = [*prefills(a=0, b=0), DECODE]
    chosen = [prefix_affinity(pair, Prompt(key=bytes([number]))).prefill for number in range(64)]
    assert chosen == [prefix_affinity(pair, Prompt(key=bytes([number]))).prefill for number in range(64)]
    assert 16 < chosen.count("a") < 48


def test_decode_prefers_who_holds_the_prompt_among_about_equally_busy_ones():
    holder = candidate("decode-1", Role.DECODE, assigned=5)
    idle = candidate("decode-0", Role.DECODE, assigned=4)
    assert prefix_affinity([PREFILL, idle, holder], Prompt(held={"decode-1": 160})).decode == "decode-1"


def test_decode_leaves_a_holder_that_is_busier():
    holder = candidate("decode-1", Role.DECODE, assigned=8)
    idle = candidate("decode-0", Role.DECODE, assigned=4)
    assert prefix_affinity([PREFILL, idle, holder], Prompt(held={"decode-1": 160})).decode == "decode-0"


def test_decode_without_room_comes_last():
    holder, other = candidate("decode-1", Role.DECODE), candidate("decode-0", Role.DECODE, assigned=9)
    prompt = Prompt(held={"decode-1": 160}, full=("decode-1",))
    assert prefix_affinity([PREFILL, holder, other], prompt).decode == "decode-0"
    assert prefix_affinity([PREFILL, holder], prompt).decode == "decode-1"


def test_mixed_holder_that_decodes_for_many_is_left():
    idle = candidate("mixed-0", Role.MIXED)
    few, many = (candidate("mixed-1", Role.MIXED, assigned=count) for count in (2, 9))
    prompt = Prompt(held={"mixed-1": 300})
    assert prefix_affinity([idle, few], prompt).prefill == "mixed-1"
    assert prefix_affinity([idle, many], prompt).prefill == "mixed-0"


def test_default_policy_is_known():
    assert POLICIES[RouterConfig().policy] is prefix_affinity


@pytest.mark.parametrize("choose", POLICIES.values())
@settings(deadline=None)
@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_burst_spreads_over_decode_instances(choose, loads):
    counts = {f"decode-{index}": 0 for index in range(len(loads))}
    for _ in range(2 * len(loads)):
        decodes = [candidate(name, Role.DECODE, assigned=counts[name], free=load) for name, load in zip(counts, loads)]
        counts[choose([PREFILL, *decodes], Prompt()).decode] += 1
    assert set(counts.values()) == {2}
