"""One mixed instance whose ledger has several groups: chunks, deferred hits, copies and room."""

import numpy as np
import pytest
from support.sim_families import SPECS, can_cache
from support.simulator import Shape, SimCluster

from blockferry.engine.errors import RequestRejected
from blockferry.engine.scheduler.outputs import Route

MIXED = Route(prefill="m", decode="m")


def make(family: str, **shape) -> SimCluster:
    shape = {"num_blocks": 400, "max_num_batched_tokens": 64, "watermark": 0.0, **shape}
    return SimCluster(Shape(instance_id="m", family=family, **shape), max_model_len=96)


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def step(cluster: SimCluster):
    plan = cluster.plan("m")
    cluster.execute("m")
    cluster.commit("m")
    return plan


def found_in(kv, group: int):
    """Which blocks can be found as those of a group; bool [num_usable_blocks]."""
    reports = [kv.report_block(block_id, group) for block_id in range(1, kv.num_usable_blocks + 1)]
    return np.array([report.hash_group == group for report in reports])


def chunks(cluster: SimCluster, num_steps: int) -> list[list[int]]:
    return [step(cluster).num_scheduled.tolist() for _ in range(num_steps)]


@pytest.mark.parametrize("family", sorted(SPECS))
@pytest.mark.parametrize("num_batched_tokens", [5, 64])
def test_every_mix_of_groups_serves_shared_prompts_and_comes_back_clean(family, num_batched_tokens):
    cluster = make(family, max_num_batched_tokens=num_batched_tokens, enable_caching=can_cache(family))
    for handle in range(12):
        cluster.add(handle, prompt(17 + 5 * (handle % 4)), MIXED, max_tokens=1 + 7 * (handle % 3))
        for _ in range(3):
            step(cluster)
            cluster.check()
    cluster.drain()
    cluster.check_all_free()
    if can_cache(family):
        assert cluster.instances["m"].kv.stats().num_hit_tokens > 0


def test_prompt_of_a_model_with_states_is_cut_where_a_state_is_kept():
    cluster = make("full+states", max_num_batched_tokens=14)
    cluster.add(0, prompt(30), MIXED, max_tokens=1)
    assert chunks(cluster, 3) == [[12], [12], [4]]
    assert chunks(cluster, 1) == [[2]]


def test_repeated_prompt_resumes_from_the_last_kept_state():
    cluster = make("full+states, hits inside states")
    for handle in range(2):
        cluster.add(handle, prompt(30), MIXED, max_tokens=1)
        cluster.drain()
    assert cluster.finished[1].stats.num_cached_tokens == 28


def test_junction_of_two_prompts_is_kept_by_the_second_and_found_by_the_third():
    cluster = make("full+states")
    shared, own = prompt(20), [prompt(20, family) for family in (1, 2, 3)]
    for handle in range(3):
        cluster.add(handle, np.concatenate([shared, own[handle]]), MIXED, max_tokens=1)
        cluster.drain()
    assert [cluster.finished[handle].stats.num_cached_tokens for handle in range(3)] == [0, 0, 20]


def test_models_without_states_are_cut_by_the_budget_alone():
    cluster = make("full+5 windows", max_num_batched_tokens=13)
    cluster.add(0, prompt(30), MIXED, max_tokens=1)
    assert chunks(cluster, 3) == [[13], [13], [4]]


def test_hit_on_a_state_of_the_same_step_is_used_in_the_next_one_and_others_go_ahead():
    cluster = make("full+states")
    for handle, family in enumerate([0, 0, 1]):
        cluster.add(handle, prompt(17, family), MIXED, max_tokens=1)
    sequences = {handle: cluster.central._tickets[handle].sequence for handle in range(3)}
    step(cluster)
    assert [sequences[handle].row is not None for handle in range(3)] == [True, False, True]
    step(cluster)
    assert sequences[1].num_hit_tokens == 16
    cluster.drain()
    cluster.check_all_free()


def test_nobody_takes_the_row_of_a_deferred_sequence():
    cluster = make("full+states", max_num_seqs=2)
    for handle, family in enumerate([0, 0, 1]):
        cluster.add(handle, prompt(17, family), MIXED, max_tokens=9)
    assert len(step(cluster).rows) == 1
    step(cluster)
    assert [cluster.central._tickets[handle].sequence.row is not None for handle in range(3)] == [True, True, False]


def test_nobody_takes_the_blocks_of_a_deferred_sequence():
    cluster = make("full+states", num_blocks=15)  # 5 + 2 blocks each, of which the second shares 4
    for handle, family in enumerate([0, 0, 1]):
        cluster.add(handle, prompt(17, family), MIXED, max_tokens=1)
    assert len(step(cluster).rows) == 1


def test_state_that_goes_on_is_copied_for_the_cache_before_it_is_overwritten():
    cluster = make("full+states, hits inside states")
    cluster.add(0, prompt(14), MIXED, max_tokens=2)
    plans = [step(cluster) for _ in range(2)]
    assert [len(plan.copies) for plan in plans] == [0, 1]
    group, source, target = plans[1].copies[0].tolist()
    assert (group, source != target) == (1, True)


def test_blocks_of_attention_are_cleared_where_states_may_have_been_in_them():
    cluster = make("full+states")
    cluster.add(0, prompt(5), MIXED, max_tokens=1)
    plan = step(cluster)
    assert plan.zero.tolist() == [[0, block_id] for block_id in plan.deltas.block_id[plan.deltas.group == 0].tolist()]


def test_window_holds_its_reach_however_long_the_sequence():
    cluster = make("window", max_num_batched_tokens=4, enable_caching=False)
    cluster.add(0, prompt(60), MIXED, max_tokens=30)
    most = 0
    while cluster.central.num_unfinished:
        step(cluster)
        kv = cluster.instances["m"].kv
        most = max(most, kv.num_usable_blocks - kv.num_free_blocks)
    assert most <= 4  # 9 tokens of window and 4 of the step, in blocks of 4


def test_retained_prompt_stays_in_reach_of_a_request_that_may_not_look_into_the_cache():
    cluster = make("retained prompt")
    cluster.add(0, prompt(20), MIXED, max_tokens=30, num_prompt_logprobs=0)
    for _ in range(20):
        step(cluster)
    cluster.check()


def test_long_request_is_accepted_where_windows_make_it_fit():
    cluster = make("window", num_blocks=5, max_num_batched_tokens=4)
    cluster.add(0, prompt(60), MIXED, max_tokens=30)
    cluster.drain()
    with pytest.raises(RequestRejected, match="the pool of instance m holds 16 tokens in 4 blocks"):
        make("full", num_blocks=5).add(0, prompt(60), MIXED)


@pytest.mark.parametrize("family", ["full+states, hits inside states", "full+states, hits inside both", "states"])
def test_request_that_only_just_fits_also_fits_with_a_hit_that_must_be_copied(family):
    cluster = make(family, num_blocks=12, block_size=2)
    longest = cluster.instances["m"].kv.room.max_tokens_that_fit
    for handle in range(3):
        cluster.add(handle, prompt(min(longest, 90) - 3 + handle), MIXED, max_tokens=1)
        cluster.drain()
    cluster.check_all_free()


@pytest.mark.parametrize("enable_caching", [False, True])
def test_row_alone_that_is_spread_over_too_many_slabs_starts_over(enable_caching):
    shape = {"num_blocks": 29, "pages_per_slab": (2, 4), "max_num_seqs": 3, "enable_caching": enable_caching}
    cluster = make("full+full", block_size=2, **shape)
    for handle, (num_prompt_tokens, max_tokens) in enumerate([(7, 11), (8, 14), (10, 27), (7, 10), (12, 10)]):
        cluster.add(handle, prompt(num_prompt_tokens, handle % 2), MIXED, max_tokens=max_tokens)
    cluster.drain()
    cluster.check_all_free()


def test_block_of_attention_that_is_computed_anew_is_not_copied_in_the_same_step():
    cluster = make("full+states, hits inside both")
    cluster.add(0, prompt(14), MIXED, max_tokens=1)
    cluster.drain()
    kv = cluster.instances["m"].kv
    kv.evict_blocks(np.arange(1, 400, dtype=np.int32)[found_in(kv, 0)], 0)
    for handle, num_tokens in ((1, 40), (2, 20)):
        cluster.add(handle, prompt(num_tokens), MIXED, max_tokens=1)
    assert len(step(cluster).rows) == 1
    cluster.drain()
    assert [cluster.finished[handle].stats.num_cached_tokens for handle in (1, 2)] == [0, 12]
