"""Peers that come and go while a rank's transfers run, and a rank that starts anew under another scheduler."""

import threading
import time

import pytest
from support.faulty_transport import Faults, FaultyTransport
from support.pd_pools import Instance, command, count_wrong, fill, make_layout

from blockferry.connectors.base import TransferState, TransportError
from blockferry.connectors.compute_progress import ComputeProgress
from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorkerOptions
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport

OPTIONS = PdWorkerOptions(limits=TransferLimits(batch_bytes=4096, quiesce_timeout_s=0.2), connect_timeout_s=3.0)


class NoAnswer:
    """A flush towards a member that does not answer."""

    def poll(self):
        return False


class DeafTransport(LoopbackTransport):
    """A member of a fabric that gets no answer from one other."""

    deaf_to = b""

    def connect(self, address, *, local, remote_key):
        peer = super().connect(address, local=local, remote_key=remote_key)
        if address == self.deaf_to:
            peer.flush = NoAnswer
        return peer


@pytest.fixture
def open_instance():
    fabric = LoopbackFabric()
    made = []

    def make(instance_id, transport=DeafTransport, **changes):
        instance = Instance(instance_id, [make_layout()], lambda: transport(fabric), **({"options": OPTIONS} | changes))
        instance.fabric = fabric
        made.append(instance)
        return instance

    yield make
    for instance in made:
        instance.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")]


def over_a_network(fabric):
    return FaultyTransport(fabric, Faults(is_direct=False))


def moved(prefill, decode, transfer_id):
    """The end of a transfer of 40 tokens, whose bytes are checked where it is done."""
    fill(prefill.pools[0], prefill.layouts[0], [3, 1, 7], 40)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, transfer_id=transfer_id, dst_instance_id=decode.instance_id))
    (event,) = prefill.wait()
    if event.state is TransferState.DONE:
        assert count_wrong(decode.pools[0], decode.layouts[0], [5, 9, 2], 40) == 0
    return event


def test_transfers_go_on_while_a_newcomer_does_not_answer(open_instance):
    prefill, decode, newcomer = open_instance("p0"), open_instance("d0"), open_instance("d1")
    prefill.connect(decode)
    prefill.transports[0].deaf_to = newcomer.transports[0].address
    failures = []

    def connect():
        try:
            prefill.connect(newcomer)
        except TransportError as error:
            failures.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.1)
    assert moved(prefill, decode, 1).state is TransferState.DONE
    assert thread.is_alive()
    thread.join()
    assert "connecting to d1[tp 0, pp 0]: no answer within 3 s" in failures[0]


def test_a_newcomer_is_reached_besides_those_that_were_there(open_instance):
    prefill, decode, newcomer = open_instance("p0"), open_instance("d0"), open_instance("d1")
    prefill.connect(decode)
    prefill.connect(newcomer)
    assert moved(prefill, decode, 1).state is TransferState.DONE
    assert moved(prefill, newcomer, 2).state is TransferState.DONE


def test_an_instance_that_was_disconnected_is_not_reached(open_instance):
    prefill, decode = open_instance("p0"), open_instance("d0")
    prefill.connect(decode)
    prefill.workers[0].disconnect("d0")
    event = moved(prefill, decode, 1)
    assert event.state is TransferState.FAILED
    assert "not connected" in event.reason


def test_a_disconnected_instance_of_the_same_name_is_reached_again(open_instance):
    prefill, decode = open_instance("p0"), open_instance("d0")
    prefill.connect(decode)
    prefill.workers[0].disconnect("d0")
    prefill.connect(decode)
    assert moved(prefill, decode, 1).state is TransferState.DONE


def test_after_a_reset_transfer_numbers_begin_anew(open_instance):
    prefill, decode = open_instance("p0"), open_instance("d0")
    prefill.connect(decode)
    assert moved(prefill, decode, 1).state is TransferState.DONE
    prefill.workers[0].reset(timeout_s=5.0)
    decode.pools[0][:] = 0
    assert moved(prefill, decode, 1).state is TransferState.DONE


def test_a_reset_returns_once_no_byte_can_land_any_more(open_instance):
    prefill, decode = open_instance("p0", over_a_network), open_instance("d0")
    prefill.connect(decode)
    address = decode.transports[0].address
    prefill.fabric.stall(address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    time.sleep(0.05)
    threading.Timer(0.5, prefill.fabric.resume, [address]).start()
    prefill.workers[0].reset(timeout_s=10.0)
    before = decode.pools[0].copy()
    time.sleep(0.05)
    assert (decode.pools[0] == before).all()
    assert not prefill.fabric.is_stalled(address)


def test_a_reset_that_cannot_quiesce_says_so(open_instance):
    prefill, decode = open_instance("p0", over_a_network), open_instance("d0")
    prefill.connect(decode)
    prefill.fabric.stall(decode.transports[0].address)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40))
    time.sleep(0.05)
    with pytest.raises(TransportError, match=r"p0\[rank 0\].* not quiesced within 0.6 s"):
        prefill.workers[0].reset(timeout_s=0.6)
    prefill.fabric.resume(decode.transports[0].address)


def test_steps_of_another_scheduler_are_not_taken_for_those_of_the_last(open_instance):
    progress = ComputeProgress()
    prefill, decode = open_instance("p0", progress=progress), open_instance("d0")
    prefill.connect(decode)
    progress.reach(7)
    prefill.workers[0].reset(timeout_s=5.0)
    progress.reset()
    fill(prefill.pools[0], prefill.layouts[0], [3, 1, 7], 40)
    prefill.start(command([3, 1, 7], [5, 9, 2], 40, after_step=2))
    time.sleep(0.1)
    assert prefill.events.empty()
    progress.reach(2)
    (event,) = prefill.wait()
    assert event.state is TransferState.DONE
