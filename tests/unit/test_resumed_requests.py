"""A request that comes with output goes on exactly as the one that was never cut, wherever it was cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sim_families import SPECS, can_cache
from support.simulator import VOCAB_SIZE, Shape, SimCluster

from blockferry.connectors.base import Overlap, TransferMode
from blockferry.engine.config import Role
from blockferry.engine.errors import RequestRejected
from blockferry.engine.request import FinishReason
from blockferry.engine.scheduler.outputs import Route

LOCAL = Route(prefill="m", decode="m")
FERRIED = Route(prefill="p", decode="d")
LONGEST = 48


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, VOCAB_SIZE, num_tokens)


def mixed(**shape) -> SimCluster:
    return SimCluster(Shape(instance_id="m", **shape), max_model_len=LONGEST)


def pair(*, mode=TransferMode.PUSH, overlap=Overlap.CHUNKS, sizes=(4, 4), **shape) -> SimCluster:
    return SimCluster(
        Shape(instance_id="p", role=Role.PREFILL, block_size=sizes[0], **shape),
        Shape(instance_id="d", role=Role.DECODE, block_size=sizes[1], **shape),
        max_model_len=LONGEST,
        mode=mode,
        overlap=overlap,
    )


def whole_answer(cluster: SimCluster, route: Route, num_prompt_tokens: int, **sampling) -> list[int]:
    """The tokens of the request that is not cut; its blocks stay in the caches."""
    handle = len(cluster.requests)
    cluster.add(handle, prompt(num_prompt_tokens), route, **sampling)
    cluster.drain()
    return cluster.tokens[handle]


def resume(cluster: SimCluster, route: Route, num_prompt_tokens: int, drawn, **sampling) -> int:
    handle = len(cluster.requests)
    cluster.add(handle, prompt(num_prompt_tokens), route, given=drawn, **sampling)
    cluster.drain()
    return handle


@pytest.mark.parametrize("route", [LOCAL, FERRIED], ids=["mixed", "ferried"])
def test_request_cut_after_any_token_goes_on_as_if_it_had_not_been(route):
    cluster = mixed() if route is LOCAL else pair()
    sampling = {"max_tokens": 12, "min_tokens": 3, "stop_token_ids": (2, 7)}
    whole = whole_answer(cluster, route, 10, **sampling)
    for num_drawn in range(len(whole)):
        handle = resume(cluster, route, 10, whole[:num_drawn], **sampling)
        assert cluster.tokens[handle] == whole
        assert cluster.finished[handle].reason == cluster.finished[0].reason
    cluster.check_all_free()


@pytest.mark.parametrize("family", sorted(SPECS))
@pytest.mark.parametrize("num_drawn", [1, 15])
def test_every_kind_of_cache_is_handed_over_with_the_output_that_a_request_came_with(family, num_drawn):
    cluster = pair(family=family, num_blocks=64 * len(SPECS[family](1)), enable_caching=can_cache(family))
    whole = whole_answer(cluster, FERRIED, 10, max_tokens=20)
    for _ in range(2):  # with cold caches of the decode side, and warm ones
        handle = resume(cluster, FERRIED, 10, whole[:num_drawn], max_tokens=20)
        assert cluster.tokens[handle] == whole
    cluster.check_all_free()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    data=st.data(),
    family=st.sampled_from(sorted(SPECS)),
    num_prompt_tokens=st.integers(1, 24),
    max_tokens=st.integers(1, 24),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.sampled_from([(), (3,), (1, 5, 9)]),
    budget=st.integers(1, 24),
    overlap=st.sampled_from(list(Overlap)),
    is_ferried=st.booleans(),
)
def test_any_request_goes_on_from_any_cut_with_any_cache(
    data, family, num_prompt_tokens, max_tokens, min_tokens, stop_token_ids, budget, overlap, is_ferried
):
    shape = {
        "family": family,
        "num_blocks": 48 * len(SPECS[family](1)),
        "max_num_batched_tokens": budget,
        "enable_caching": can_cache(family),
    }
    cluster = pair(overlap=overlap, **shape) if is_ferried else mixed(**shape)
    route = FERRIED if is_ferried else LOCAL
    sampling = {"max_tokens": max_tokens, "min_tokens": min_tokens, "stop_token_ids": stop_token_ids}
    if data.draw(st.booleans()):
        whole_answer(cluster, route, num_prompt_tokens, **sampling)  # then caches are warm
    drawn = cluster.drawn(prompt(num_prompt_tokens), **sampling)
    num_drawn = data.draw(st.integers(0, len(drawn)))
    resume(cluster, route, num_prompt_tokens, drawn[:num_drawn], **sampling)
    cluster.check_all_free()


def test_sides_with_blocks_of_two_sizes_hand_over_a_resumed_request():
    for sizes in ((8, 4), (4, 8)):
        cluster = pair(sizes=sizes)
        whole = whole_answer(cluster, FERRIED, 9, max_tokens=20)
        assert cluster.tokens[resume(cluster, FERRIED, 9, whole[:11], max_tokens=20)] == whole
        cluster.check_all_free()


def test_output_that_was_given_is_computed_in_chunks_like_the_prompt():
    cluster = mixed(max_num_batched_tokens=4, enable_caching=False)
    whole = whole_answer(cluster, LOCAL, 6, max_tokens=20)
    cluster.add(1, prompt(6), LOCAL, given=whole[:7], max_tokens=20)
    assert cluster.plan("m").num_scheduled.tolist() == [4]
    cluster.drain()
    cluster.check_all_free()


def test_resumed_request_finds_prompt_and_output_in_the_prefix_cache():
    cluster = mixed()
    whole = whole_answer(cluster, LOCAL, 6, max_tokens=20)
    cluster.add(1, prompt(6), LOCAL, given=whole[:15], max_tokens=20)
    assert cluster.plan("m").num_computed.tolist() == [20]
    cluster.drain()


def test_cached_tokens_of_a_resumed_request_are_at_most_its_prompt():
    cluster = mixed()
    whole = whole_answer(cluster, LOCAL, 6, max_tokens=20)
    stats = cluster.finished[resume(cluster, LOCAL, 6, whole[:15], max_tokens=20)].stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (6, 6, 20)


@pytest.mark.parametrize("route", [LOCAL, FERRIED], ids=["mixed", "ferried"])
def test_request_cut_with_all_tokens_that_it_may_have_ends_for_length(route):
    cluster = mixed() if route is LOCAL else pair()
    whole = whole_answer(cluster, route, 6, max_tokens=5)
    handle = resume(cluster, route, 6, whole, max_tokens=5)
    assert cluster.tokens[handle] == whole
    assert cluster.finished[handle].reason is FinishReason.LENGTH
    cluster.check_all_free()


def test_last_token_before_max_tokens_is_drawn_where_the_prompt_is_computed():
    cluster = pair()
    whole = whole_answer(cluster, FERRIED, 6, max_tokens=5)
    handle = resume(cluster, FERRIED, 6, whole[:4], max_tokens=5)
    assert cluster.tokens[handle] == whole
    assert cluster.finished[handle].stats.transfer_bytes == 0


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "num_drawn"), [(6, 4, 5), (LONGEST - 2, 9, 3)])
def test_more_output_than_the_request_may_have_is_refused(num_prompt_tokens, max_tokens, num_drawn):
    cluster = mixed()
    with pytest.raises(RequestRejected, match=f"it comes with {num_drawn} tokens of output"):
        cluster.add(0, prompt(num_prompt_tokens), LOCAL, given=prompt(num_drawn), max_tokens=max_tokens)
    assert not cluster.central.num_unfinished


@pytest.mark.parametrize("num_steps", range(4))
def test_aborted_resumed_request_counts_what_it_came_with(num_steps):
    cluster = pair(max_num_batched_tokens=6)
    whole = whole_answer(cluster, FERRIED, 6, max_tokens=20)
    cluster.add(1, prompt(6), FERRIED, given=whole[:7], max_tokens=20)
    for _ in range(num_steps):
        cluster.step_all()
    cluster.abort(1)
    cluster.drain()
    assert cluster.finished[1].stats.num_output_tokens == len(cluster.tokens[1]) >= 7
    cluster.check_all_free()


def test_resumed_request_whose_blocks_do_not_arrive_is_computed_where_it_decodes():
    cluster = pair(overlap=Overlap.NONE)
    whole = whole_answer(cluster, FERRIED, 10, max_tokens=20)
    cluster.add(1, prompt(10), FERRIED, given=whole[:7], max_tokens=20)
    for verb in (cluster.plan, cluster.execute, cluster.commit):
        verb("p")
    cluster.fail("p")
    cluster.drain()
    assert cluster.tokens[1] == whole
    cluster.check_all_free()


def test_preempted_resumed_request_still_ends_with_the_same_tokens():
    cluster = mixed(num_blocks=12, max_num_batched_tokens=32)
    whole = whole_answer(cluster, LOCAL, 10, max_tokens=20)
    for handle in (1, 2):
        cluster.add(handle, prompt(10), LOCAL, given=whole[: 5 + handle], max_tokens=20, stop_token_ids=())
    cluster.add(3, prompt(10, 5), LOCAL, max_tokens=20)
    cluster.drain()
    assert sum(end.stats.num_preemptions for end in cluster.finished.values()) > 0
    assert cluster.tokens[1] == cluster.tokens[2] == whole
    cluster.check_all_free()


def test_prompt_of_a_resumed_request_is_not_scored_again():
    cluster = mixed()
    whole = whole_answer(cluster, LOCAL, 6, max_tokens=8)
    cluster.add(1, prompt(6), LOCAL, given=whole[:2], max_tokens=8, num_prompt_logprobs=1)
    plan = cluster.plan("m")
    assert plan.new_rows[0].sampling.num_prompt_logprobs is None
    assert plan.new_rows[0].num_prompt_tokens == 6
    assert plan.num_computed.tolist() == [4], "a cached prefix need not be computed"
    cluster.drain()


def test_resumed_request_keeps_its_seed():
    cluster = mixed()
    cluster.add(0, prompt(6), LOCAL, given=[1, 2], max_tokens=8, seed=77)
    assert cluster.plan("m").new_rows[0].sampling.seed == 77


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_request_that_a_failing_instance_cut_goes_on_at_another_one(num_steps):
    cluster = SimCluster(Shape(instance_id="m"), Shape(instance_id="n"), max_model_len=LONGEST)
    cluster.add(0, prompt(6), LOCAL, max_tokens=20)
    for _ in range(num_steps):
        cluster.step_all()
    cluster.fail("m")
    assert cluster.finished[0].is_resumable
    assert cluster.finished[0].stats.num_output_tokens == len(cluster.tokens[0])
    cluster.add(1, prompt(6), Route(prefill="n", decode="n"), given=cluster.tokens[0], max_tokens=20)
    cluster.drain()
    cluster.check_all_free()
