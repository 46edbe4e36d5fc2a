"""The router's choice, from loads alone."""

from hypothesis import given
from hypothesis import strategies as st

from blockferry.cluster.router import Candidate, choose
from blockferry.engine.config import Role


def candidate(instance_id, role, *, queued=0, assigned=0, free=100):
    return Candidate(
        instance_id=instance_id, role=role, num_queued_tokens=queued, num_assigned=assigned, num_free_blocks=free
    )


def test_prefill_goes_where_the_fewest_tokens_wait():
    route = choose(
        [
            candidate("prefill-0", Role.PREFILL, queued=900),
            candidate("prefill-1", Role.PREFILL, queued=100, assigned=5),
            candidate("decode-0", Role.DECODE),
        ]
    )
    assert route is not None
    assert (route.prefill, route.decode) == ("prefill-1", "decode-0")


def test_decode_goes_where_the_fewest_requests_are_then_the_most_blocks():
    prefill = candidate("prefill-0", Role.PREFILL)
    busy, full, free = (
        candidate("decode-0", Role.DECODE, assigned=3),
        candidate("decode-1", Role.DECODE, assigned=2, free=10),
        candidate("decode-2", Role.DECODE, assigned=2, free=50),
    )
    route = choose([prefill, busy, full, free])
    assert route is not None
    assert route.decode == "decode-2"


def test_mixed_instance_does_both():
    route = choose([candidate("mixed-0", Role.MIXED, queued=5), candidate("mixed-1", Role.MIXED)])
    assert route is not None
    assert route.prefill == route.decode == "mixed-1"


def test_no_route_without_both_roles():
    assert choose([candidate("prefill-0", Role.PREFILL)]) is None
    assert choose([candidate("decode-0", Role.DECODE)]) is None
    assert choose([]) is None


def test_equal_loads_are_decided_by_order():
    names = ["prefill-1", "prefill-0"]
    pair = [candidate(name, Role.PREFILL) for name in names] + [candidate("decode-0", Role.DECODE)]
    assert {choose(pair).prefill for _ in range(10)} == {"prefill-1"}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_burst_spreads_over_decode_instances(loads):
    counts = {f"decode-{index}": 0 for index in range(len(loads))}
    for _ in range(2 * len(loads)):
        decodes = [
            candidate(name, Role.DECODE, assigned=counts[name], free=load[2]) for name, load in zip(counts, loads)
        ]
        counts[choose([candidate("prefill-0", Role.PREFILL), *decodes]).decode] += 1
    assert set(counts.values()) == {2}
