"""One mixed instance: budget, chunks, order, preemption, limits, steps in flight."""

import numpy as np
import pytest
from support.simulator import Shape, SimCluster, reference

from blockferry.engine.request import FinishReason
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import RowLogprobs, StepResult

MIXED = Route(prefill="m", decode="m")


def make(**shape) -> SimCluster:
    max_model_len = shape.pop("max_model_len", 96)
    return SimCluster(Shape(instance_id="m", **shape), max_model_len=max_model_len)


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def step(cluster: SimCluster):
    plan = cluster.plan("m")
    cluster.execute("m")
    cluster.commit("m")
    return plan


def test_prompt_is_computed_in_chunks_of_the_budget():
    cluster = make(max_num_batched_tokens=8)
    cluster.add(0, prompt(20), MIXED, max_tokens=1)
    plans = [step(cluster) for _ in range(3)]
    assert [plan.num_scheduled.tolist() for plan in plans] == [[8], [8], [4]]
    assert [plan.sample.tolist() for plan in plans] == [[False], [False], [True]]


def test_decode_rows_take_the_budget_first_then_running_prefills_then_new_ones():
    cluster = make(max_num_batched_tokens=8)
    cluster.add(0, prompt(8), MIXED, max_tokens=9)
    step(cluster)
    cluster.add(1, prompt(9, 1), MIXED, max_tokens=9)
    cluster.add(2, prompt(20, 2), MIXED, max_tokens=9)
    first, second = step(cluster), step(cluster)
    assert first.num_scheduled.tolist() == [1, 7]
    assert second.num_scheduled.tolist() == [1, 2, 5]
    assert second.sample.tolist() == [True, True, False]


def test_earlier_arrival_runs_first_whatever_its_priority_under_fcfs():
    cluster = make(max_num_seqs=1)
    cluster.add(0, prompt(4), MIXED, max_tokens=1, priority=5)
    cluster.add(1, prompt(4, 1), MIXED, max_tokens=1, priority=0)
    cluster.drain()
    assert list(cluster.finished) == [0, 1]


def test_lower_priority_number_runs_first_under_priority():
    cluster = make(max_num_seqs=1, policy="priority")
    cluster.add(0, prompt(4), MIXED, max_tokens=1, priority=5)
    cluster.add(1, prompt(4, 1), MIXED, max_tokens=1, priority=0)
    cluster.drain()
    assert list(cluster.finished) == [1, 0]


def test_preempted_request_keeps_its_tokens_and_those_in_flight():
    cluster = make(num_blocks=9, max_num_seqs=2, enable_caching=False)
    cluster.add(0, prompt(8), MIXED, max_tokens=20)
    cluster.add(1, prompt(8, 1), MIXED, max_tokens=20)
    cluster.drain()
    assert cluster.finished[0].stats.num_preemptions == 0
    assert cluster.finished[1].stats.num_preemptions > 0
    cluster.check_all_free()


def test_victim_is_the_lowest_priority_row():
    cluster = make(num_blocks=9, max_num_seqs=2, policy="priority", enable_caching=False)
    cluster.add(0, prompt(8), MIXED, max_tokens=20, priority=1)
    cluster.add(1, prompt(8, 1), MIXED, max_tokens=20, priority=0)
    cluster.drain()
    assert (cluster.finished[0].stats.num_preemptions > 0, cluster.finished[1].stats.num_preemptions) == (True, 0)


def test_oldest_prefill_gets_the_blocks_of_younger_decodes():
    cluster = make(num_blocks=12, max_num_batched_tokens=6, policy="priority", enable_caching=False, watermark=0.0)
    cluster.add(0, prompt(8, 1), MIXED, max_tokens=30, priority=1)
    for _ in range(2):
        step(cluster)
    cluster.add(1, prompt(30), MIXED, max_tokens=2, priority=0)
    cluster.drain()
    assert list(cluster.finished) == [1, 0]
    cluster.check_all_free()


def test_no_step_is_planned_past_max_tokens():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=2)
    assert cluster.plan("m") is not None
    assert cluster.plan("m") is not None
    cluster.execute("m")
    cluster.commit("m")
    assert cluster.plan("m") is None


def test_output_ends_at_max_model_len():
    cluster = make(max_model_len=12)
    cluster.add(0, prompt(8), MIXED, max_tokens=100)
    cluster.drain()
    assert len(cluster.tokens[0]) == 4
    assert cluster.finished[0].reason is FinishReason.LENGTH


def test_at_most_num_steps_in_flight_are_planned():
    cluster = make(num_steps_in_flight=2)
    cluster.add(0, prompt(4), MIXED, max_tokens=9)
    assert [cluster.plan("m") is None for _ in range(3)] == [False, False, True]


def test_decode_step_is_planned_before_its_input_is_known():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=9)
    cluster.plan("m")
    second = cluster.plan("m")
    assert (second.num_computed.tolist(), second.num_scheduled.tolist()) == ([4], [1])


def test_token_after_a_stop_token_is_dropped():
    cluster = make()
    tokens, _, _ = reference(cluster.add(0, prompt(4), MIXED, max_tokens=9), max_model_len=96)
    cluster.abort(0)
    cluster.add(1, prompt(4), MIXED, max_tokens=9, stop_token_ids=(tokens[1],))
    cluster.drain()
    assert cluster.tokens[1] == tokens[:2]
    assert (cluster.finished[1].reason, cluster.finished[1].stop_token_id) == (FinishReason.STOP, tokens[1])


def test_stop_token_counts_only_from_min_tokens_on():
    cluster = make()
    tokens, _, _ = reference(cluster.add(0, prompt(4), MIXED, max_tokens=4), max_model_len=96)
    cluster.abort(0)
    cluster.add(1, prompt(4), MIXED, max_tokens=4, stop_token_ids=(tokens[0],), min_tokens=2)
    cluster.drain()
    cluster.check_output(1)
    assert len(cluster.tokens[1]) > 1


def test_max_tokens_zero_ends_after_the_prompt_without_a_token():
    cluster = make(max_num_batched_tokens=8)
    cluster.add(0, prompt(12), MIXED, max_tokens=0)
    cluster.drain()
    assert cluster.tokens[0] == []
    assert cluster.finished[0].reason is FinishReason.LENGTH
    assert cluster.workers["m"].num_computed_tokens == 12


def test_row_is_reused_only_after_the_steps_that_name_it_have_retired():
    cluster = make(max_num_seqs=1)
    cluster.add(0, prompt(4), MIXED, max_tokens=9)
    cluster.plan("m")
    cluster.abort(0)
    cluster.add(1, prompt(4, 1), MIXED, max_tokens=2)
    assert cluster.plan("m") is None
    cluster.execute("m")
    cluster.commit("m")
    plan = cluster.plan("m")
    assert plan.freed_rows.tolist() == plan.rows.tolist() == [0]
    cluster.drain()
    cluster.check_all_free()


def test_equal_prompts_of_one_step_share_blocks():
    cluster = make(max_num_batched_tokens=64)
    for handle in range(3):
        cluster.add(handle, prompt(17), MIXED, max_tokens=1)
    assert step(cluster).num_scheduled.tolist() == [17, 1, 1]
    assert [cluster.finished[handle].stats.num_cached_tokens for handle in range(3)] == [0, 16, 16]


def test_prompt_logprobs_make_the_whole_prompt_be_computed():
    cluster = make(max_num_batched_tokens=64)
    cluster.add(0, prompt(17), MIXED, max_tokens=1)
    cluster.drain()
    cluster.add(1, prompt(17), MIXED, max_tokens=1, num_prompt_logprobs=0)
    assert step(cluster).num_scheduled.tolist() == [17]


def test_prompt_logprobs_are_delivered_once_per_position():
    cluster = make(num_blocks=32)
    cluster.add(0, prompt(6), MIXED, max_tokens=2, num_prompt_logprobs=0)
    plan = cluster.plan("m")

    def entry(first_position: int, count: int) -> RowLogprobs:
        row = int(plan.rows[0])
        return RowLogprobs(row=row, first_position=first_position, is_prompt=True, entries=(None,) * count)

    result = StepResult(step_id=0, token_ids=np.array([1], np.int32), logprobs=(entry(1, 3), entry(2, 4)))
    output = cluster.central.commit("m", result)
    assert [(one.first_position, len(one.entries)) for _, one in output.logprobs] == [(1, 3), (4, 2)]


def test_result_of_another_step_is_refused():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=9)
    cluster.plan("m")
    with pytest.raises(ValueError, match="step 1, but step 0 is the oldest in flight"):
        cluster.central.commit("m", StepResult(step_id=1, token_ids=np.array([1], np.int32)))


def test_result_of_the_wrong_length_is_refused():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=9)
    cluster.plan("m")
    with pytest.raises(ValueError, match="samples 1 rows, but its result has 2 tokens"):
        cluster.central.commit("m", StepResult(step_id=0, token_ids=np.array([1, 2], np.int32)))


@pytest.mark.parametrize("num_steps_before", range(8))
def test_abort_at_any_step_frees_every_block(num_steps_before):
    cluster = make(max_num_batched_tokens=4, num_blocks=9)
    for handle in range(3):
        cluster.add(handle, prompt(9, handle), MIXED, max_tokens=6)
    for _ in range(num_steps_before):
        cluster.plan("m")
        cluster.plan("m")
        cluster.execute("m")
        cluster.commit("m")
    for handle in range(3):
        cluster.abort(handle)
        cluster.check()
    cluster.drain()
    cluster.check_all_free()


def test_stats_measure_queue_and_prefill_on_the_scheduler_clock():
    cluster = make()
    cluster.add(0, prompt(4), MIXED, max_tokens=2)
    cluster.now_s += 2.0
    cluster.plan("m")
    cluster.now_s += 0.5
    cluster.execute("m")
    cluster.commit("m")
    cluster.drain()
    stats = cluster.finished[0].stats
    assert (stats.queued_s, stats.prefill_s, stats.num_output_tokens) == (2.0, 0.5, 2)
