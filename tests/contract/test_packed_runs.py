"""Packed runs of UCX between processes where something is amiss: bad messages, no room, dead readers, closed links."""

import dataclasses
import time

import numpy as np
import pytest
from support.transport_peer import NUM_BYTES, ProcessEnd

from blockferry.connectors.base import TransportError
from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport
from blockferry.connectors.transport.ucx_service import NUM_ROWS, PoolKey

pytestmark = pytest.mark.ucx

TCP = ("tcp", "self")
PIECE = 4096


@pytest.fixture
def far():
    end = ProcessEnd(TCP)
    yield end
    end.close()


@pytest.fixture
def near():
    transport = UcxTransport(UcxOptions(transports=TCP, close_timeout_s=1.0))
    yield transport
    transport.close()


def finish(transport, flush, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not flush.poll():
        assert time.monotonic() < deadline_s, "the flush does not end"
        if not transport.progress():
            transport.wait(0.05)


def write_one(transport, region, peer, place):
    region.view[place] = 1 + place % 255
    offset = np.array([place], np.int64)
    peer.write(offset, offset, np.ones(1, np.int64))
    finish(transport, peer.flush())


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_refused_message_fails_its_connection_and_no_other(near, far, verb):
    region = near.allocate(NUM_BYTES)
    wrong = dataclasses.replace(PoolKey.unpack(far.key), region=7).pack()
    bad = near.connect(far.address, local=region, remote_key=wrong)
    good = near.connect(far.address, local=region, remote_key=far.key)
    runs = np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, PIECE)
    getattr(bad, verb)(*runs)
    with pytest.raises(TransportError, match="refused"):
        finish(near, bad.flush())
    write_one(near, region, good, 5)
    assert far.view()[5] == 6


def test_peers_beyond_the_rows_are_served_unpacked(near, far):
    region = near.allocate(NUM_BYTES)
    peers = [near.connect(far.address, local=region, remote_key=far.key) for _ in range(NUM_ROWS + 2)]
    for place, peer in enumerate(peers):
        write_one(near, region, peer, place)
    assert far.view()[: NUM_ROWS + 3].tolist() == [*(1 + place for place in range(NUM_ROWS + 2)), 0]


def test_closed_connections_give_their_rows_back(near, far):
    region = near.allocate(NUM_BYTES)
    for place in range(2):
        peers = [near.connect(far.address, local=region, remote_key=far.key) for _ in range(NUM_ROWS)]
        for peer in peers:
            write_one(near, region, peer, place)
        assert not any(peer.is_refused for peer in peers)
        for peer in peers:
            peer.close()


def test_a_reader_that_dies_does_not_harm_who_answers(near, far):
    region = near.allocate(NUM_BYTES)
    other = ProcessEnd(TCP)
    far.fill(2)
    other.read_from(far.address, far.key)
    other.kill()
    other.close()
    remote = far.fill(1)
    peer = near.connect(far.address, local=region, remote_key=far.key)
    order = np.arange(NUM_BYTES // PIECE) * PIECE
    peer.read(order, order, np.full(len(order), PIECE))
    finish(near, peer.flush())
    assert (region.view == remote).all()


def test_reads_of_a_closed_connection_touch_memory_no_more(near, far):
    region = near.allocate(NUM_BYTES)
    far.fill(1)
    peer = near.connect(far.address, local=region, remote_key=far.key)
    finish(near, peer.flush())
    order = np.arange(NUM_BYTES // PIECE) * PIECE
    peer.read(order, order, np.full(len(order), PIECE))
    near.progress()
    peer.close()
    before = region.view.copy()
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s:
        near.progress()
    assert (region.view == before).all()


def test_a_frozen_peer_takes_a_bounded_number_of_bytes_and_blocks_nobody(near, far):
    region = near.allocate(NUM_BYTES)
    peer = near.connect(far.address, local=region, remote_key=far.key)
    write_one(near, region, peer, 0)
    far.freeze()
    order = np.arange(NUM_BYTES // PIECE) * PIECE
    started_s = time.monotonic()
    for _ in range(20):
        peer.write(order, order, np.full(len(order), PIECE))
    flush = peer.flush()
    while near.progress():
        pass
    assert time.monotonic() - started_s < 5.0
    assert not flush.poll()
