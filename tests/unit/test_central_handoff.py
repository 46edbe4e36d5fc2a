"""The way from prefill to decode: reservation, fence, transfer, and everything that can go wrong on it."""

import numpy as np
import pytest
from support.sim_families import SPECS, can_cache
from support.simulator import Shape, SimCluster

from blockferry.connectors.base import Overlap, TransferEvent, TransferMode, TransferState
from blockferry.engine.config import Role
from blockferry.engine.request import FinishReason
from blockferry.engine.scheduler.outputs import Route

FERRIED = Route(prefill="p", decode="d")
LOCAL_ON_D = Route(prefill="d", decode="d")


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def make(*, p=None, d=None, **options) -> SimCluster:
    p_shape = Shape(instance_id="p", role=Role.PREFILL, **{"max_num_batched_tokens": 64, **(p or {})})
    d_shape = Shape(instance_id="d", role=Role.DECODE, **{"max_num_batched_tokens": 64, **(d or {})})
    return SimCluster(p_shape, d_shape, **options)


def step(cluster: SimCluster, instance_id: str) -> None:
    cluster.plan(instance_id)
    cluster.execute(instance_id)
    cluster.commit(instance_id)


def held(cluster: SimCluster, instance_id: str) -> int:
    kv = cluster.instances[instance_id].kv
    return kv.num_usable_blocks - kv.num_free_blocks


def ferrying(max_tokens: int = 5, **options) -> SimCluster:
    """A deployment with request 0's transfer under way."""
    cluster = make(**options)
    cluster.add(0, prompt(10), FERRIED, max_tokens=max_tokens)
    step(cluster, "p")
    assert len(cluster.transfers) == 1
    return cluster


def test_first_token_comes_from_the_prefill_instance():
    cluster = ferrying()
    assert len(cluster.tokens[0]) == 1


def test_decode_blocks_are_allocated_at_admission_and_cached_after_arrival():
    cluster = make()
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    cluster.plan("p")
    assert held(cluster, "d") == 3
    assert cluster.instances["d"].kv.stats().num_keys == 0
    cluster.execute("p")
    cluster.commit("p")
    cluster.finish_transfer()
    assert cluster.instances["d"].kv.stats().num_keys == 2


def test_prefill_blocks_are_released_on_confirmation_and_stay_cached():
    cluster = ferrying()
    assert held(cluster, "p") == 3
    cluster.finish_transfer()
    assert held(cluster, "p") == 0
    assert cluster.instances["p"].kv.stats().num_keys == 2


def test_command_names_the_prompts_blocks_on_both_sides():
    cluster = ferrying()
    command = cluster.transfers[0].command
    (part,) = command.parts
    assert (command.src_instance_id, command.dst_instance_id, part.num_tokens) == ("p", "d", 10)
    assert (len(part.src_block_ids), len(part.dst_block_ids)) == (3, 3)


def test_decode_instance_own_prefix_hit_is_not_ferried():
    cluster = ferrying()
    cluster.finish_transfer()
    cluster.drain()
    cluster.add(1, prompt(14), FERRIED, max_tokens=5)
    step(cluster, "p")
    (part,) = cluster.transfers[0].command.parts
    assert (part.num_tokens, len(part.src_block_ids), len(part.dst_block_ids)) == (6, 2, 2)
    assert cluster.central.num_unfinished == 1
    cluster.drain()
    assert cluster.finished[1].stats.num_cached_tokens == 8
    cluster.check_all_free()


def test_block_sizes_may_differ():
    cluster = make(p={"block_size": 8}, d={"block_size": 4})
    cluster.add(0, prompt(14), FERRIED, max_tokens=5)
    cluster.drain()
    cluster.add(1, prompt(22), FERRIED, max_tokens=5)
    step(cluster, "p")
    (part,) = cluster.transfers[0].command.parts
    assert (part.first_token, part.num_tokens) == (4, 10)
    cluster.drain()
    cluster.check_all_free()


def test_no_room_on_decode_keeps_the_request_waiting():
    cluster = make(d={"max_num_seqs": 1})
    cluster.add(0, prompt(4), FERRIED, max_tokens=5)
    cluster.add(1, prompt(4, 1), FERRIED, max_tokens=5)
    assert len(cluster.plan("p").rows) == 1
    assert len(cluster.instances["p"].queue) == 1
    cluster.drain()
    cluster.check_all_free()


def test_transfer_waits_for_decode_steps_planned_before_the_allocation():
    cluster = make()
    cluster.add(7, prompt(4, 3), LOCAL_ON_D, max_tokens=20)
    cluster.plan("d")
    cluster.plan("d")
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    step(cluster, "p")
    assert cluster.transfers == []
    cluster.execute("d")
    cluster.commit("d")
    assert cluster.transfers == []
    cluster.execute("d")
    cluster.commit("d")
    assert len(cluster.transfers) == 1
    cluster.drain()
    cluster.check_all_free()


def test_late_step_of_an_aborted_row_never_overwrites_what_was_ferried():
    cluster = make(d={"num_blocks": 5, "enable_caching": False})
    cluster.add(7, prompt(10, 3), LOCAL_ON_D, max_tokens=5)
    cluster.plan("d")
    cluster.plan("d")
    cluster.abort(7)
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    step(cluster, "p")
    while cluster.transfers:
        cluster.finish_transfer()
    cluster.execute("d")
    cluster.execute("d")
    cluster.drain()
    cluster.check_all_free()


def test_transfer_waits_for_the_last_chunk_to_retire():
    cluster = make(p={"max_num_batched_tokens": 6})
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    step(cluster, "p")
    cluster.plan("p")
    cluster.execute("p")
    assert cluster.transfers == []
    cluster.commit("p")
    assert len(cluster.transfers) == 1


def test_every_rank_must_report_before_the_row_runs():
    cluster = ferrying(p={"num_ranks": 2})
    cluster.finish_transfer()
    assert cluster.plan("d") is None
    cluster.finish_transfer()
    assert cluster.plan("d") is not None


@pytest.mark.parametrize(("mode", "executing"), [(TransferMode.PUSH, "p"), (TransferMode.PULL, "d")])
def test_command_goes_to_the_side_that_moves_the_bytes(mode, executing):
    cluster = make(mode=mode)
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    cluster.plan("p")
    cluster.execute("p")
    cluster.central.commit("p", cluster.results["p"].popleft())
    assert [instance_id for instance_id, _ in cluster.central.take_transfers()] == [executing]


def test_stop_token_from_prefill_needs_no_transfer():
    cluster = make()
    cluster.add(0, prompt(10), FERRIED, max_tokens=5, stop_token_ids=tuple(range(23)))
    step(cluster, "p")
    assert cluster.finished[0].reason is FinishReason.STOP
    assert cluster.transfers == []
    cluster.check_all_free()


def test_failed_transfer_is_recomputed_on_decode():
    cluster = ferrying()
    cluster.finish_transfer(state=TransferState.FAILED)
    assert cluster.plan("d").num_scheduled.tolist() == [11]
    cluster.drain()
    assert cluster.finished[0].stats.transfer_blocks == 0
    cluster.check_all_free()


def test_failed_transfer_whose_bytes_may_still_land_is_recomputed_in_other_blocks():
    cluster = ferrying(lease_s=60.0, transfer_timeout_s=30.0)
    cluster.finish_transfer(state=TransferState.FAILED, is_quiesced=False)
    assert cluster.plan("d").num_scheduled.tolist() == [11]
    assert (held(cluster, "p"), held(cluster, "d")) == (0, 6)
    cluster.tick(91.0)
    cluster.drain()
    cluster.check_all_free()


def test_aborted_transfer_whose_bytes_may_still_land_holds_its_blocks():
    cluster = ferrying(lease_s=60.0, transfer_timeout_s=30.0)
    cluster.abort(0)
    cluster.finish_transfer(state=TransferState.FAILED, is_quiesced=False)
    assert (held(cluster, "p"), held(cluster, "d")) == (0, 3)
    cluster.tick(91.0)
    cluster.check_all_free()


def test_failed_transfer_ends_the_request_under_policy_fail():
    cluster = ferrying(load_failure_policy="fail")
    cluster.finish_transfer(state=TransferState.FAILED)
    assert cluster.finished[0].reason is FinishReason.ERROR
    assert "did not get from p to d: the simulator said so" in cluster.finished[0].message
    cluster.check_all_free()


def test_abort_holds_the_decode_blocks_until_the_transfer_has_quiesced():
    cluster = ferrying()
    cluster.abort(0)
    assert cluster.finished[0].reason is FinishReason.ABORT
    assert (held(cluster, "p"), held(cluster, "d")) == (0, 3)
    assert cluster.central.take_cancels() == [("p", 1)]
    cluster.finish_transfer(state=TransferState.CANCELLED)
    cluster.check_all_free()


def test_blocks_of_a_silent_transfer_are_held_as_long_as_the_instance_that_moves_them_lives():
    cluster = ferrying(hold_s=50.0)
    cluster.abort(0)
    cluster.tick(1e5)  # it may be frozen, and go on where it was
    assert held(cluster, "d") == 3
    cluster.fail("p")
    cluster.tick(1e5)
    assert held(cluster, "d") == 3
    cluster.end_processes("p")
    cluster.tick(49.0)
    assert held(cluster, "d") == 3
    cluster.tick(1.5)
    cluster.check_all_free()


@pytest.mark.parametrize("family", sorted(SPECS))
def test_a_rank_that_wakes_late_reaches_no_block_of_another_sequence(family):
    shape = {"family": family, "enable_caching": can_cache(family), "num_blocks": 200}
    cluster = make(p=shape, d=shape)
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    while not cluster.transfers:
        step(cluster, "p")
        step(cluster, "d")  # which clears what bytes are to land in, where states were
    (transfer,) = cluster.transfers
    cluster.tick(40.0)
    cluster.tick(100.0)  # deadline, lease and every timeout are over
    for handle in range(1, 4):
        cluster.add(handle, prompt(12, handle), LOCAL_ON_D, max_tokens=8)
    for number in range(8):
        if number == 3:
            cluster.spoil(transfer)
        step(cluster, "d")
    cluster.drain()
    cluster.check_all_free()


def test_a_lost_report_is_asked_for_and_frees_the_blocks():
    cluster = ferrying(transfer_timeout_s=30.0)
    cluster.finish_transfer(is_lost=True)
    cluster.tick(36.0)
    assert held(cluster, "d") == 3
    cluster.obey_cancels()
    assert held(cluster, "d") == 0
    cluster.drain()
    assert cluster.finished[0].reason is FinishReason.LENGTH
    cluster.check_all_free()


def test_bytes_that_a_frozen_peer_holds_keep_their_blocks_until_they_have_landed():
    cluster = ferrying()
    cluster.finish_transfer(state=TransferState.FAILED, is_quiesced=False, is_watched=True)
    step(cluster, "d")
    cluster.tick(1e5)
    assert held(cluster, "d") == 6
    cluster.finish_watched()
    assert held(cluster, "d") == 3
    cluster.drain()
    cluster.check_all_free()


def test_bytes_of_a_connection_that_fails_while_watched_keep_their_blocks_for_the_hold():
    cluster = ferrying(hold_s=50.0)
    cluster.abort(0)
    cluster.finish_transfer(state=TransferState.FAILED, is_quiesced=False, is_watched=True)
    cluster.tick(1e5)
    cluster.finish_watched(has_landed=False)
    cluster.tick(49.0)
    assert held(cluster, "d") == 3
    cluster.tick(1.5)
    cluster.check_all_free()


def test_a_report_that_comes_twice_counts_once():
    cluster = ferrying()
    cluster.finish_transfer()
    event = TransferEvent(
        transfer_id=1, instance_id="p", rank=0, state=TransferState.FAILED, num_bytes=0, num_runs=0, duration_s=0.0
    )
    cluster.absorb(cluster.central.on_transfer(event))
    cluster.drain()
    assert cluster.finished[0].stats.transfer_blocks == 3
    cluster.check_all_free()


def test_a_decode_instance_that_dies_keeps_no_hand_off():
    cluster = ferrying()
    cluster.fail("d")
    assert cluster.finished[0].reason is FinishReason.ERROR
    assert cluster.central.status()["handoffs"]["quiescing"] == 0
    assert held(cluster, "p") == 0


@pytest.mark.parametrize("num_steps", range(4))
def test_abort_before_the_transfer_frees_both_sides_at_once(num_steps):
    cluster = make(p={"max_num_batched_tokens": 4})
    cluster.add(7, prompt(4, 3), LOCAL_ON_D, max_tokens=20)
    cluster.plan("d")
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    for _ in range(num_steps):
        step(cluster, "p")
    cluster.abort(0)
    assert held(cluster, "p") == 0
    assert held(cluster, "d") == 1
    cluster.drain()
    cluster.check_all_free()


def test_silent_transfer_is_recomputed_in_other_blocks_after_its_deadline():
    cluster = ferrying(transfer_timeout_s=30.0)
    cluster.tick(36.0)
    assert held(cluster, "d") == 3
    plan = cluster.plan("d")
    assert plan.num_scheduled.tolist() == [11]
    assert held(cluster, "d") == 6
    cluster.drain()
    cluster.check_all_free()


def test_lease_over_at_the_fence_gives_the_source_back_and_recomputes():
    cluster = make(lease_s=10.0)
    cluster.add(7, prompt(4, 3), LOCAL_ON_D, max_tokens=20)
    cluster.plan("d")
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    step(cluster, "p")
    cluster.tick(11.0)
    assert held(cluster, "p") == 0
    cluster.drain()
    assert cluster.finished[0].reason is FinishReason.LENGTH
    cluster.check_all_free()


def test_request_whose_prefill_instance_dies_while_ferrying_is_recomputed_on_decode():
    cluster = ferrying()
    cluster.fail("p")
    assert 0 not in cluster.finished
    cluster.drain()
    assert cluster.finished[0].reason is FinishReason.LENGTH
    cluster.check_all_free()


def test_preempted_prefill_gives_its_decode_blocks_back():
    cluster = make(p={"num_blocks": 12, "max_num_batched_tokens": 6, "policy": "priority", "watermark": 0.0})
    on_p = Route(prefill="p", decode="p")
    cluster.add(1, prompt(20), FERRIED, max_tokens=5, priority=1)
    cluster.add(2, prompt(4, 2), on_p, max_tokens=36, priority=0)
    cluster.drain()
    cluster.check_all_free()


def test_request_preempted_on_decode_is_recomputed_there():
    cluster = make(d={"num_blocks": 9, "max_num_seqs": 2})
    for handle in range(2):
        cluster.add(handle, prompt(8, handle), FERRIED, max_tokens=20)
    cluster.drain()
    assert cluster.finished[1].stats.num_preemptions > 0
    assert cluster.finished[1].stats.transfer_blocks == 2
    cluster.check_all_free()


def test_stats_tell_what_was_ferried():
    cluster = ferrying()
    cluster.now_s += 0.25
    cluster.finish_transfer()
    cluster.drain()
    stats = cluster.finished[0].stats
    assert (stats.transfer_s, stats.transfer_bytes, stats.transfer_blocks) == (0.25, 1000, 3)


def chunked(overlap: Overlap, *, num_tokens: int = 22, d=None, **options) -> SimCluster:
    """A deployment whose prefill instance computes request 0's prompt 8 tokens at a time; nothing is planned yet."""
    cluster = make(p={"max_num_batched_tokens": 8}, d=d, overlap=overlap, **options)
    cluster.add(0, prompt(num_tokens), FERRIED, max_tokens=5)
    return cluster


def spans(cluster: SimCluster):
    """(tokens, step to wait for) of every transfer under way."""
    return [(one.command.parts[0].num_tokens, one.command.after_step) for one in cluster.transfers]


def test_without_overlap_nothing_travels_before_the_prompt_is_computed():
    cluster = chunked(Overlap.NONE)
    for _ in range(2):
        step(cluster, "p")
    assert spans(cluster) == []
    step(cluster, "p")
    assert spans(cluster) == [(22, None)]


def test_chunks_travel_when_the_step_that_computed_them_has_retired():
    cluster = chunked(Overlap.CHUNKS)
    cluster.plan("p")
    cluster.execute("p")
    assert spans(cluster) == []
    cluster.commit("p")
    assert spans(cluster) == [(8, None)]
    step(cluster, "p")
    assert spans(cluster) == [(8, None), (8, None)]
    step(cluster, "p")
    assert spans(cluster) == [(8, None), (8, None), (6, None)]
    cluster.drain()
    cluster.check_all_free()


def test_layers_travel_from_when_their_step_is_planned():
    cluster = chunked(Overlap.LAYERS)
    cluster.plan("p")
    cluster.plan("p")
    assert spans(cluster) == [(8, 0), (8, 1)]
    assert not cluster.can_finish(cluster.transfers[0])
    cluster.drain()
    cluster.check_all_free()


def test_pieces_end_where_blocks_of_both_sides_end():
    cluster = chunked(Overlap.CHUNKS, d={"block_size": 16}, num_tokens=30)
    for expected in ([], [(16, None)], [(16, None)], [(16, None), (14, None)]):
        step(cluster, "p")
        assert spans(cluster) == expected
    cluster.drain()
    cluster.check_all_free()


def test_hits_of_the_prefill_instance_travel_with_its_first_chunk():
    cluster = chunked(Overlap.LAYERS)
    cluster.drain()
    cluster.instances["d"].kv.reset_prefix_cache()
    cluster.add(1, prompt(22), FERRIED, max_tokens=5)
    cluster.plan("p")
    assert spans(cluster) == [(22, cluster.instances["p"].last_step)]
    cluster.drain()
    cluster.check_all_free()


def test_pieces_wait_for_decode_steps_planned_before_the_allocation():
    cluster = chunked(Overlap.LAYERS)
    cluster.add(7, prompt(4, 3), LOCAL_ON_D, max_tokens=20)
    cluster.plan("d")
    cluster.plan("p")
    cluster.plan("p")
    assert spans(cluster) == []
    cluster.execute("d")
    cluster.commit("d")
    assert spans(cluster) == [(16, 1)]
    cluster.drain()
    cluster.check_all_free()


def test_bytes_that_arrive_before_the_first_token_is_known_wait_for_it():
    cluster = make(overlap=Overlap.LAYERS)
    cluster.add(0, prompt(10), FERRIED, max_tokens=5)
    cluster.plan("p")
    cluster.execute("p")
    cluster.finish_transfer()
    assert cluster.plan("d") is None
    cluster.commit("p")
    assert cluster.plan("d") is not None
    cluster.drain()
    assert cluster.finished[0].stats.transfer_s == 0.0
    cluster.check_all_free()


def test_a_piece_that_fails_while_the_prompt_is_computed_stops_the_others_and_is_recomputed_on_decode():
    cluster = chunked(Overlap.CHUNKS)
    for _ in range(2):
        step(cluster, "p")
    cluster.finish_transfer(state=TransferState.FAILED)
    assert cluster.central.take_cancels() == [("p", 2)]
    step(cluster, "p")
    assert len(cluster.transfers) == 1
    assert len(cluster.tokens[0]) == 1
    assert cluster.plan("d").num_scheduled.tolist() == [23]
    cluster.drain()
    assert cluster.finished[0].reason is FinishReason.LENGTH
    cluster.check_all_free()


def test_a_piece_that_fails_while_the_prompt_is_computed_ends_the_request_under_policy_fail():
    cluster = chunked(Overlap.CHUNKS, load_failure_policy="fail")
    step(cluster, "p")
    cluster.finish_transfer(state=TransferState.FAILED)
    assert 0 not in cluster.finished
    for _ in range(2):
        step(cluster, "p")
    assert cluster.finished[0].reason is FinishReason.ERROR
    cluster.drain()
    cluster.check_all_free()


def test_abort_while_the_prompt_is_computed_holds_the_decode_blocks_until_its_pieces_have_quiesced():
    cluster = chunked(Overlap.CHUNKS)
    step(cluster, "p")
    cluster.abort(0)
    assert (held(cluster, "p"), held(cluster, "d")) == (0, 6)
    cluster.finish_transfer(state=TransferState.CANCELLED)
    cluster.check_all_free()


def test_preemption_while_pieces_are_under_way_takes_other_decode_blocks():
    cluster = make(p={"num_blocks": 12, "max_num_batched_tokens": 2, "watermark": 0.0}, overlap=Overlap.LAYERS)
    cluster.add(2, prompt(4, 2), Route(prefill="p", decode="p"), max_tokens=36)
    for _ in range(12):
        step(cluster, "p")
    cluster.add(1, prompt(20), FERRIED, max_tokens=5)
    while not cluster.instances["p"].num_preemptions:
        step(cluster, "p")
        cluster.check()
    assert len(cluster.transfers) > 1  # none has ended
    assert held(cluster, "d") == 5
    cancelled = {transfer_id for _, transfer_id in cluster.central.take_cancels()}
    assert cancelled == {transfer.command.transfer_id for transfer in cluster.transfers}
    while cluster.transfers:
        cluster.finish_transfer(state=TransferState.CANCELLED)
    assert held(cluster, "d") == 0
    cluster.drain()
    assert cluster.finished[1].stats.num_preemptions == 1
    cluster.check_all_free()


def test_stop_token_from_prefill_cancels_what_is_under_way():
    cluster = make(overlap=Overlap.LAYERS)
    cluster.add(0, prompt(10), FERRIED, max_tokens=5, stop_token_ids=tuple(range(23)))
    step(cluster, "p")
    assert cluster.finished[0].reason is FinishReason.STOP
    assert cluster.central.take_cancels() == [("p", 1)]
    cluster.finish_transfer(state=TransferState.CANCELLED)
    cluster.check_all_free()


def test_stats_tell_what_the_decode_instance_had_already():
    cluster = ferrying()
    cluster.finish_transfer()
    cluster.drain()
    assert cluster.finished[0].stats.transfer_saved_bytes == 0
    cluster.add(1, prompt(14), FERRIED, max_tokens=5)
    cluster.drain()
    # 6 tokens of 100 bytes travelled, 8 did not
    assert (cluster.finished[1].stats.transfer_bytes, cluster.finished[1].stats.transfer_saved_bytes) == (600, 800)
