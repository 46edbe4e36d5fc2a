"""Transfers that fail at every point, reports that come late, twice or not at all: what the connector says of them."""

import dataclasses
import threading
import time

import pytest
from support.faulty_transport import Faults, FaultyTransport, Point
from support.pd_pools import Instance, command, count_wrong, fill, make_layout

from blockferry.connectors.base import TransferMode, TransferState
from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorkerOptions
from blockferry.connectors.transport.loopback import LoopbackFabric

SMALL_BATCHES = PdWorkerOptions(limits=TransferLimits(batch_bytes=4096, quiesce_timeout_s=0.1), connect_timeout_s=2.0)
SRC, DST = [3, 1, 7], [5, 9, 2]


class Pair:
    """A prefill and a decode instance; the one that executes is connected, its connections meet faults."""

    def __init__(self, mode, *, is_direct=True):
        self.fabric, self.faults, self.mode = LoopbackFabric(), Faults(is_direct=is_direct), mode
        self.prefill, self.decode = (
            Instance(name, [make_layout()], lambda: FaultyTransport(self.fabric, self.faults), options=SMALL_BATCHES)
            for name in ("p0", "d0")
        )
        is_push = mode is TransferMode.PUSH
        self.executing, self.peer = (self.prefill, self.decode) if is_push else (self.decode, self.prefill)
        self.executing.connect(self.peer)
        fill(self.prefill.pools[0], self.prefill.layouts[0], SRC, 40)

    def start(self, transfer_id=1, **changes):
        self.executing.start(command(SRC, DST, 40, mode=self.mode, transfer_id=transfer_id, **changes))

    def event(self):
        (event,) = self.executing.wait()
        return event

    def freeze_peer(self):
        self.fabric.stall(self.peer.transports[0].address)

    def thaw_peer(self):
        self.fabric.resume(self.peer.transports[0].address)

    def kill_peer(self):
        self.fabric.sever(self.peer.transports[0].address)

    def num_wrong(self):
        return count_wrong(self.decode.pools[0], self.decode.layouts[0], DST, 40)

    def close(self):
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def open_pair():
    made = []

    def make(*args, **options):
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")]


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("point", [one for one in Point if one is not Point.CONNECT])
def test_an_operation_that_fails_ends_its_transfer_once_and_the_next_one_reconnects(
    open_pair, point, after, mode, is_direct
):
    pair = open_pair(mode, is_direct=is_direct)
    pair.faults.fail(point, after=after)
    pair.start()
    event = pair.event()
    assert pair.faults.num_failures == 1
    assert (event.state, event.reason.count("told to fail")) == (TransferState.FAILED, 1)
    assert event.is_quiesced is (mode is TransferMode.PULL or is_direct)  # else a network was left with writes in it
    assert not event.is_watched
    pair.decode.pools[0][:] = 0xEE  # the blocks have another owner now
    before = pair.decode.pools[0].copy()
    time.sleep(0.02)
    assert (pair.decode.pools[0] == before).all()
    pair.start(2)
    assert pair.event().state is TransferState.DONE
    assert pair.num_wrong() == 0
    assert pair.executing.events.empty()


def test_a_reconnection_that_fails_ends_the_transfer_and_is_tried_again(open_pair):
    pair = open_pair(TransferMode.PUSH)
    pair.faults.fail(Point.FLUSH)
    pair.start()
    pair.event()
    pair.faults.fail(Point.CONNECT)
    pair.start(2)
    assert "told to fail" in pair.event().reason
    pair.start(3)
    assert pair.event().state is TransferState.DONE


@pytest.mark.parametrize("mode", list(TransferMode))
def test_bytes_that_land_after_the_deadline_are_reported_once_they_have(open_pair, mode):
    pair = open_pair(mode, is_direct=False)
    pair.freeze_peer()
    pair.start(deadline_s=0.05)
    event = pair.event()
    assert (event.state, event.is_quiesced, event.is_watched) == (TransferState.FAILED, False, True)
    pair.thaw_peer()
    assert pair.event() == dataclasses.replace(event, is_quiesced=True, is_watched=False)
    before = pair.decode.pools[0].copy()
    time.sleep(0.02)
    assert (pair.decode.pools[0] == before).all()


@pytest.mark.parametrize("mode", list(TransferMode))
def test_late_bytes_of_a_peer_that_dies_stay_unaccounted_for_unless_they_were_to_be_read(open_pair, mode):
    pair = open_pair(mode, is_direct=False)
    pair.freeze_peer()
    pair.start(deadline_s=0.05)
    event = pair.event()
    pair.kill_peer()
    is_read = mode is TransferMode.PULL
    assert pair.event() == dataclasses.replace(event, is_quiesced=is_read, is_watched=False)


def test_new_transfers_need_not_wait_for_late_bytes(open_pair):
    pair = open_pair(TransferMode.PUSH, is_direct=False)
    pair.freeze_peer()
    pair.start(deadline_s=0.05)
    pair.event()
    pair.start(2)
    pair.thaw_peer()
    events = [pair.event(), pair.event()]
    assert {event.transfer_id: event.state for event in events} == {1: TransferState.FAILED, 2: TransferState.DONE}


def test_a_cancel_of_late_bytes_is_answered_with_what_is_known(open_pair):
    pair = open_pair(TransferMode.PUSH, is_direct=False)
    pair.freeze_peer()
    pair.start(deadline_s=0.05)
    event = pair.event()
    pair.executing.workers[0].cancel(1)
    assert pair.event() == event


def test_closing_does_not_wait_for_late_bytes(open_pair):
    pair = open_pair(TransferMode.PUSH, is_direct=False)
    pair.freeze_peer()
    pair.start(deadline_s=0.05)
    pair.event()
    started_s = time.monotonic()
    pair.executing.close()
    assert time.monotonic() - started_s < 5.0
