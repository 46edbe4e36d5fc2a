"""The deployment as its callers see it: failures, load, status."""

import numpy as np
import pytest
from support.simulator import Shape, SimCluster, make_instance

from blockferry.cluster.bench import scheduler_step
from blockferry.engine.config import Role
from blockferry.engine.errors import RequestRejected
from blockferry.engine.request import FinishReason
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.outputs import Route
from blockferry.engine.wire import StepResult

FERRIED = Route(prefill="p", decode="d")


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def make() -> SimCluster:
    return SimCluster(Shape(instance_id="p"), Shape(instance_id="d"), Shape(instance_id="m"))


def test_requests_of_a_failed_instance_end_with_its_reason():
    cluster = make()
    cluster.add(0, prompt(4), FERRIED, max_tokens=5)
    cluster.add(1, prompt(4), Route(prefill="m", decode="m"), max_tokens=5)
    cluster.plan("p")
    cluster.fail("d")
    assert cluster.finished[0].reason is FinishReason.ERROR
    assert cluster.finished[0].message == "instance d failed: the simulator killed it"
    cluster.drain()
    cluster.check_all_free()


def test_step_that_failed_fails_its_instance():
    cluster = make()
    cluster.add(0, prompt(4), Route(prefill="m", decode="m"), max_tokens=5)
    cluster.plan("m")
    output = cluster.central.commit("m", StepResult(step_id=0, token_ids=np.empty(0, np.int32), error="out of memory"))
    assert [(one.handle, one.reason) for one in output.finished] == [(0, FinishReason.ERROR)]
    assert cluster.central.status()["instances"][2]["state"] == "failed"


def test_failed_instance_takes_no_requests_and_plans_nothing():
    cluster = make()
    cluster.fail("d")
    with pytest.raises(RequestRejected, match="instance d has failed: the simulator killed it"):
        cluster.add(0, prompt(4), FERRIED)
    assert cluster.central.plan("d") is None


def test_abort_of_an_unknown_request_does_nothing():
    assert not make().central.abort(99)


def test_load_counts_queued_tokens_of_waiting_and_partly_computed_prompts():
    cluster = make()
    for handle in range(2):
        cluster.add(handle, prompt(20, handle), Route(prefill="m", decode="m"), max_tokens=5)
    cluster.plan("m")
    load = cluster.central.load("m")
    assert (load.num_queued_tokens, load.num_waiting, load.num_running) == (24, 1, 1)


def test_status_is_plain_data_about_every_instance():
    cluster = make()
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    cluster.plan("p")
    status = cluster.central.status()
    assert [one["instance_id"] for one in status["instances"]] == ["p", "d", "m"]
    assert status["handoffs"]["reserved"] == 1
    assert status["num_unfinished"] == 1


def test_status_counts_prefix_hits_where_prompts_are_computed():
    cluster = SimCluster(Shape(instance_id="p", role=Role.PREFILL), Shape(instance_id="d", role=Role.DECODE))
    for handle in range(2):
        cluster.add(handle, prompt(16), FERRIED, max_tokens=5)
        cluster.drain()
    assert cluster.central.status()["prefix_cache"] == {
        "num_queried_tokens": 32,
        "num_hit_tokens": 12,
        "hit_rate": 0.375,
    }


def test_two_instances_without_a_connector_are_refused():
    instances = [make_instance(Shape(instance_id=name), 64) for name in ("p", "d")]
    central = CentralScheduler(instances)
    cluster = make()
    request = cluster.add(0, prompt(4), FERRIED)
    with pytest.raises(ValueError, match="no connector joins p and d"):
        central.add(request, FERRIED)


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy='lifo' is unknown; use one of fcfs, priority"):
        CentralScheduler([make_instance(Shape(instance_id="m", policy="lifo"), 64)])


def test_requests_without_a_seed_get_one_of_their_own():
    cluster = make()
    for handle in range(2):
        cluster.add(handle, prompt(4), Route(prefill="m", decode="m"))
    seeds = [new_row.sampling.seed for new_row in cluster.plan("m").new_rows]
    assert None not in seeds
    assert seeds[0] != seeds[1]


def test_scheduler_step_benchmark_measures_full_batches(monkeypatch):
    monkeypatch.setattr(scheduler_step, "STEPS_PER_RUN", 2)
    results = scheduler_step.measure([4], num_runs=2)
    assert [(result.name, result.params["drafts"]) for result in results] == [
        ("scheduler_step", 0),
        *[("scheduler_step", 3), ("ratio", 3)] * 2,
    ]
    assert [(result.params["rows"], len(result.runs)) for result in results] == [(4, 2)] * 5
