"""The worker half of the connector over loopback: every way a transfer can end, and every shape it can have."""

import dataclasses
import threading
import time

import pytest
from support.pd_pools import Instance, command, count_wrong, fill, make_layout, part, shard

from blockferry.connectors.base import HandshakeRefused, RankIdentity, TransferMode, TransferState, TransportError
from blockferry.connectors.compute_progress import ComputeProgress
from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorker, PdWorkerOptions
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport

SMALL_BATCHES = PdWorkerOptions(limits=TransferLimits(batch_bytes=4096, quiesce_timeout_s=0.2), connect_timeout_s=2.0)


@pytest.fixture
def open_instance():
    """Makes instances on one loopback fabric and closes them."""
    fabric = LoopbackFabric()
    made = []

    def make(instance_id, layouts, **changes):
        instance = Instance(
            instance_id, layouts, lambda: LoopbackTransport(fabric), **({"options": SMALL_BATCHES} | changes)
        )
        instance.fabric = fabric
        made.append(instance)
        return instance

    yield make
    for instance in made:
        instance.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")]


@pytest.fixture
def pair(open_instance):
    """One rank on each side, connected, with 40 tokens in blocks 3, 1, 7 of the source."""
    prefill, decode = open_instance("p0", [make_layout()]), open_instance("d0", [make_layout()])
    prefill.connect(decode)
    decode.connect(prefill)
    fill(prefill.pools[0], prefill.layouts[0], [3, 1, 7], 40)
    return prefill, decode


def executing(pair, mode):
    return pair[0] if mode is TransferMode.PUSH else pair[1]


@pytest.mark.parametrize("mode", list(TransferMode))
def test_blocks_arrive_and_one_event_reports_it(pair, mode):
    instance = executing(pair, mode)
    instance.start(command([3, 1, 7], [5, 9, 2], 40, mode=mode))
    (event,) = instance.wait()
    assert event.state is TransferState.DONE, event.reason
    assert (event.transfer_id, event.instance_id, event.rank) == (1, instance.instance_id, 0)
    assert event.num_bytes == 3 * 16 * 4 * 4 * 32
    assert count_wrong(pair[1].pools[0], pair[1].layouts[0], [5, 9, 2], 40) == 0


COPIES = [make_layout(num_copies=2, copy=copy) for copy in range(2)]
SHAPES = {
    "tp 2 to 1": (shard(tp_size=2), 2, shard(), 1),
    "tp 1 to 4": (shard(), 1, shard(tp_size=4), 4),
    "tp 4 to 2": (shard(tp_size=4), 4, shard(tp_size=2), 2),
    "pp 2 to 1": (shard(pp_size=2), 1, shard(), 1),
    "pp 2 to tp 2": (shard(pp_size=2), 1, shard(tp_size=2), 2),
    "tp 2 pp 2 to pp 4": (shard(tp_size=2, pp_size=2), 2, shard(pp_size=4), 1),
    "blocks of 16 to 32": (shard(), 1, shard(block_size=32), 1),
    "blocks of 32 to 8, tp 2": (shard(block_size=32), 1, shard(tp_size=2, block_size=8), 2),
    "BHLNC to LBNHC": (shard(), 1, shard(order="LBNHC"), 1),
    "replicated heads": (COPIES, 2, shard(tp_size=2), 2),
    "to replicated heads": (shard(), 1, COPIES, 2),
}


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("name", list(SHAPES))
def test_instances_of_different_shape_exchange_the_same_tokens(open_instance, name, mode):
    src_layouts, src_tp, dst_layouts, dst_tp = SHAPES[name]
    prefill = open_instance("p0", src_layouts, tp_size=src_tp)
    decode = open_instance("d0", dst_layouts, tp_size=dst_tp)
    instance, other = (prefill, decode) if mode is TransferMode.PUSH else (decode, prefill)
    instance.connect(other)
    num_tokens = 83
    src_ids = [7, 3, 9, 4, 21, 5][: -(-num_tokens // src_layouts[0].block_size)]
    dst_ids = [8, 2, 11, 12, 13, 1, 30, 29, 28, 27, 3][: -(-num_tokens // dst_layouts[0].block_size)]
    for pool, layout in zip(prefill.pools, src_layouts):
        fill(pool, layout, src_ids, num_tokens)
    instance.start(command(src_ids, dst_ids, num_tokens, mode=mode))
    events = instance.wait()
    assert {event.state for event in events} == {TransferState.DONE}
    wrong = [count_wrong(pool, layout, dst_ids, num_tokens) for pool, layout in zip(decode.pools, dst_layouts)]
    assert not any(wrong)
    assert sum(event.num_bytes for event in events) < 1.3 * sum(
        num_tokens * len(layout.layer_ids) * layout.num_heads * 32 for layout in dst_layouts
    )


def test_a_transfer_may_start_within_a_source_block(open_instance):
    prefill, decode = open_instance("p0", shard(block_size=32)), open_instance("d0", shard(block_size=16))
    prefill.connect(decode)
    fill(prefill.pools[0], prefill.layouts[0], [4, 6], 60)
    prefill.start(command([4, 6], [3, 5, 7], 44, first_token=16))
    (event,) = prefill.wait()
    assert event.state is TransferState.DONE, event.reason
    assert count_wrong(decode.pools[0], decode.layouts[0], [3, 5, 7], 44, first_token=16) == 0


def test_other_blocks_stay_untouched(pair):
    prefill, decode = pair
    decode.pools[0][:] = 0xEE
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    prefill.wait()
    pages = decode.pools[0].reshape(32, -1)
    assert [block for block in range(32) if (pages[block] != 0xEE).any()] == [2, 5, 9]


def test_many_transfers_run_at_once(pair):
    prefill, decode = pair
    fill(prefill.pools[0], prefill.layouts[0], [3, 1, 7], 40)
    for number in range(8):
        prefill.start(command([3, 1, 7], [8 + 3 * number + i for i in range(3)], 40, transfer_id=number))
    events = prefill.wait(8)
    assert sorted(event.transfer_id for event in events) == list(range(8))
    for number in range(8):
        ids = [8 + 3 * number + i for i in range(3)]
        assert count_wrong(decode.pools[0], decode.layouts[0], ids, 40) == 0


def test_nothing_to_move_is_done(pair):
    pair[0].start(command([], [], 0))
    (event,) = pair[0].wait()
    assert (event.state, event.num_bytes) == (TransferState.DONE, 0)


def test_a_cancelled_transfer_reports_only_after_it_quiesced(pair):
    prefill, decode = pair
    prefill.fabric.stall(decode.transports[0].address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    time.sleep(0.05)
    prefill.workers[0].cancel(1)
    time.sleep(0.05)
    assert prefill.events.empty()
    prefill.fabric.resume(decode.transports[0].address)
    (event,) = prefill.wait()
    assert event.state is TransferState.CANCELLED
    before = decode.pools[0].copy()
    time.sleep(0.05)
    assert (decode.pools[0] == before).all()


def test_a_cancel_that_overtakes_its_command_is_answered_and_the_command_dropped(pair):
    prefill, decode = pair
    prefill.workers[0].cancel(1)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    prefill.start(command([3], [4], 16, transfer_id=2))
    events = prefill.wait(2)
    assert [(event.transfer_id, event.state) for event in events] == [
        (1, TransferState.CANCELLED),
        (2, TransferState.DONE),
    ]
    assert not decode.pools[0].reshape(32, -1)[[5, 9, 2]].any()


def test_a_repeated_command_moves_nothing_into_blocks_that_may_have_other_owners(pair):
    prefill, decode = pair
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    prefill.wait()
    decode.pools[0][:] = 0xEE
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    prefill.start(command([], [], 0, transfer_id=2))
    assert [event.transfer_id for event in prefill.wait()] == [2]
    assert (decode.pools[0] == 0xEE).all()


def test_a_lost_report_can_be_asked_for_with_a_cancel(pair):
    pair[0].start(command([3, 1, 7], [5, 9, 2], 40))
    (report,) = pair[0].wait()
    pair[0].workers[0].cancel(1)
    assert pair[0].wait() == [report]


def test_a_transfer_thread_that_hangs_is_seen_to_be_stuck(pair):
    worker, transport = pair[0].workers[0], pair[0].transports[0]
    assert worker.stuck_s < 2.0
    may_go_on = threading.Event()
    transport.progress = lambda: may_go_on.wait(10.0)
    transport.wake()
    time.sleep(0.3)
    assert worker.stuck_s > 0.2
    del transport.progress
    may_go_on.set()


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_frozen_peer_fails_the_transfer_at_its_deadline_with_the_connection_dropped(pair, mode):
    instance = executing(pair, mode)
    other = pair[1] if instance is pair[0] else pair[0]
    instance.fabric.stall(other.transports[0].address)
    instance.start(command([3, 1, 7], [5, 9, 2], 40, mode=mode, deadline_s=0.1))
    (event,) = instance.wait()
    assert event.state is TransferState.FAILED
    assert f"{mode} with {other.instance_id}[tp 0, pp 0]: not done within 0.1 s" in event.reason
    assert "dropped" in event.reason
    instance.fabric.resume(other.transports[0].address)
    time.sleep(0.05)
    assert not pair[1].pools[0].any()


def test_a_late_transfer_that_quiesces_keeps_its_connection(pair):
    prefill, decode = pair
    prefill.fabric.stall(decode.transports[0].address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, deadline_s=0.05))
    threading.Timer(0.1, prefill.fabric.resume, [decode.transports[0].address]).start()
    (event,) = prefill.wait()
    assert event.state is TransferState.FAILED
    assert "dropped" not in event.reason


def test_after_a_failure_the_next_transfer_reconnects(pair):
    prefill, decode = pair
    prefill.fabric.stall(decode.transports[0].address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, deadline_s=0.05))
    assert prefill.wait()[0].state is TransferState.FAILED
    prefill.fabric.resume(decode.transports[0].address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, transfer_id=2))
    assert prefill.wait()[0].state is TransferState.DONE


def test_a_dead_peer_fails_every_transfer_with_it_and_no_other(open_instance):
    prefill = open_instance("p0", [make_layout()])
    decodes = [open_instance(name, [make_layout()]) for name in ("d0", "d1")]
    prefill.workers[0].connect([*decodes[0].endpoints, *decodes[1].endpoints])
    prefill.fabric.sever(decodes[0].transports[0].address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, transfer_id=1))
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, transfer_id=2, dst_instance_id="d1"))
    states = {event.transfer_id: event for event in prefill.wait(2)}
    assert states[1].state is TransferState.FAILED
    assert "d0[tp 0, pp 0]" in states[1].reason
    assert states[2].state is TransferState.DONE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dst_instance_id": "d9"}, "d9"),
        ({"mode": TransferMode.PULL}, "not by p0"),
        ({"parts": (part([3, 1, 7], [5, 9, 99], 40),)}, "destination block ids"),
        ({"parts": (part([3, 1, 7], [5, 9, 2], 999),)}, "999 tokens do not fit"),
    ],
)
def test_a_command_that_cannot_work_fails_with_the_reason(pair, changes, words):
    pair[0].start(dataclasses.replace(command([3, 1, 7], [5, 9, 2], 40), **changes))
    (event,) = pair[0].wait()
    assert event.state is TransferState.FAILED
    assert words in event.reason


def test_closing_cancels_what_is_under_way(pair):
    prefill, decode = pair
    prefill.fabric.stall(decode.transports[0].address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    time.sleep(0.05)
    prefill.workers[0].close()
    assert prefill.wait()[0].state in {TransferState.CANCELLED, TransferState.FAILED}


def test_a_command_after_closing_fails(pair):
    pair[0].workers[0].close()
    pair[0].start(command([3, 1, 7], [5, 9, 2], 40))
    assert pair[0].wait()[0].state is TransferState.FAILED


def test_another_model_is_refused_at_connect(open_instance):
    prefill = open_instance("p0", [make_layout()])
    decode = open_instance("d0", [make_layout()], fingerprint="another")
    with pytest.raises(HandshakeRefused, match="model_fingerprint"):
        prefill.connect(decode)


def test_an_instance_that_lacks_layers_is_refused_at_connect(open_instance):
    prefill = open_instance("p0", [make_layout()])
    decode = open_instance("d0", shard(pp_size=2))
    with pytest.raises(HandshakeRefused, match="layer_ids"):
        prefill.workers[0].connect(decode.endpoints[:1])


def test_a_dead_peer_is_reported_at_connect(open_instance):
    prefill, decode = open_instance("p0", [make_layout()]), open_instance("d0", [make_layout()])
    prefill.fabric.sever(decode.transports[0].address)
    with pytest.raises(TransportError, match="d0"):
        prefill.connect(decode)


def test_a_layout_larger_than_the_pool_is_refused(open_instance):
    instance = open_instance("p0", [])
    identity = RankIdentity(instance_id="p0", rank=0, tp_rank=0, pp_rank=0, model_fingerprint="m")
    worker = PdWorker(LoopbackTransport(instance.fabric), identity, instance.events.put)
    worker.allocate(100)
    with pytest.raises(ValueError, match="does not fit the pool of 100"):
        worker.endpoint([make_layout()])
    worker.close()


@pytest.fixture
def computing_pair(open_instance):
    """As pair, with the source's progress; nothing of step 5 is computed yet."""
    progress = ComputeProgress()
    prefill, decode = open_instance("p0", [make_layout()], progress=progress), open_instance("d0", [make_layout()])
    prefill.connect(decode)
    fill(prefill.pools[0], prefill.layouts[0], [3, 1, 7], 40)
    progress.reach(4)
    return prefill, decode, progress


def wait_for_bytes(instance, num_wrong: int) -> None:
    """Until so many tokens of layers have arrived that num_wrong are left."""
    deadline_s = time.monotonic() + 10.0
    while count_wrong(instance.pools[0], instance.layouts[0], [5, 9, 2], 40) != num_wrong:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_layers_travel_as_the_source_computes_them(computing_pair):
    prefill, decode, progress = computing_pair
    nothing = count_wrong(decode.pools[0], decode.layouts[0], [5, 9, 2], 40)
    num_layers = len(decode.layouts[0].layer_ids)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, after_step=5))
    for layer in range(num_layers):
        assert prefill.events.empty()
        progress.reach(5, layer)
        wait_for_bytes(decode, nothing * (num_layers - layer - 1) // num_layers)
    (event,) = prefill.wait()
    assert event.state is TransferState.DONE, event.reason


def test_a_step_that_is_over_lets_all_layers_travel(computing_pair):
    prefill, decode, progress = computing_pair
    progress.reach(6, 0)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, after_step=5))
    (event,) = prefill.wait()
    assert event.state is TransferState.DONE, event.reason
    assert count_wrong(decode.pools[0], decode.layouts[0], [5, 9, 2], 40) == 0


def test_a_transfer_that_waits_for_a_layer_can_be_cancelled(computing_pair):
    prefill, _, _ = computing_pair
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, after_step=5))
    prefill.workers[0].cancel(1)
    (event,) = prefill.wait()
    assert (event.state, event.num_bytes) == (TransferState.CANCELLED, 0)


def test_a_transfer_that_waits_for_a_layer_too_long_fails(computing_pair):
    prefill, _, _ = computing_pair
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, after_step=5, deadline_s=0.1))
    (event,) = prefill.wait()
    assert event.state is TransferState.FAILED
    assert "not done within 0.1 s" in event.reason
