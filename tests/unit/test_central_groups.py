"""Hand-overs of caches with several groups: what travels, what it waits for, and what becomes of it when it fails."""

import dataclasses

import numpy as np
import pytest
from support.sim_families import SPECS, can_cache
from support.simulator import Shape, SimCluster, kv_config, make_instance

from blockferry.connectors.base import TransferMode, TransferState
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.config import Role, SchedulerConfig
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.spec import KVCacheConfig, KVCacheGroup
from blockferry.engine.request import FinishReason
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Route

FERRIED = Route(prefill="p", decode="d")
LOCAL_ON_D = Route(prefill="d", decode="d")


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def make(family: str, *, p=None, d=None, **options) -> SimCluster:
    shape = {"family": family, "num_blocks": 400, "max_num_batched_tokens": 64, "watermark": 0.0}
    p_shape = Shape(instance_id="p", role=Role.PREFILL, **shape | (p or {}))
    d_shape = Shape(instance_id="d", role=Role.DECODE, **shape | (d or {}))
    return SimCluster(p_shape, d_shape, **options)


def step(cluster: SimCluster, instance_id: str):
    plan = cluster.plan(instance_id)
    cluster.execute(instance_id)
    cluster.commit(instance_id)
    return plan


def held(cluster: SimCluster, instance_id: str) -> int:
    kv = cluster.instances[instance_id].kv
    return kv.num_usable_blocks - kv.num_free_blocks


def parts_of(cluster: SimCluster) -> dict[int, tuple[int, int]]:
    """(tokens, blocks of D) by group, of the one transfer under way."""
    (transfer,) = cluster.transfers
    return {part.dst_group: (part.num_tokens, len(part.dst_block_ids)) for part in transfer.command.parts}


def ferrying(family: str, num_prompt_tokens: int, **options) -> SimCluster:
    """A deployment with request 0's transfer under way."""
    cluster = make(family, **options)
    cluster.add(0, prompt(num_prompt_tokens), FERRIED, max_tokens=9)
    compute_prompt(cluster)
    return cluster


def compute_prompt(cluster: SimCluster) -> None:
    for _ in range(3):
        step(cluster, "p")
        step(cluster, "d")
    assert len(cluster.transfers) == 1


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("family", sorted(SPECS))
def test_every_mix_of_groups_is_handed_over_and_comes_back_clean(family, mode):
    caching = {"enable_caching": can_cache(family)}
    cluster = make(family, p={"max_num_batched_tokens": 11, **caching}, d=caching, mode=mode)
    for handle in range(12):
        cluster.add(handle, prompt(17 + 5 * (handle % 4)), FERRIED, max_tokens=2 + 7 * (handle % 3))
        for _ in range(3):
            cluster.step_all()
            cluster.check()
    cluster.drain()
    cluster.check_all_free()
    assert all(finished.stats.transfer_blocks for finished in cluster.finished.values() if can_cache(family))


@pytest.mark.parametrize(
    ("family", "num_prompt_tokens", "expected"),
    [
        ("full+window", 30, {0: (30, 8), 1: (6, 2)}),  # a window of 5: the next token reads from 26 on
        ("full+window", 29, {0: (29, 8), 1: (5, 2)}),
        ("full+chunked", 30, {0: (30, 8), 1: (6, 2)}),  # chunks of 8: from 24 on
        ("full+chunked", 32, {0: (32, 8)}),  # a new chunk begins: nothing of it is there yet
        ("full+states", 30, {0: (30, 8), 1: (1, 1)}),
        ("full+window+states", 30, {0: (30, 8), 1: (10, 3), 2: (1, 1)}),  # a window of 9: from 22 on
        ("running states only", 30, {0: (30, 8), 1: (1, 1)}),
        ("full+retained prompt+states", 30, {0: (30, 8), 1: (30, 8), 2: (1, 1)}),
    ],
)
def test_only_what_the_next_token_reads_travels(family, num_prompt_tokens, expected):
    caching = {"enable_caching": can_cache(family)}
    assert parts_of(ferrying(family, num_prompt_tokens, p=caching, d=caching)) == expected


def test_what_the_decode_instance_has_is_not_ferried():
    cluster = ferrying("full+window", 30)
    cluster.finish_transfer()
    cluster.drain()
    cluster.add(1, prompt(38), FERRIED, max_tokens=9)
    step(cluster, "p")
    assert parts_of(cluster) == {0: (10, 3), 1: (6, 2)}
    cluster.drain()
    assert cluster.finished[1].stats.transfer_blocks == 5
    cluster.check_all_free()


def test_bytes_wait_for_the_step_that_clears_their_blocks():
    cluster = make("full+states")
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    for _ in range(2):
        step(cluster, "p")
    assert cluster.transfers == []
    plan = cluster.plan("d")
    assert (len(plan.rows), plan.zero.tolist()) == (0, [[0, 1], [0, 2], [0, 3]])
    assert cluster.transfers == []
    cluster.execute("d")
    cluster.commit("d")
    assert len(cluster.transfers) == 1
    assert cluster.plan("d") is None
    cluster.drain()
    cluster.check_all_free()


def test_no_step_is_planned_where_nothing_is_to_be_cleared():
    cluster = make("full+window")
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    step(cluster, "p")
    assert cluster.plan("d") is None
    assert len(cluster.transfers) == 1


def reserved_with_a_hit_inside_a_block() -> SimCluster:
    """Request 1 is planned on P; D has found 20 of its tokens, in blocks of 8 and a state within a block of 16."""
    cluster = make("full+states, hits inside both")
    cluster.add(0, prompt(22), LOCAL_ON_D, max_tokens=1)
    cluster.drain()
    cluster.add(1, np.concatenate([prompt(21), prompt(5, 1)]), FERRIED, max_tokens=9)
    cluster.plan("p")
    return cluster


def test_block_that_a_hit_ends_inside_of_is_copied_before_its_bytes_arrive():
    cluster = reserved_with_a_hit_inside_a_block()
    assert [group for group, _, _ in cluster.plan("d").copies.tolist()] == [0, 1]
    cluster.execute("d")
    cluster.commit("d")
    while not cluster.transfers:
        cluster.execute("p")
        cluster.commit("p")
        cluster.plan("p")
    assert parts_of(cluster) == {0: (10, 2), 1: (1, 1)}
    cluster.drain()
    cluster.check_all_free()


def test_failed_hand_over_starts_over_on_decode_in_blocks_for_all_of_the_prompt():
    cluster = ferrying("full+window+states", 30)
    num_reserved = held(cluster, "d")
    cluster.finish_transfer(state=TransferState.FAILED)
    assert (held(cluster, "p"), held(cluster, "d")) == (0, 0)
    assert cluster.plan("d").num_scheduled.tolist() == [28]
    assert held(cluster, "d") > num_reserved - 2
    cluster.drain()
    assert cluster.finished[0].reason is FinishReason.LENGTH
    cluster.check_all_free()


def test_abandoned_hand_over_holds_the_blocks_of_every_group():
    cluster = ferrying("full+window+states", 30)
    held_before = held(cluster, "d")
    cluster.abort(0)
    assert (held(cluster, "p"), held(cluster, "d")) == (0, held_before)
    cluster.finish_transfer(state=TransferState.CANCELLED)
    cluster.check_all_free()


def test_window_of_larger_blocks_takes_what_the_prefill_side_still_has():
    cluster = make("full+window of 7 tokens", p={"max_num_batched_tokens": 20}, d={"block_size": 16})
    cluster.add(0, prompt(22), FERRIED, max_tokens=9)
    for _ in range(2):
        step(cluster, "p")
    part = cluster.transfers[0].command.parts[1]
    # before the last chunk, of tokens 20 and 21, blocks before token 12 went
    assert (part.num_tokens, part.first_token, part.dst_first_token) == (6, 0, 0)
    cluster.drain()
    cluster.check_all_free()


def test_prefill_side_without_the_start_of_a_larger_block_sends_the_rest_of_it():
    cluster = make("full+window of 7 tokens", p={"max_num_batched_tokens": 30}, d={"block_size": 16})
    cluster.add(0, prompt(31), FERRIED, max_tokens=9)
    for _ in range(2):
        step(cluster, "p")
    part = cluster.transfers[0].command.parts[1]
    assert (part.num_tokens, part.first_token, part.dst_first_token) == (7, 0, 8)
    cluster.drain()
    cluster.check_all_free()


def test_copies_of_a_decode_instance_that_failed_hold_no_blocks():
    cluster = reserved_with_a_hit_inside_a_block()
    cluster.fail("d")
    cluster.drain()
    cluster.check_all_free()


def join(*instances) -> CentralScheduler:
    return CentralScheduler(instances, connector=PdScheduler(mode=TransferMode.PUSH, transfer_timeout_s=1.0))


def instance_on(config: KVCacheConfig, name: str, role: Role = Role.MIXED) -> Instance:
    rows = RowTable(max_rows=2, max_model_len=64)
    return Instance(name, role, config=SchedulerConfig(), kv=KVCacheManager(config, rows), rows=rows)


def instance_of(name: str, family: str, **shape) -> Instance:
    return make_instance(Shape(instance_id=name, family=family, **shape), 64)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("full+window", "full", r"layer 1 in the cache of d is not cached, in that of p sliding.*: serve one model"),
        ("full+window", "full+states", r"layer 1 in the cache of d is mamba, in that of p sliding"),
        ("full", "mla", r"layer 0 in the cache of d is mla_attention, in that of p full_attention"),
        ("full+window", "full+window of 7 tokens", r"WindowReach\(window=7, .*in that of p .*WindowReach\(window=5,"),
    ],
)
def test_instances_of_other_layers_are_refused_by_name(one, other, words):
    with pytest.raises(ConfigError, match=words):
        join(instance_of("p", one), instance_of("d", other))


def test_blocks_of_other_sizes_are_not_refused():
    join(instance_of("p", "full+states", block_size=4), instance_of("d", "full+states", block_size=8))


def whole_windows(name: str, role: Role) -> Instance:
    """The layers of "full+window" in one group that keeps every token."""
    config = kv_config(Shape(instance_id=name, family="full+window"))
    group = KVCacheGroup(layer_ids=(0, 1), spec=config.groups[0].spec)
    return instance_on(dataclasses.replace(config, groups=(group,)), name, role)


def test_prefill_may_keep_whole_what_is_local_on_the_decode_side():
    join(whole_windows("p", Role.PREFILL), instance_of("d", "full+window", role=Role.DECODE))


def test_decode_may_not_keep_whole_what_is_local_on_the_prefill_side():
    with pytest.raises(ConfigError, match=r"layer 1 in the cache of d is full_attention, in that of p sliding"):
        join(instance_of("p", "full+window", role=Role.PREFILL), whole_windows("d", Role.DECODE))


def test_equal_layers_in_other_groups_are_not_refused():
    config = kv_config(Shape(instance_id="d", family="full+5 windows"))
    full, *windows = config.groups
    layer_ids = tuple(layer_id for group in windows for layer_id in group.layer_ids)
    merged = dataclasses.replace(config, groups=(KVCacheGroup(layer_ids=layer_ids, spec=windows[0].spec), full))
    join(instance_of("p", "full+5 windows"), instance_on(merged, "d"))


def test_layers_that_share_blocks_with_a_drafting_one_on_one_side_alone_are_not_refused():
    plain = kv_config(Shape(instance_id="d"))
    (group,) = plain.groups
    marked = dataclasses.replace(plain, groups=(dataclasses.replace(group, is_draft=True),))
    join(instance_on(plain, "p"), instance_on(marked, "d"))


def test_blocks_that_context_parallel_ranks_share_are_refused_by_name():
    config = kv_config(Shape(instance_id="p"))
    spec = dataclasses.replace(config.groups[0].spec, context_parallel_size=2)
    config = dataclasses.replace(config, groups=(*config.groups, KVCacheGroup(layer_ids=(1,), spec=spec)))
    instance = instance_on(config, "p")
    with pytest.raises(
        ConfigError, match=r"p is to hand sequences over, but group 1 .* whose blocks several ranks share"
    ):
        join(instance)
