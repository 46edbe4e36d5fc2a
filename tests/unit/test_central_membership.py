"""Instances that join, drain, fail and leave a running deployment."""

import gc
import weakref

import numpy as np
import pytest
from support.simulator import Shape, SimCluster

from blockferry.connectors.base import TransferState
from blockferry.engine.config import Role
from blockferry.engine.errors import ConfigError, RequestRejected
from blockferry.engine.request import FinishReason
from blockferry.engine.scheduler.outputs import Route

FERRIED = Route(prefill="p", decode="d")
ON_P = Route(prefill="p", decode="p")
P = Shape(instance_id="p", role=Role.PREFILL, max_num_batched_tokens=64)
D = Shape(instance_id="d", role=Role.DECODE, max_num_batched_tokens=64)


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def step(cluster: SimCluster, instance_id: str) -> None:
    cluster.plan(instance_id)
    cluster.execute(instance_id)
    cluster.commit(instance_id)


def held(cluster: SimCluster, instance_id: str) -> int:
    kv = cluster.instances[instance_id].kv
    return kv.num_usable_blocks - kv.num_free_blocks


def ferrying(**options) -> SimCluster:
    """A deployment with request 0's transfer under way."""
    cluster = SimCluster(P, D, **options)
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    step(cluster, "p")
    assert len(cluster.transfers) == 1
    return cluster


# coming


def test_instance_that_joins_takes_over_prompts_of_those_that_were_there():
    cluster = SimCluster(P, D)
    cluster.add_instance(Shape(instance_id="e", role=Role.DECODE))
    cluster.add(0, prompt(10), Route(prefill="p", decode="e"), max_tokens=5)
    cluster.drain()
    assert cluster.finished[0].stats.transfer_blocks == 3
    cluster.check_all_free()


def test_instance_that_joins_hands_prompts_to_those_that_were_there():
    cluster = SimCluster(P, D)
    cluster.add_instance(Shape(instance_id="q", role=Role.PREFILL))
    cluster.add(0, prompt(10), Route(prefill="q", decode="d"), max_tokens=5)
    cluster.drain()
    assert cluster.finished[0].stats.transfer_blocks == 3
    cluster.check_all_free()


@pytest.mark.parametrize("is_removed", [False, True])
def test_id_that_was_used_is_refused(is_removed):
    cluster = SimCluster(P, D)
    if is_removed:
        cluster.central.drain("d", 1.0)
        cluster.tick()
        cluster.remove_instance("d")
    with pytest.raises(ValueError, match="there is or was an instance 'd'; use an id that this deployment never had"):
        cluster.add_instance(D)


def test_instance_whose_layers_differ_is_refused_and_leaves_nothing_behind():
    cluster = SimCluster(P, D)
    with pytest.raises(ConfigError, match="layer 0 in the cache of e is mla_attention"):
        cluster.add_instance(Shape(instance_id="e", role=Role.DECODE, family="mla"))
    cluster.add_instance(Shape(instance_id="e", role=Role.DECODE))
    assert cluster.state("e") == "serving"


# draining


def test_draining_instance_takes_no_request():
    cluster = SimCluster(P, D)
    cluster.central.drain("d", 10.0)
    with pytest.raises(RequestRejected, match="instance d is draining; retry elsewhere"):
        cluster.add(0, prompt(10), FERRIED)


def test_what_runs_on_a_draining_instance_ends_normally_before_it_is_drained():
    cluster = SimCluster(P, D)
    cluster.add(0, prompt(10), ON_P, max_tokens=5)
    step(cluster, "p")
    cluster.central.drain("p", 10.0)
    cluster.tick()
    assert cluster.state("p") == "draining"
    cluster.drain()
    assert (cluster.finished[0].reason, cluster.state("p")) == (FinishReason.LENGTH, "drained")
    cluster.check_all_free()


@pytest.mark.parametrize("instance_id", ["p", "d"])
@pytest.mark.parametrize("num_steps", [0, 1])
def test_hand_off_from_or_to_a_draining_instance_ends_normally(instance_id, num_steps):
    cluster = SimCluster(P, D)
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    for _ in range(num_steps):
        step(cluster, "p")
    cluster.central.drain(instance_id, 10.0)
    cluster.drain()
    assert cluster.finished[0].reason is FinishReason.LENGTH
    assert cluster.finished[0].stats.transfer_blocks == 3
    assert cluster.state(instance_id) == "drained"


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_what_outstays_a_drain_ends_as_resumable(num_steps):
    cluster = SimCluster(P, D)
    cluster.add(0, prompt(10), ON_P, max_tokens=20)
    for _ in range(num_steps):
        step(cluster, "p")
    cluster.central.drain("p", 10.0)
    cluster.tick(9.0)
    assert not cluster.finished
    cluster.tick(1.0)
    assert (cluster.finished[0].reason, cluster.finished[0].is_resumable) == (FinishReason.ERROR, True)
    assert cluster.finished[0].message == "instance p is drained and the 10 s for what ran there are over"
    assert held(cluster, "p") == 0
    cluster.check_output(0)


def test_step_in_flight_at_the_deadline_retires_before_its_instance_is_drained():
    cluster = SimCluster(P, D)
    cluster.add(0, prompt(10), ON_P, max_tokens=20)
    cluster.plan("p")
    cluster.central.drain("p", 0.0)
    cluster.tick()
    assert (cluster.state("p"), list(cluster.finished)) == ("draining", [0])
    cluster.execute("p")
    cluster.commit("p")
    cluster.tick()
    assert cluster.state("p") == "drained"
    assert not cluster.tokens[0]


def test_prompt_that_travels_at_the_deadline_of_its_source_is_recomputed_where_it_goes():
    cluster = ferrying()
    cluster.central.drain("p", 1.0)
    cluster.tick(1.0)
    assert not cluster.finished
    cluster.obey_cancels()
    cluster.drain()
    assert cluster.finished[0].reason is FinishReason.LENGTH
    cluster.check_all_free()


def test_prompt_that_travels_at_the_deadline_of_its_source_ends_as_resumable_under_policy_fail():
    cluster = ferrying(load_failure_policy="fail")
    cluster.central.drain("p", 1.0)
    cluster.tick(1.0)
    assert (cluster.finished[0].reason, cluster.finished[0].is_resumable) == (FinishReason.ERROR, True)


@pytest.mark.parametrize("instance_id", ["p", "d"])
def test_instance_is_not_drained_before_the_last_byte_from_or_to_it_has_landed(instance_id):
    cluster = ferrying()
    cluster.central.drain(instance_id, 1.0)
    cluster.abort(0)
    cluster.tick(1.0)
    assert cluster.state(instance_id) == "draining"
    cluster.finish_transfer(0, TransferState.CANCELLED)
    cluster.tick()
    assert cluster.state(instance_id) == "drained"


def test_drain_told_again_takes_the_new_deadline():
    cluster = SimCluster(P, D)
    cluster.add(0, prompt(10), ON_P, max_tokens=20)
    cluster.central.drain("p", 1000.0)
    cluster.central.drain("p", 1.0)
    cluster.tick(1.0)
    assert cluster.finished[0].is_resumable


def test_drain_with_a_negative_deadline_is_refused():
    cluster = SimCluster(P, D)
    with pytest.raises(ValueError, match="deadline_s=-1 is negative"):
        cluster.central.drain("p", -1)
    assert cluster.state("p") == "serving"


@pytest.mark.parametrize("verb", ["drain", "remove"])
def test_unknown_instance_is_named_with_those_that_there_are(verb):
    central = SimCluster(P, D).central
    with pytest.raises(ValueError, match="instance 'x' is unknown; there are: p, d"):
        central.drain("x", 1.0) if verb == "drain" else central.remove_instance("x")


# failing


def test_what_a_failed_instance_ends_is_resumable():
    cluster = SimCluster(P, D)
    cluster.add(0, prompt(10), ON_P, max_tokens=5)
    cluster.add(1, prompt(10), FERRIED, max_tokens=5)
    cluster.plan("p")
    cluster.fail("p")
    assert [cluster.finished[handle].is_resumable for handle in range(2)] == [True, True]


def test_transfer_that_failed_between_instances_that_go_on_is_not_resumable():
    cluster = ferrying(load_failure_policy="fail")
    cluster.finish_transfer(0, TransferState.FAILED)
    assert (cluster.finished[0].reason, cluster.finished[0].is_resumable) == (FinishReason.ERROR, False)


def test_draining_instance_may_fail():
    cluster = SimCluster(P, D)
    cluster.add(0, prompt(10), ON_P, max_tokens=5)
    cluster.central.drain("p", 10.0)
    cluster.fail("p")
    assert (cluster.state("p"), cluster.finished[0].is_resumable) == ("failed", True)


def test_failed_instance_stays_failed_when_told_to_drain():
    cluster = SimCluster(P, D)
    cluster.fail("p")
    cluster.central.drain("p", 0.0)
    cluster.tick()
    assert cluster.state("p") == "failed"


# leaving


@pytest.mark.parametrize("is_draining", [False, True])
def test_instance_in_use_is_not_removed(is_draining):
    cluster = SimCluster(P, D)
    if is_draining:
        cluster.central.drain("d", 10.0)
    state = "draining" if is_draining else "serving"
    with pytest.raises(ValueError, match=f"instance d is {state}; only one that is drained or failed can be removed"):
        cluster.remove_instance("d")
    assert cluster.state("d") == state


def test_drained_instance_is_forgotten_at_once():
    cluster = SimCluster(P, D)
    cluster.central.drain("d", 10.0)
    cluster.tick()
    cluster.remove_instance("d")
    assert cluster.state("d") == ""
    with pytest.raises(ValueError, match="instance 'd' is unknown"):
        cluster.add(0, prompt(10), FERRIED)


def test_failed_instance_is_forgotten_when_its_processes_have_ended():
    cluster = SimCluster(P, D)
    cluster.fail("d")
    cluster.remove_instance("d")
    cluster.tick(1e6)
    assert cluster.state("d") == "failed"
    cluster.end_processes("d")
    cluster.tick()
    assert cluster.state("d") == ""


def test_blocks_that_a_failed_instance_may_still_write_are_held_until_it_is_forgotten():
    cluster = ferrying(hold_s=90.0)
    cluster.fail("p")
    cluster.remove_instance("p")
    cluster.end_processes("p")
    cluster.abort(0)
    cluster.tick(89.0)
    assert (cluster.state("p"), held(cluster, "d")) == ("failed", 3)
    cluster.check()
    cluster.tick(1.0)
    assert (cluster.state("p"), held(cluster, "d")) == ("", 0)


def test_decode_instance_that_failed_is_forgotten_though_bytes_may_land_in_it():
    cluster = ferrying()
    cluster.fail("d")
    cluster.end_processes("d")
    cluster.remove_instance("d")
    assert cluster.state("d") == ""
    cluster.finish_transfer(0, TransferState.FAILED)
    cluster.check()


@pytest.mark.parametrize("is_lost", [False, True])
def test_nothing_of_an_instance_that_has_left_is_kept(is_lost):
    cluster = ferrying()
    instance = weakref.ref(cluster.instances["p"])
    if is_lost:
        cluster.fail("p")
        cluster.end_processes("p")
    else:
        cluster.central.drain("p", 1000.0)
    cluster.drain()
    cluster.remove_instance("p")
    gc.collect()
    assert instance() is None


def test_others_go_on_when_an_instance_has_left():
    cluster = SimCluster(P, D, Shape(instance_id="e", role=Role.DECODE))
    cluster.central.drain("d", 10.0)
    cluster.tick()
    cluster.remove_instance("d")
    cluster.add(0, prompt(10), Route(prefill="p", decode="e"), max_tokens=5)
    cluster.drain()
    cluster.check_all_free()


def test_instance_is_wanted_until_it_is_asked_to_drain_or_to_leave():
    members = (cluster := SimCluster(P, D)).central.members
    assert members.find("p").is_wanted
    cluster.central.drain("p", 10.0)
    cluster.fail("d")
    assert (members.find("p").is_wanted, members.find("d").is_wanted) == (False, True)
    cluster.remove_instance("d")
    assert not members.find("d").is_wanted
