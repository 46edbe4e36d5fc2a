"""Listening sockets, or one clear line why not. Imports no HTTP."""

from __future__ import annotations

import socket

from blockferry.engine.errors import BlockferryError


class ListenError(BlockferryError):
    """The API's address cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ListenError when the port is taken or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ListenError(f"cannot listen on {host}:{port}: {reason}; set another api.host or api.port") from None
    return listener
