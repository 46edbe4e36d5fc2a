"""What an instance with tiers does with prefixes that come back: loads, failures, late bytes, aborts."""

import numpy as np
import pytest
from support.simulator import VOCAB_SIZE, Shape, SimCluster, TierShapes

from blockferry.engine.kv.tier_policies import PolicyName
from blockferry.engine.request import FinishReason
from blockferry.engine.scheduler.batch import Phase
from blockferry.engine.scheduler.handoff import LoadFailurePolicy
from blockferry.engine.scheduler.offload_stores import StoreWhen
from blockferry.engine.scheduler.offloading import OffloadOptions
from blockferry.engine.scheduler.outputs import Route

HERE = Route(prefill="m0", decode="m0")


def cluster_of(*, num_blocks: int = 10, **changes) -> SimCluster:
    options = OffloadOptions(**changes.pop("options", {}))
    shape = Shape(instance_id="m0", num_blocks=num_blocks, tiers=TierShapes(options=options, **changes))
    return SimCluster(shape, max_model_len=64)


def prompt(seed: int, num_tokens: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens)


def serve(cluster: SimCluster, handle: int, seed: int) -> None:
    cluster.add(handle, prompt(seed), HERE, max_tokens=2)
    cluster.drain()


def push_out(cluster: SimCluster) -> None:
    """Serve one prompt, then another one in its blocks."""
    serve(cluster, 0, seed=0)
    serve(cluster, 1, seed=1)


def start_load(cluster: SimCluster, handle: int = 2) -> int:
    """The first prompt comes back; its row."""
    cluster.add(handle, prompt(0), HERE, max_tokens=2)
    cluster.plan("m0")
    (row,) = cluster.instances["m0"].batch.rows_in(Phase.LOADING)
    return row


def tiers(cluster: SimCluster) -> dict[str, int | float]:
    return dict(cluster.instances["m0"].tiers.status())


@pytest.mark.parametrize("when", StoreWhen)
def test_a_prefix_that_comes_back_is_loaded_and_not_computed(when: StoreWhen) -> None:
    cluster = cluster_of(options={"when": when})
    push_out(cluster)
    start_load(cluster)
    cluster.drain()
    cluster.check_all_free()
    stats = cluster.finished[2].stats
    assert stats.num_loaded_tokens == stats.num_cached_tokens == 28
    assert tiers(cluster)["num_loaded_tokens"] == 28


def test_what_the_pool_still_holds_is_not_loaded() -> None:
    cluster = cluster_of(num_blocks=64)
    push_out(cluster)
    serve(cluster, 2, seed=0)
    assert cluster.finished[2].stats.num_cached_tokens == 28
    assert tiers(cluster)["load_bytes"] == 0


def test_short_prefixes_are_computed() -> None:
    cluster = cluster_of(options={"min_load_tokens": 29})
    push_out(cluster)
    serve(cluster, 2, seed=0)
    assert tiers(cluster)["num_loaded_tokens"] == 0


def test_a_request_that_may_not_read_the_cache_is_computed() -> None:
    cluster = cluster_of()
    push_out(cluster)
    cluster.add(2, prompt(0), HERE, max_tokens=2, num_prompt_logprobs=0)
    cluster.drain()
    assert tiers(cluster)["num_loaded_tokens"] == 0


def test_a_failed_load_is_computed_and_tried_no_second_time() -> None:
    cluster = cluster_of()
    push_out(cluster)
    start_load(cluster)
    cluster.tiers["m0"].run(cluster.tiers["m0"].may_run(cluster.workers["m0"].last_step)[0], fails=True)
    cluster.drain()
    cluster.check_all_free()
    assert cluster.finished[2].reason is FinishReason.LENGTH
    assert cluster.finished[2].stats.num_loaded_tokens == 0
    assert tiers(cluster)["num_failed_loads"] == 1
    serve(cluster, 3, seed=0)
    assert cluster.finished[3].stats.num_cached_tokens > 0  # what was computed anew


def test_a_failed_load_ends_the_request_where_the_policy_says_so() -> None:
    cluster = cluster_of(options={"policy": LoadFailurePolicy.FAIL})
    push_out(cluster)
    start_load(cluster)
    cluster.tiers["m0"].run(cluster.tiers["m0"].may_run(cluster.workers["m0"].last_step)[0], fails=True)
    cluster.drain()
    cluster.check_all_free()
    assert cluster.finished[2].reason is FinishReason.ERROR
    assert "did not get from a tier into m0: rank 0: the simulator said so" in cluster.finished[2].message


@pytest.mark.parametrize("ending", ["late", "aborted"])
def test_blocks_stay_held_while_bytes_may_land(ending: str) -> None:
    cluster = cluster_of(num_blocks=30, options={"load_timeout_s": 5.0})
    serve(cluster, 0, seed=0)
    for handle in (10, 11, 12, 13):
        serve(cluster, handle, seed=handle)
    row = start_load(cluster)
    instance = cluster.instances["m0"]
    loading = {int(block) for block in instance.kv.block_ids(row)}
    if ending == "late":
        cluster.tick(6.0)
    else:
        cluster.abort(2)
    assert instance.batch.rows_in(Phase.LOADING) == []
    for _ in range(30):
        cluster.tick(0.01)
        plan = cluster.plan("m0")
        assert plan is None or not loading & set(plan.deltas.block_id.tolist())
        cluster.execute("m0")
        cluster.commit("m0")
        cluster.check()
    assert instance.kv.num_usable_blocks - instance.kv.num_free_blocks == len(loading)
    while cluster.copy("m0") or cluster.report_copy("m0"):
        cluster.check()
    cluster.drain()
    cluster.check_all_free()


def test_a_step_waits_for_the_store_of_what_it_writes_over() -> None:
    cluster = cluster_of(options={"when": StoreWhen.ON_EVICTION})
    serve(cluster, 0, seed=0)
    cluster.add(1, prompt(1), HERE, max_tokens=2)
    waits = []
    while (plan := cluster.plan("m0")) is not None:
        waits.append(plan.wait_stored)
        cluster.execute("m0")  # the store is done now at the latest
        cluster.commit("m0")
    assert any(waits)
    cluster.drain()
    cluster.check_all_free()


@pytest.mark.parametrize("policy", PolicyName)
def test_blocks_that_memory_lets_go_come_back_from_disk(policy: PolicyName) -> None:
    cluster = cluster_of(num_units=16, num_disk_units=100, policy=policy)
    for handle in range(4):
        serve(cluster, handle, seed=handle)
    serve(cluster, 10, seed=0)
    cluster.check_all_free()
    assert cluster.finished[10].stats.num_loaded_tokens > 0
    assert tiers(cluster)["disk_loaded_blocks"] > 0


def test_blocks_to_be_loaded_are_not_evicted_for_what_makes_way_for_them() -> None:
    cluster = cluster_of(num_units=9, options={"when": StoreWhen.ON_EVICTION})
    for handle in range(6):
        serve(cluster, handle, seed=handle % 2)
    cluster.check_all_free()


def test_a_lost_instance_gives_back_what_was_loading() -> None:
    cluster = cluster_of()
    push_out(cluster)
    start_load(cluster)
    cluster.fail("m0")
    cluster.check_all_free()
    assert cluster.finished[2].reason is FinishReason.ERROR
