"""What every transport must do: over loopback, UCX shared memory and UCX TCP, there packed into messages or not.

Far ends of UCX are processes.
"""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
from support.shared_memory import no_segments_left
from support.transport_peer import NUM_BYTES, ProcessEnd, ThreadEnd

from blockferry.connectors.base import TransportError
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport
from blockferry.connectors.transport.native_checksum import sum_runs

UCX = {
    "ucx-shm": {"transports": ("posix", "self")},
    "ucx-shm-tcp": {"transports": ("posix", "tcp", "self")},  # as in a cluster
    "ucx-tcp": {"transports": ("tcp", "self")},
    "ucx-tcp-mixed": {"transports": ("tcp", "self"), "pack_below_bytes": 4097},
    "ucx-tcp-unpacked": {"transports": ("tcp", "self"), "pack_below_bytes": 0},
}
MARKS = {"ucx-shm-tcp": [pytest.mark.full]}
KINDS = ["loopback", *(pytest.param(kind, marks=[pytest.mark.ucx, *MARKS.get(kind, [])]) for kind in UCX)]


class Fabric:
    """Makes near and far ends of one kind and closes them."""

    def __init__(self, kind):
        self.kind = kind
        self._loopback = LoopbackFabric()
        self._stack = contextlib.ExitStack()

    def near(self):
        if self.kind == "loopback":
            transport = LoopbackTransport(self._loopback)
        else:
            from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport

            transport = UcxTransport(UcxOptions(**UCX[self.kind], close_timeout_s=1.0))
        self._stack.callback(transport.close)
        return transport

    def far(self):
        end = ThreadEnd(self._loopback) if self.kind == "loopback" else ProcessEnd(UCX[self.kind]["transports"])
        self._stack.callback(end.close)
        return end

    def close(self):
        self._stack.close()


@pytest.fixture(params=KINDS)
def fabric(request):
    with no_segments_left():
        made = Fabric(request.param)
        yield made
        made.close()


@pytest.fixture
def joined(fabric):
    """A near transport with its region, connected to a far end."""
    far, near = fabric.far(), fabric.near()
    region = near.allocate(NUM_BYTES)
    peer = near.connect(far.address, local=region, remote_key=far.key)
    return near, region, peer, far


def offsets(*values):
    return np.array(values, np.int64)


def finish(transport, flush, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not flush.poll():
        assert time.monotonic() < deadline_s, "the flush does not end"
        if not transport.progress():
            transport.wait(0.05)


def test_memory_starts_zeroed(joined):
    _, region, _, far = joined
    assert not region.view.any()
    assert not far.view().any()


def test_a_write_lands_where_it_was_sent(joined):
    near, region, peer, far = joined
    region.view[100:200] = 7
    peer.write(offsets(100), offsets(5000), offsets(100))
    finish(near, peer.flush())
    expected = np.zeros(NUM_BYTES, np.uint8)
    expected[5000:5100] = 7
    assert (far.view() == expected).all()


def test_a_read_fetches_what_is_there(joined):
    near, region, peer, far = joined
    remote = far.fill(1)
    peer.read(offsets(64), offsets(4096), offsets(100_000))
    finish(near, peer.flush())
    assert (region.view[64:100_064] == remote[4096:104_096]).all()
    assert not region.view[100_064:].any()


@pytest.mark.parametrize("piece", [256, 4096, 300_000])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_scattered_runs_all_arrive(joined, verb, piece):
    near, region, peer, far = joined
    remote = far.fill(2).copy()
    region.view[:] = np.arange(NUM_BYTES, dtype=np.uint64).astype(np.uint8) ^ 0x5A
    local = region.view.copy()
    rng = np.random.default_rng(3)
    num_runs = min(NUM_BYTES // piece, 1024)
    local_offsets = rng.permutation(NUM_BYTES // piece)[:num_runs] * piece
    remote_offsets = rng.permutation(NUM_BYTES // piece)[:num_runs] * piece
    getattr(peer, verb)(local_offsets, remote_offsets, np.full(num_runs, piece))
    finish(near, peer.flush())
    target, source = (remote, local) if verb == "write" else (local, remote)
    pairs = zip(local_offsets, remote_offsets) if verb == "read" else zip(remote_offsets, local_offsets)
    for target_offset, source_offset in pairs:
        target[target_offset : target_offset + piece] = source[source_offset : source_offset + piece]
    assert (far.view() == remote).all()
    assert (region.view == local).all()


def test_adopted_memory_can_be_sent_from_and_read_into(fabric):
    far, near = fabric.far(), fabric.near()
    memory = np.full(1 << 20, 9, np.uint8)
    region = near.adopt(memory)
    peer = near.connect(far.address, local=region, remote_key=far.key)
    peer.write(offsets(0), offsets(0), offsets(1 << 19))
    finish(near, peer.flush())
    peer.read(offsets(1 << 19), offsets((1 << 19) - 100), offsets(200))
    finish(near, peer.flush())
    assert memory[1 << 19 :][:200].tolist() == [9] * 100 + [0] * 100


def test_two_transports_share_one_far_end(fabric):
    far = fabric.far()
    for number in (1, 2):
        near = fabric.near()
        region = near.allocate(4096)
        region.view[:] = number
        peer = near.connect(far.address, local=region, remote_key=far.key)
        peer.write(offsets(0), offsets(4096 * number), offsets(4096))
        finish(near, peer.flush())
    assert far.view()[: 3 * 4096 : 4096].tolist() == [0, 1, 2]


def ask_sum(transport, peer, runs, timeout_s=20.0):
    checksum = peer.checksum(*runs)
    deadline_s = time.monotonic() + timeout_s
    while (total := checksum.poll()) is None:
        assert time.monotonic() < deadline_s, "the checksum does not come"
        if not transport.progress():
            transport.wait(0.05)
    return total


def test_a_checksum_tells_what_the_far_end_holds(joined):
    near, _, peer, far = joined
    remote = far.fill(4)
    rng = np.random.default_rng(5)
    runs = np.sort(rng.choice(NUM_BYTES, 1300, replace=False)), rng.integers(0, 3000, 1300)  # more than one message
    runs = np.minimum(runs[0], NUM_BYTES - 3000), runs[1]
    assert ask_sum(near, peer, runs) == int(sum_runs(remote.ctypes.data, *runs))
    assert ask_sum(near, peer, (offsets(), offsets())) == 0


def test_a_checksum_sees_what_was_written_and_flushed(joined):
    near, region, peer, _ = joined
    region.view[:] = np.arange(NUM_BYTES, dtype=np.uint64).astype(np.uint8)
    peer.write(offsets(0, 7), offsets(5000, 70_000), offsets(100, 5000))
    finish(near, peer.flush())
    expected = int(sum_runs(region.view.ctypes.data, offsets(0, 7), offsets(100, 5000)))
    assert ask_sum(near, peer, (offsets(5000, 70_000), offsets(100, 5000))) == expected


def test_a_checksum_beyond_the_region_is_refused(joined):
    _, _, peer, _ = joined
    with pytest.raises(ValueError, match="outside the region"):
        peer.checksum(offsets(NUM_BYTES), offsets(1))


def test_a_flush_of_nothing_ends(joined):
    near, _, peer, _ = joined
    finish(near, peer.flush())


def test_runs_outside_a_region_are_refused_and_move_nothing(joined):
    near, region, peer, far = joined
    region.view[:] = 1
    for bad in (
        (offsets(NUM_BYTES - 10), offsets(0)),
        (offsets(0), offsets(NUM_BYTES - 10)),
        (offsets(0), offsets(-1)),
    ):
        with pytest.raises(ValueError, match="outside the region"):
            peer.write(*bad, offsets(11))
    finish(near, peer.flush())
    assert not far.view().any()


def test_a_closed_connection_refuses_work(joined):
    _, _, peer, _ = joined
    peer.close()
    peer.close()
    with pytest.raises(TransportError):
        peer.write(offsets(0), offsets(0), offsets(1))
    with pytest.raises(TransportError):
        peer.flush()


def test_a_far_end_can_be_connected_again_after_a_close(joined):
    near, region, peer, far = joined
    finish(near, peer.flush())
    peer.close()
    region.view[:10] = 3
    again = near.connect(far.address, local=region, remote_key=far.key)
    again.write(offsets(0), offsets(0), offsets(10))
    finish(near, again.flush())
    assert far.view()[:11].tolist() == [3] * 10 + [0]


def test_a_killed_far_end_ends_every_operation_in_time(joined):
    near, _, peer, far = joined
    finish(near, peer.flush())
    far.kill()
    started_s = time.monotonic()
    with contextlib.suppress(TransportError):  # mapped memory outlives its process: then the copy just succeeds
        peer.write(offsets(0), offsets(0), offsets(NUM_BYTES))
        finish(near, peer.flush(), timeout_s=10.0)
    peer.close()
    near.close()
    assert time.monotonic() - started_s < 8.0


def test_a_killed_far_end_is_noticed_while_idle(joined):
    near, _, peer, far = joined
    finish(near, peer.flush())
    far.kill()
    deadline_s = time.monotonic() + 15.0

    def flush_until_noticed():
        while time.monotonic() < deadline_s:
            finish(near, peer.flush(), timeout_s=15.0)
            near.wait(0.1)

    with pytest.raises(TransportError):
        flush_until_noticed()


def test_a_frozen_far_end_never_blocks_a_close(joined):
    near, _, peer, far = joined
    finish(near, peer.flush())
    far.freeze()
    peer.read(offsets(0), offsets(0), offsets(NUM_BYTES))
    flush = peer.flush()
    started_s = time.monotonic()
    while time.monotonic() - started_s < 0.3:
        near.progress()
        with contextlib.suppress(TransportError):
            flush.poll()
    peer.close()
    near.close()
    assert time.monotonic() - started_s < 8.0


def test_connecting_to_a_far_end_that_is_gone_fails_in_time(fabric):
    far, near = fabric.far(), fabric.near()
    region = near.allocate(4096)
    far.kill()

    def connect():
        peer = near.connect(far.address, local=region, remote_key=far.key)
        finish(near, peer.flush(), timeout_s=10.0)

    with pytest.raises(TransportError):
        connect()


def test_wake_ends_a_wait_of_another_thread(fabric):
    near = fabric.near()
    fired = threading.Event()

    def fire():
        fired.set()
        near.wake()

    timer = threading.Timer(0.2, fire)
    started_s = time.monotonic()
    timer.start()
    while not fired.is_set():  # a transport may end a wait early
        near.wait(10.0)
    timer.join()
    assert time.monotonic() - started_s < 5.0


def test_an_idle_far_end_sleeps(joined):
    near, _, peer, far = joined
    finish(near, peer.flush())
    before_s = far.cpu_s()
    time.sleep(1.0)
    assert far.cpu_s() - before_s < 0.4


def test_closing_twice_is_allowed(fabric):
    near = fabric.near()
    near.allocate(4096)
    near.close()
    near.close()


@pytest.mark.ucx
@pytest.mark.parametrize(("kind", "is_direct"), [("ucx-shm", True), ("ucx-tcp", False)])
def test_processes_of_one_host_use_shared_memory_where_it_is_allowed(kind, is_direct):
    fabric = Fabric(kind)
    try:
        far, near = fabric.far(), fabric.near()
        peer = near.connect(far.address, local=near.allocate(4096), remote_key=far.key)
        assert peer.is_direct is is_direct
    finally:
        fabric.close()


@pytest.mark.ucx
def test_a_process_that_took_a_dead_ones_port_is_never_written_to():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # one interface, so that one port is the whole address
    options = {"net_device": "lo", "extra": {"TCP_PORT_RANGE": f"{port}-{port}"}}
    old = ProcessEnd(("tcp", "self"), **options)
    old.kill()
    new = ProcessEnd(("tcp", "self"), **options)
    near = Fabric("ucx-tcp").near()
    try:
        region = near.allocate(NUM_BYTES)
        region.view[:] = 1
        peer = near.connect(old.address, local=region, remote_key=old.key)
        peer.write(offsets(0), offsets(0), offsets(NUM_BYTES))
        with pytest.raises(TransportError, match="was replaced"):
            finish(near, peer.flush())
        peer.close()
        assert not new.view().any()
        again = near.connect(new.address, local=region, remote_key=new.key)
        again.write(offsets(0), offsets(0), offsets(100))
        finish(near, again.flush())
        assert new.view().sum() == 100
    finally:
        near.close()
        new.close()
        old.close()


@pytest.mark.ucx
def test_nothing_is_written_before_the_far_end_has_answered():
    fabric = Fabric("ucx-shm")
    try:
        far, near = fabric.far(), fabric.near()
        region = near.allocate(NUM_BYTES)
        region.view[:] = 1
        far.freeze()
        peer = near.connect(far.address, local=region, remote_key=far.key)
        peer.write(offsets(0), offsets(0), offsets(NUM_BYTES))
        flush = peer.flush()
        for _ in range(20):
            near.wait(0.01)
            assert not flush.poll()
        peer.close()
        far.thaw()
        assert not far.view().any()
    finally:
        fabric.close()


@pytest.mark.ucx
def test_ways_that_ucx_does_not_have_are_named():
    from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport

    with pytest.raises(TransportError, match=r"^starting UCX with TLS=bogus: No such device$"):
        UcxTransport(UcxOptions(transports=("bogus",)))
