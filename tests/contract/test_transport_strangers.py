"""Who reaches a UCX worker without its pools' secret can neither write nor read them, nor disturb who has it."""

import contextlib
import dataclasses
import itertools
import random
import socket
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.shared_memory import no_segments_left
from support.transport_peer import NUM_BYTES, ProcessEnd

from blockferry.connectors.base import TransportError
from blockferry.connectors.transport.pool_secret import PoolSecret
from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport
from blockferry.connectors.transport.ucx_row import Phase, UcxRow
from blockferry.connectors.transport.ucx_service import PoolKey

pytestmark = pytest.mark.ucx

TCP = ("tcp", "self")
UCX_MAGIC = 0xCAFEBABE12345678  # what UCX's TCP transport says first (uct/tcp/tcp.h)


@pytest.fixture
def far():
    with no_segments_left():
        end = ProcessEnd(TCP)
        yield end
        end.close()


@pytest.fixture
def near(far):
    transport = UcxTransport(UcxOptions(transports=TCP, close_timeout_s=1.0))
    yield transport
    transport.close()


def wake_sockets(pid):
    """Names of a process's abstract Unix datagram sockets: type 0002 is SOCK_DGRAM."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return ["\0" + row[7][1:] for row in rows if len(row) > 7 and row[4] == "0002" and row[6] in inodes]


@pytest.mark.parametrize("num_bytes", [0, 1, 60_000])
def test_datagrams_of_another_user_to_the_socket_that_wakes_a_worker_do_not_end_it(num_bytes):
    with no_segments_left():
        far = ProcessEnd(("posix", "self"))
        (name,) = wake_sockets(far.pid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(100):
                    stranger.sendto(bytes(num_bytes), name)
        time.sleep(0.2)
        assert far.cpu_s() > 0, "it answers"
        far.close()


def key_with_another_secret(key):
    return dataclasses.replace(PoolKey.unpack(key), secret=PoolSecret.make().key)


def one_run(num_bytes):
    return np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, num_bytes)


def finish(transport, flush):
    deadline_s = time.monotonic() + 20
    while not flush.poll():
        assert time.monotonic() < deadline_s, "the flush does not end"
        transport.wait(0.01)
        transport.progress()


def test_peer_with_another_secret_is_refused_before_a_byte_is_written(near, far):
    local = near.allocate(NUM_BYTES)
    local.view[:] = 1
    peer = near.connect(far.address, local=local, remote_key=key_with_another_secret(far.key).pack())
    peer.write(*one_run(NUM_BYTES))
    with pytest.raises(TransportError, match="was replaced"):
        finish(near, peer.flush())
    assert not far.view().any()


def test_stranger_who_does_not_greet_gets_no_row_and_sees_none(near, far):
    local = near.allocate(4096)
    friend = near.connect(far.address, local=local, remote_key=far.key)
    friend.write(*one_run(100))
    finish(near, friend.flush())
    key = key_with_another_secret(far.key)
    row = UcxRow(near._ucp, near._service, endpoint=friend._endpoint, local_base=local.view.ctypes.data, key=key)
    row.open()
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        near.progress()
        assert not row.advance()
    assert row.phase is Phase.GREETING
    assert not row._rows.any()
    row.release()


def ports_of(end):
    """Where a far end listens: UCX opens one port on each interface."""
    connections = psutil.Process(end._process.pid).net_connections("tcp")
    found = sorted({tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN})
    assert found
    return found


def garbage(seed):
    """What strangers send: noise, another protocol, and UCX's own first words with noise behind them."""
    noise = random.Random(seed).randbytes
    first = UCX_MAGIC.to_bytes(8, "little")
    return [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        noise(1),
        noise(100_000),
        first[:5],
        first,
        first + noise(64),
        first + noise(100_000),
        first + bytes(4096),
        b"\xff" * 4096,
    ]


def test_garbage_at_the_tcp_port_leaves_transfers_undisturbed(near, far):
    ports = ports_of(far)
    local = near.allocate(NUM_BYTES)
    peer = near.connect(far.address, local=local, remote_key=far.key)
    with contextlib.ExitStack() as half_open:
        for seed in range(8):
            local.view[:] = seed + 1
            peer.write(*one_run(NUM_BYTES))
            flush = peer.flush()
            for port, data in itertools.product(ports, garbage(seed)):
                stranger = half_open.enter_context(socket.create_connection(port, timeout=5))
                with contextlib.suppress(ConnectionError, TimeoutError):
                    stranger.sendall(data)
                if seed % 2:
                    stranger.close()
            finish(near, flush)
            assert (far.view() == seed + 1).all()


def test_secret_is_not_shown_and_its_proofs_differ_by_direction_and_number():
    secret = PoolSecret.make()
    tags = {secret.tag(kind, number) for kind in (b"h", b"y") for number in range(10)}
    assert len(tags) == 20
    assert secret.key not in tags
    assert secret.is_tag(secret.tag(b"h", 3), b"h", 3)
    assert not PoolSecret.make().is_tag(secret.tag(b"h", 3), b"h", 3)
    assert secret.key.hex() not in repr(secret)
