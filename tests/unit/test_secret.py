"""Sockets of the scheduler: open to who knows the deployment's secret, closed to everybody else."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from blockferry.cluster import sockets
from blockferry.cluster.refusals import Refusals
from blockferry.cluster.secret import ClusterSecret
from blockferry.cluster.sockets import Binding, BoundRouter, Endpoint, bind_router, connect_dealer

OWN = ClusterSecret.make()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def router(context: zmq.Context) -> Iterator[BoundRouter]:
    made = bind_router(context, Binding(host="127.0.0.1", secret=OWN))
    yield made
    made.socket.close()


def dealer(context: zmq.Context, endpoint: Endpoint) -> zmq.Socket:
    made = context.socket(zmq.DEALER)
    connect_dealer(made, endpoint, identity=b"someone", linger_ms=0)
    return made


def open_socket(endpoint: Endpoint) -> socket.socket:
    """A plain socket at the port of a ZeroMQ one."""
    if endpoint.url.startswith("tcp://"):
        host, port = endpoint.url.removeprefix("tcp://").split(":")
        return socket.create_connection((host, int(port)), timeout=5)
    plain = socket.socket(socket.AF_UNIX)
    plain.settimeout(5)
    plain.connect("\0" + endpoint.url.removeprefix("ipc://@"))
    return plain


def read_until(refusals: Refusals, is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        refusals.read()
        time.sleep(0.005)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_who_knows_the_secret_is_heard_and_answered(context, router, side):
    with dealer(context, getattr(router.endpoints, side)) as peer:
        peer.send(b"hello")
        assert router.socket.poll(5000)
        identity, message = router.socket.recv_multipart()
        router.socket.send_multipart([identity, b"welcome"])
        assert peer.poll(5000)
        assert (identity, message, peer.recv()) == (b"someone", b"hello", b"welcome")


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize("has_secret", [True, False], ids=["wrong secret", "no secret"])
def test_stranger_is_not_heard(context, router, side, has_secret):
    refusals = Refusals([router.socket])
    endpoint = getattr(router.endpoints, side)
    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if has_secret:
            ClusterSecret.make().present(stranger)
        stranger.connect(endpoint.url)
        stranger.send(b"hello")
        read_until(refusals, lambda: refusals.num_refused > 0)
    assert not router.socket.poll(50)


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(64), b"\xff" * 4096], ids=["HTTP", "zeros", "ones"]
)
def test_garbage_is_refused(router, side, data):
    refusals = Refusals([router.socket])
    with open_socket(getattr(router.endpoints, side)) as stranger:
        stranger.sendall(data)
    read_until(refusals, lambda: refusals.num_refused > 0)
    assert not router.socket.poll(50)


@pytest.fixture
def tight(monkeypatch):
    """Limits that a test can reach; before the router is bound."""
    monkeypatch.setattr(sockets, "HANDSHAKE_LIMIT_S", 0.5)
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_connection_without_a_handshake_is_closed_when_its_time_is_over(tight, router, side):
    refusals = Refusals([router.socket])
    with open_socket(getattr(router.endpoints, side)) as silent:
        read_until(refusals, lambda: refusals.num_refused > 0)
        while silent.recv(1000):
            """What ZeroMQ says first."""


@pytest.mark.parametrize("side", ["local", "remote"])
def test_message_beyond_the_limit_is_not_taken_in(tight, context, router, side):
    with dealer(context, getattr(router.endpoints, side)) as peer:
        peer.send(bytes(900))
        assert router.socket.poll(5000)
        assert len(router.socket.recv_multipart()[1]) == 900
        peer.send(bytes(1001))
        assert not router.socket.poll(200)


def test_each_source_is_logged_once(router, caplog):
    refusals = Refusals([router.socket])
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with open_socket(router.endpoints.local) as stranger:
                read_until(refusals, lambda: bool(refusals._pending[refusals.monitors[0]]))
                stranger.sendall(bytes(64))
            read_until(refusals, lambda: not refusals._pending[refusals.monitors[0]])
    assert refusals.num_refused == 20
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"refused a connection from user {os.getuid()} of this host"
    ]


def test_peer_who_knew_the_secret_and_left_was_not_refused(context, router):
    refusals = Refusals([router.socket])
    with dealer(context, router.endpoints.local) as peer:
        peer.send(b"hello")
        assert router.socket.poll(5000)
        refusals.read()
    time.sleep(0.1)
    refusals.read()
    assert refusals.num_refused == 0


def test_the_secret_is_not_shown():
    endpoint = Endpoint(url="tcp://host:1", secret=OWN)
    assert OWN.text not in f"{endpoint} {endpoint!r} {OWN!r}"
