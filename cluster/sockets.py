"""The sockets between scheduler, workers and clients: bound where peers reach them, connected with the secret.

Owns their options, among them what a stranger can make them hold: see HANDSHAKE_LIMIT_S and MAX_MESSAGE_BYTES.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import zmq

from blockferry.cluster.messages import Frames
from blockferry.cluster.secret import ClusterSecret

HANDSHAKE_LIMIT_S = 10.0  # then a connection that has not proved that it knows the secret is closed
MAX_MESSAGE_BYTES = 32 << 20  # that the bound side takes: the logprobs of a step of 100,000 tokens, 20 each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a socket is reached, and what it asks for. Shown as its URL."""

    url: str
    secret: ClusterSecret

    def __str__(self) -> str:
        return self.url


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a socket can be reached: from the same host, and from others (None when it is not bound there)."""

    local: Endpoint
    remote: Endpoint | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where to bind a socket besides this host's own processes ("": nowhere), and what it asks of peers."""

    host: str
    secret: ClusterSecret


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoundRouter:
    """A bound ROUTER socket; its context closes it."""

    socket: zmq.Socket[bytes]
    endpoints: Endpoints


def bind_router(context: zmq.Context[zmq.Socket[bytes]], binding: Binding) -> BoundRouter:
    """A ROUTER socket for peers that know the secret."""
    host, secret = binding.host, binding.secret
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a lost peer is an error, not a black hole
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_LIMIT_S * 1000))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    secret.guard(socket)
    local = f"ipc://@blockferry-{uuid.uuid4().hex}"  # abstract: leaves no file behind
    socket.bind(local)
    remote = bind_remote(socket, binding) if host else None
    return BoundRouter(socket=socket, endpoints=Endpoints(local=Endpoint(url=local, secret=secret), remote=remote))


def bind_remote(socket: zmq.Socket[bytes], binding: Binding) -> Endpoint:
    """Bind a ROUTER socket of bind_router() to a port for peers on other hosts."""
    port = socket.bind_to_random_port(f"tcp://{binding.host}")
    return Endpoint(url=f"tcp://{binding.host}:{port}", secret=binding.secret)


def connect_dealer(socket: zmq.Socket[Any], endpoint: Endpoint, *, identity: bytes, linger_ms: int) -> None:
    """Connect a DEALER socket to a bind_router()'s endpoint, under an identity of its own."""
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    endpoint.secret.present(socket)
    socket.connect(endpoint.url)


def send(socket: zmq.Socket[bytes], identity: bytes, frames: Frames) -> bool:
    """Send to one peer without waiting; False when it is gone."""
    try:
        socket.send_multipart([identity, *frames], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            return False
        raise
    return True
