"""Blocks between processes over UCX: shared memory, TCP, and peers that die or freeze on the way."""

import dataclasses
import os
import sys
import time

import pytest
from support.pd_pools import command, command_of, make_layout, part, shard
from support.pd_process import InstanceProcess
from support.plan_pools import PoolKey, layouts_of, owned_blocks, plan_of
from support.shared_memory import no_segments_left

from blockferry.connectors.base import TransferMode, TransferState
from blockferry.engine.kv.plan import Planner

pytestmark = pytest.mark.ucx

PATHS = {"shm": ("posix", "self"), "tcp": ("tcp", "self")}
WAYS = PATHS | {"any": ("posix", "tcp", "self")}
BIG = make_layout(num_blocks=512, content_bytes=2048)  # 512 KiB a block
BIG_IDS = list(range(1, 501))


@pytest.fixture
def open_process():
    made = []

    def make(instance_id, layouts, path, **options):
        process = InstanceProcess(instance_id, layouts, transports=WAYS[path], **options)
        made.append(process)
        return process

    with no_segments_left():
        yield make
        for process in made:
            process.close()


def join(prefill, decode, mode):
    executing, other = (prefill, decode) if mode is TransferMode.PUSH else (decode, prefill)
    executing.ask("connect", other.endpoints)
    return executing


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", list(TransferMode))
def test_blocks_arrive_between_processes(open_process, path, mode):
    prefill, decode = (open_process(name, [make_layout()], path) for name in ("p0", "d0"))
    executing = join(prefill, decode, mode)
    src_ids, dst_ids = [3, 1, 7, 20, 11, 30], [5, 9, 2, 6, 8, 31]
    prefill.ask("fill", (src_ids, 90))
    executing.ask("start", command(src_ids, dst_ids, 90, mode=mode))
    (event,) = executing.ask("events")
    assert event.state is TransferState.DONE, event.reason
    assert decode.ask("count_wrong", (dst_ids, 90)) == 0


@pytest.mark.parametrize("path", PATHS)
def test_two_tensor_parallel_ranks_fill_one_pool_of_another_layout(open_process, path):
    prefill = open_process("p0", shard(tp_size=2), path)
    decode = open_process("d0", shard(order="LBNHC", block_size=32), path)
    prefill.ask("connect", decode.endpoints)
    prefill.ask("fill", ([3, 1, 7, 20], 60))
    prefill.ask("start", command([3, 1, 7, 20], [5, 9], 60))
    assert [event.state for event in prefill.ask("events")] == [TransferState.DONE] * 2
    assert decode.ask("count_wrong", ([5, 9], 60)) == 0


@pytest.mark.parametrize("path", PATHS)
def test_blocks_of_several_groups_arrive_in_a_pool_of_another_shape(open_process, path):
    keys = [
        PoolKey(mix="three reaches", planner=Planner.SLAB),
        PoolKey(mix="three reaches", planner=Planner.SLAB, order="BHLNC", block_size=8),
    ]
    prefill, decode = (open_process(name, [layouts_of(key)], path) for name, key in zip(("p0", "d0"), keys))
    prefill.ask("connect", decode.endpoints)
    owned = [[owned_blocks(plan_of(key), group) for group in range(3)] for key in keys]
    parts = [
        part(owned[0][group][:6], owned[1][group][:3], num_tokens, src_group=group, dst_group=group)
        for group, num_tokens in enumerate([24, 8, 13])
    ]
    for one in parts:
        prefill.ask("fill_group", (one.src_group, one.src_block_ids.tolist(), one.num_tokens))
    prefill.ask("start", command_of(*parts))
    (event,) = prefill.ask("events")
    assert event.state is TransferState.DONE, event.reason
    for one in parts:
        assert decode.ask("count_wrong_in", (one.dst_group, one.dst_block_ids.tolist(), one.num_tokens)) == 0


@pytest.mark.parametrize("path", PATHS)
def test_both_instances_may_connect_to_each_other_at_once(open_process, path):
    one, other = (open_process(name, [make_layout()], path) for name in ("p0", "d0"))
    one.tell("connect", other.endpoints)
    other.ask("connect", one.endpoints)
    one._receive()
    one.ask("fill", ([3], 16))
    one.ask("start", command([3], [4], 16))
    assert one.ask("events")[0].state is TransferState.DONE
    assert other.ask("count_wrong", ([4], 16)) == 0


def test_a_transfer_does_not_need_the_model_thread_of_either_side(open_process):
    prefill, decode = (open_process(name, [make_layout()], "tcp") for name in ("p0", "d0"))
    prefill.ask("connect", decode.endpoints)
    prefill.ask("fill", ([3, 1], 32))
    decode.tell("spin", 20_000_000)  # seconds of pure Python in the target's main thread
    prefill.ask("start", command([3, 1], [5, 6], 32))
    (event,) = prefill.ask("events")
    assert event.state is TransferState.DONE, event.reason
    decode._receive()
    assert decode.ask("count_wrong", ([5, 6], 32)) == 0


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_peer_killed_under_way_fails_the_transfer_in_time(open_process, mode):
    prefill, decode = (open_process(name, [BIG], "tcp") for name in ("p0", "d0"))
    executing = join(prefill, decode, mode)
    executing.ask("start", command(BIG_IDS, BIG_IDS[::-1], 8_000, mode=mode))
    time.sleep(0.02)
    started_s = time.monotonic()
    (decode if executing is prefill else prefill).kill()
    (event,) = executing.ask("events")
    assert event.state is TransferState.FAILED
    assert str(mode) in event.reason
    assert time.monotonic() - started_s < 10.0
    assert executing.close() == 0


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_peer_frozen_under_way_fails_the_transfer_at_its_deadline(open_process, mode):
    prefill, decode = (open_process(name, [BIG], "tcp") for name in ("p0", "d0"))
    executing = join(prefill, decode, mode)
    (decode if executing is prefill else prefill).freeze()
    started_s = time.monotonic()
    executing.ask("start", command(BIG_IDS, BIG_IDS[::-1], 8_000, mode=mode, deadline_s=1.0))
    (event,) = executing.ask("events")
    assert event.state is TransferState.FAILED
    assert not event.is_quiesced  # it lies in sockets: the frozen peer's, or the reader's when the answer comes
    assert time.monotonic() - started_s < 8.0
    assert executing.close() == 0


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_peer_that_wakes_after_the_deadline_lives_and_what_it_held_is_reported_as_landed(open_process, mode):
    prefill, decode = (open_process(name, [BIG], "tcp") for name in ("p0", "d0"))
    executing = join(prefill, decode, mode)
    peer = decode if executing is prefill else prefill
    prefill.ask("fill", ([3, 9], 32))
    peer.freeze()
    executing.ask("start", command(BIG_IDS, BIG_IDS[::-1], 8_000, mode=mode, deadline_s=0.2))
    (late,) = executing.ask("events")
    executing.ask("start", command([3, 9], [5, 6], 32, mode=mode, transfer_id=2))  # a connection of its own
    peer.thaw()
    events = [executing.ask("events")[0] for _ in range(2)]
    landed = dataclasses.replace(late, is_quiesced=True, is_watched=False)
    assert landed in events
    assert {event.state for event in events if event != landed} == {TransferState.DONE}
    assert decode.ask("count_wrong", ([5, 6], 32)) == 0
    assert executing.close() == 0
    assert peer.close() == 0


@pytest.mark.parametrize("mode", list(TransferMode))
def test_late_bytes_of_a_killed_peer_are_never_called_landed_while_writes_may_be_on_their_way(open_process, mode):
    prefill, decode = (open_process(name, [BIG], "tcp") for name in ("p0", "d0"))
    executing = join(prefill, decode, mode)
    peer = decode if executing is prefill else prefill
    peer.freeze()
    executing.ask("start", command(BIG_IDS, BIG_IDS[::-1], 8_000, mode=mode, deadline_s=0.2))
    (late,) = executing.ask("events")
    assert not late.is_quiesced
    peer.kill()
    (event,) = executing.ask("events")
    is_read = mode is TransferMode.PULL  # its answers reach nobody once the connection is closed
    assert event == dataclasses.replace(late, is_quiesced=is_read, is_watched=False)


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("layout", [BIG, make_layout(num_blocks=512)], ids=["large", "small"])
def test_a_peer_that_wakes_and_finds_the_other_side_dead_lives(open_process, layout, mode):
    prefill, decode = (open_process(name, [layout], "tcp") for name in ("p0", "d0"))
    executing = join(prefill, decode, mode)
    peer = decode if executing is prefill else prefill
    peer.freeze()
    executing.ask("start", command(BIG_IDS, BIG_IDS[::-1], 8_000, mode=mode))
    time.sleep(0.3)  # until its sockets are full of questions
    executing.kill()
    peer.thaw()
    time.sleep(0.3)
    assert peer.ask("count_wrong", ([], 0)) == 0  # it answers
    assert peer.close() == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_cancelled_transfer_stops_and_the_next_one_works(open_process, path):
    prefill, decode = (open_process(name, [BIG], path) for name in ("p0", "d0"))
    prefill.ask("connect", decode.endpoints)
    prefill.ask("start", command(BIG_IDS, BIG_IDS[::-1], 8_000))
    prefill.ask("cancel", 1)
    (event,) = prefill.ask("events")
    assert event.state is TransferState.CANCELLED
    assert event.num_bytes < BIG.num_bytes
    prefill.ask("fill", ([3, 9], 32))
    prefill.ask("start", command([3, 9], [5, 6], 32, transfer_id=2))
    assert prefill.ask("events")[0].state is TransferState.DONE
    assert decode.ask("count_wrong", ([5, 6], 32)) == 0


@pytest.mark.parametrize("path", PATHS)
def test_processes_end_cleanly_in_any_order(open_process, path):
    prefill, decode = (open_process(name, [make_layout()], path) for name in ("p0", "d0"))
    prefill.ask("connect", decode.endpoints)
    decode.ask("connect", prefill.endpoints)
    started_s = time.monotonic()
    assert decode.close() == 0
    assert prefill.close() == 0
    assert time.monotonic() - started_s < 10.0


OTHER_HOST = """#!/bin/sh
exec unshare --pid --mount --fork --kill-child --mount-proc \\
    sh -c 'mount -t tmpfs tmpfs /dev/shm; exec {python} "$@"' sh "$@"
"""


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_process_that_shares_no_memory_is_reached_over_tcp_though_shared_memory_is_listed(open_process, tmp_path):
    python = tmp_path / "python"
    python.write_text(OTHER_HOST.format(python=sys.executable))
    python.chmod(0o755)
    prefill = open_process("p0", [make_layout()], "any")
    decode = open_process("d0", [make_layout()], "any", executable=str(python))
    prefill.ask("connect", decode.endpoints)
    assert prefill.ask("is_direct", "d0") == [False]
    prefill.ask("fill", ([3, 1], 32))
    prefill.ask("start", command([3, 1], [5, 6], 32))
    assert prefill.ask("events")[0].state is TransferState.DONE
    assert decode.ask("count_wrong", ([5, 6], 32)) == 0


def test_processes_of_one_host_share_memory(open_process):
    prefill, decode = (open_process(name, [make_layout()], "shm") for name in ("p0", "d0"))
    prefill.ask("connect", decode.endpoints)
    assert prefill.ask("is_direct", "d0") == [True]
