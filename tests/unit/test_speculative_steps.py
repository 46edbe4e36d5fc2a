"""Speculation on one instance: what is planned, what a result means, and which results are refused."""

import dataclasses

import numpy as np
import pytest
from support.sim_drafts import SimDrafts
from support.simulator import Shape, SimCluster, reference

from blockferry.engine.request import FinishReason, TokenLogprobs
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import NO_DRAFT, RowLogprobs, StepResult

MIXED = Route(prefill="m", decode="m")
RIGHT = SimDrafts(accuracy=1.0, is_adaptive=False)
WRONG = SimDrafts(accuracy=0.0, is_adaptive=False)


def make(drafts: SimDrafts = RIGHT, **shape) -> SimCluster:
    max_model_len = shape.pop("max_model_len", 96)
    return SimCluster(Shape(instance_id="m", drafts=drafts, **shape), max_model_len=max_model_len)


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def step(cluster: SimCluster):
    plan = cluster.plan("m")
    cluster.execute("m")
    cluster.commit("m")
    cluster.check()
    return plan


def counts(cluster: SimCluster) -> dict:
    return cluster.central.status()["instances"][0]["speculation"]


# planning


def test_a_decode_row_is_planned_with_the_drafts_that_were_proposed():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=20)
    first, second = step(cluster), step(cluster)
    assert (first.num_proposals, len(first.num_drafts)) == (3, 0)
    assert (second.num_computed.tolist(), second.num_scheduled.tolist()) == ([4], [4])
    assert second.num_drafts.tolist() == [3]
    tokens, _, _ = reference(cluster.requests[0], max_model_len=96)
    assert second.draft_token_ids.tolist() == tokens[1:4]


def test_accepted_drafts_and_one_token_more_are_delivered():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=20)
    step(cluster)
    step(cluster)
    assert len(cluster.tokens[0]) == 1 + 4


def test_computed_count_goes_back_where_drafts_did_not_hold():
    cluster = make(WRONG)
    cluster.add(0, prompt(4), MIXED, max_tokens=20)
    plans = [step(cluster) for _ in range(3)]
    assert [plan.num_computed.tolist() for plan in plans] == [[0], [4], [5]]
    assert len(cluster.tokens[0]) == 3


def test_a_row_waits_for_the_result_of_its_step():
    cluster = make(num_steps_in_flight=2)
    cluster.add(0, prompt(4), MIXED, max_tokens=20)
    assert cluster.plan("m") is not None
    assert cluster.plan("m") is None
    cluster.execute("m")
    cluster.commit("m")
    assert cluster.plan("m") is not None


def test_prefills_go_on_while_decode_rows_wait():
    cluster = make(num_steps_in_flight=2, max_num_batched_tokens=8)
    cluster.add(0, prompt(4), MIXED, max_tokens=20)
    step(cluster)
    cluster.add(1, prompt(20, 1), MIXED, max_tokens=20)
    first, second = cluster.plan("m"), cluster.plan("m")
    assert first.num_scheduled.tolist() == [4, 4]
    assert second.num_scheduled.tolist() == [8]


def test_decode_rows_go_on_together_after_a_prefill_has_joined_them():
    cluster = make(num_steps_in_flight=2, max_num_batched_tokens=16)
    cluster.add(0, prompt(4), MIXED, max_tokens=60)
    step(cluster)
    cluster.plan("m")
    cluster.add(1, prompt(8, 1), MIXED, max_tokens=60)
    cluster.plan("m")
    sizes = []
    for _ in range(4):
        cluster.execute("m")
        cluster.commit("m")
        plan = cluster.plan("m")
        sizes.append(0 if plan is None else len(plan.rows))
    assert sizes == [1, 0, 2, 2]


def test_drafts_stay_within_the_token_budget_oldest_rows_first():
    cluster = make(max_num_batched_tokens=8, num_blocks=100)
    for handle in range(3):
        cluster.add(handle, prompt(2, handle), MIXED, max_tokens=20)
    step(cluster)
    assert step(cluster).num_drafts.tolist() == [3, 2, 0]


def test_drafts_leave_half_of_the_budget_to_prompts():
    cluster = make(max_num_batched_tokens=7)
    cluster.add(0, prompt(4), MIXED, max_tokens=20)
    cluster.add(1, prompt(3, 1), MIXED, max_tokens=20)
    step(cluster)
    cluster.add(2, prompt(20, 2), MIXED, max_tokens=20)
    plan = step(cluster)
    assert plan.num_drafts.tolist() == [2, 0, 0]
    assert plan.num_scheduled.tolist() == [3, 1, 3]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_step_never_yields_more_than_max_tokens(max_tokens):
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=max_tokens)
    cluster.drain()
    cluster.check_all_free()
    assert cluster.finished[0].stats.num_output_tokens == max_tokens


def test_no_draft_reaches_beyond_max_model_len():
    cluster = make(max_model_len=12)
    cluster.add(0, prompt(6), MIXED, max_tokens=100)
    plans = [step(cluster) for _ in range(3)]
    # position 11 is the last token's, which is never computed
    assert max(int((plan.num_computed + plan.num_scheduled).max()) for plan in plans if plan) <= 11
    assert cluster.finished[0].reason is FinishReason.LENGTH


def test_the_last_step_asks_for_no_proposals():
    cluster = make(WRONG)
    cluster.add(0, prompt(4), MIXED, max_tokens=4)
    assert [step(cluster).num_proposals for _ in range(4)] == [2, 1, 0, 0]


# room


def test_drafts_are_dropped_where_blocks_are_lacking():
    # 4 blocks of 4: two prompts of 7 hold all of them, and each row's next token ends its block
    cluster = make(num_blocks=5, block_size=4, enable_caching=False, watermark=0.0)
    cluster.add(0, prompt(6), MIXED, max_tokens=8)
    cluster.add(1, prompt(6, 1), MIXED, max_tokens=2)
    step(cluster)
    plan = step(cluster)
    assert plan.num_drafts.tolist() == []
    cluster.drain()
    assert [cluster.finished[handle].stats.num_preemptions for handle in (0, 1)] == [0, 0]
    cluster.check_all_free()


def test_a_row_that_holds_its_slots_drafts_though_an_older_one_lacks_a_block():
    # all 4 blocks of 8 are held; the older row's drafts would reach into a block more, the younger's do not
    cluster = make(num_blocks=5, block_size=8, enable_caching=False, watermark=0.0, max_num_batched_tokens=40)
    cluster.add(0, prompt(6), MIXED, max_tokens=9)
    cluster.add(1, prompt(17, 1), MIXED, max_tokens=9)
    step(cluster)
    assert step(cluster).num_drafts.tolist() == [0, 3]
    cluster.drain()
    cluster.check_all_free()


@pytest.mark.parametrize("num_blocks", [24, 200])
def test_room_for_drafts_may_be_scarce_or_plenty(num_blocks):
    cluster = make(SimDrafts(accuracy=0.7), num_blocks=num_blocks)
    for handle in range(6):
        cluster.add(handle, prompt(5 + handle, handle), MIXED, max_tokens=25)
    while cluster.step_all():
        cluster.check()
    cluster.check_all_free()
    assert counts(cluster)["num_accepted"] > 20


def test_a_request_that_fills_the_whole_pool_runs_with_drafts():
    # admission asks for the blocks of its tokens alone: 4 blocks of 4, and the last token is never computed
    cluster = make(num_blocks=5, block_size=4, watermark=0.0)
    cluster.add(0, prompt(6), MIXED, max_tokens=11)
    cluster.drain()
    cluster.check_all_free()
    assert cluster.finished[0].stats.num_output_tokens == 11
    assert counts(cluster)["num_accepted"] > 0


# results


def stop_inside(cluster: SimCluster, place: int, **sampling) -> list[int]:
    """A request that stops at its place-th token of output, and that output."""
    request = cluster.add(0, prompt(4), MIXED, max_tokens=20)
    tokens, _, _ = reference(request, max_model_len=96)
    cluster.abort(0)
    cluster.add(1, prompt(4), MIXED, max_tokens=20, stop_token_ids=(tokens[place],), **sampling)
    return tokens


@pytest.mark.parametrize("place", range(6))
def test_a_stop_id_among_accepted_drafts_cuts_the_rest_off(place):
    cluster = make()
    tokens = stop_inside(cluster, place)
    cluster.drain()
    cluster.check_all_free()
    end = tokens.index(tokens[place])
    assert cluster.tokens[1] == tokens[: end + 1]
    assert cluster.finished[1].reason is FinishReason.STOP


def test_min_tokens_counts_for_each_token_of_a_step():
    cluster = make()
    stop_inside(cluster, 1, min_tokens=3)
    cluster.drain()
    cluster.check_all_free()


def test_two_rows_may_stop_at_different_places_of_one_step():
    cluster = make(num_blocks=100)
    for handle, place in enumerate((1, 2, 3, 7)):
        request = cluster.add(handle, prompt(4, handle), MIXED, max_tokens=12)
        tokens, _, _ = reference(request, max_model_len=96)
        cluster.add(10 + handle, prompt(4, handle), MIXED, max_tokens=12, stop_token_ids=(tokens[place],))
    cluster.drain()
    cluster.check_all_free()


def test_aborted_rows_get_no_token_of_a_step_in_flight():
    cluster = make(num_blocks=100)
    for handle in range(3):
        cluster.add(handle, prompt(4, handle), MIXED, max_tokens=12)
    step(cluster)
    cluster.plan("m")
    cluster.abort(1)
    cluster.execute("m")
    cluster.commit("m")
    cluster.check()
    assert [len(cluster.tokens[handle]) for handle in range(3)] == [5, 1, 5]


def test_a_row_preempted_in_flight_keeps_the_drafts_that_were_accepted():
    cluster = make(num_blocks=100, enable_caching=False)
    cluster.add(0, prompt(4), MIXED, max_tokens=20)
    step(cluster)
    cluster.plan("m")
    instance = cluster.instances["m"]
    instance.preempt(instance.batch.sequences[0])
    cluster.check()
    cluster.execute("m")
    cluster.commit("m")
    cluster.check()
    assert len(cluster.tokens[0]) == 5
    assert instance.speculation.num_kept(0) == 0
    cluster.drain()
    cluster.check_all_free()


def test_log_probabilities_of_cut_tokens_are_dropped():
    cluster = make()
    tokens = stop_inside(cluster, 2)
    step(cluster)
    plan = cluster.plan("m")
    cluster.execute("m")
    result = cluster.results["m"].pop()
    row, first = int(plan.rows[0]), int(plan.num_computed[0]) + 1
    entries = tuple(
        TokenLogprobs(token_ids=np.array([token_id], np.int32), logprobs=np.zeros(1, np.float32), rank=1)
        for token_id in result.token_ids.tolist()
    )
    logprobs = (RowLogprobs(row=row, first_position=first, is_prompt=False, entries=entries),)
    cluster.results["m"].append(dataclasses.replace(result, logprobs=logprobs))
    cluster.commit("m")
    ((_, mine),) = ((handle, entry) for handle in (1,) for entry in cluster.logprobs[handle])
    assert [int(entry.token_ids[0]) for entry in mine.entries] == tokens[1:3]


def test_requests_are_told_how_many_drafts_were_verified_and_accepted():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=9)
    cluster.drain()
    stats = cluster.finished[0].stats
    assert (stats.num_drafted_tokens, stats.num_accepted_tokens) == (6, 6)


def test_status_counts_drafts_per_position():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=8)
    cluster.drain()
    assert counts(cluster) == {
        "num_steps": 2,
        "num_drafted": 5,
        "num_accepted": 5,
        "drafted_per_position": [2, 2, 1],
        "accepted_per_position": [2, 2, 1],
    }


def test_status_without_speculation_says_none():
    cluster = SimCluster(Shape(instance_id="m"))
    assert cluster.central.status()["instances"][0]["speculation"] is None


# results that no plan can have


def refused(match: str, drafts: SimDrafts = RIGHT, **changes) -> None:
    cluster = make(drafts)
    for handle in range(2):
        cluster.add(handle, prompt(4, handle), MIXED, max_tokens=20)
    step(cluster)
    plan = cluster.plan("m")
    cluster.execute("m")
    right = cluster.results["m"].pop()
    assert right.num_tokens.tolist() == [4, 4]
    assert plan.num_proposals == 3
    wrong = dataclasses.replace(right, **changes)
    with pytest.raises(ValueError, match=match):
        cluster.central.commit("m", wrong)
    cluster.check()
    cluster.results["m"].append(right)
    cluster.commit("m")
    assert len(cluster.tokens[0]) == 5


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_result_that_counts_other_rows_is_refused():
    refused("counts the tokens of 3", num_tokens=int32(4, 3, 1))


def test_a_result_with_more_tokens_than_drafts_and_one_is_refused():
    refused("5 tokens for sampling row 1, which may have 1 to 4", num_tokens=int32(3, 5))


def test_a_result_without_a_token_for_a_row_is_refused():
    refused("0 tokens for sampling row 0", num_tokens=int32(0, 4))


def test_a_result_whose_counts_do_not_add_up_is_refused():
    refused("has 8 tokens, but counts 7", num_tokens=int32(4, 3))


def test_proposals_of_another_shape_are_refused():
    refused("shape", proposals=np.zeros((2, 2), np.int32))


def test_a_draft_below_no_draft_is_refused():
    refused("got the draft -2", proposals=np.full((2, 3), -2, np.int32))


def test_a_draft_after_no_draft_is_refused():
    refused("after -1", proposals=np.array([[1, 2, 3], [NO_DRAFT, 1, NO_DRAFT]], np.int32))


def test_several_tokens_without_drafts_are_refused():
    cluster = SimCluster(Shape(instance_id="m"))
    cluster.add(0, prompt(4), MIXED, max_tokens=4)
    cluster.plan("m")
    with pytest.raises(ValueError, match="may have 1 to 1"):
        cluster.central.commit("m", StepResult(step_id=0, token_ids=int32(1, 2), num_tokens=int32(2)))
