"""ROUTER sockets of the scheduler: bound where peers reach them, and a send that notices lost peers."""

from __future__ import annotations

import dataclasses
import uuid

import zmq

from blockferry.cluster.messages import Frames


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where a socket can be reached: from the same host, and from others ("" when it is not bound there)."""

    local: str
    remote: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoundRouter:
    """A bound ROUTER socket; its context closes it."""

    socket: zmq.Socket[bytes]
    endpoints: Endpoints


def bind_router(context: zmq.Context[zmq.Socket[bytes]], host: str) -> BoundRouter:
    """A ROUTER socket for peers of this host, and on TCP for others when `host` is not empty."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a lost peer is an error, not a black hole
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    local = f"ipc://@blockferry-{uuid.uuid4().hex}"  # abstract: leaves no file behind
    socket.bind(local)
    remote = ""
    if host:
        port = socket.bind_to_random_port(f"tcp://{host}")
        remote = f"tcp://{host}:{port}"
    return BoundRouter(socket=socket, endpoints=Endpoints(local=local, remote=remote))


def send(socket: zmq.Socket[bytes], identity: bytes, frames: Frames) -> bool:
    """Send to one peer without waiting; False when it is gone."""
    try:
        socket.send_multipart([identity, *frames], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            return False
        raise
    return True
