"""Keeps strangers on this host from ending UCX's worker through the socket by which peers wake it.

UCX's shared memory wakes a peer by a datagram of one byte to an abstract Unix socket, which any user of the same
network namespace may send to. libucp 1.21 aborts its process on an empty one, so the kernel is told to drop those (a
classic BPF filter: kernel.org, networking/filter). Others only wake the worker, for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26
_LOAD_LENGTH, _JUMP_IF_EQUAL, _RETURN = 0x80, 0x15, 0x06
_WHOLE = 0xFFFFFFFF
# struct sock_filter: code, jump if true, jump if false, value
_PROGRAM = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in ((_LOAD_LENGTH, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 1, 0), (_RETURN, 0, 0, 0), (_RETURN, 0, 0, _WHOLE))
)


@contextlib.contextmanager
def no_empty_datagrams() -> Iterator[None]:
    """Unix datagram sockets that the process opens within the body receive no empty datagrams."""
    before = _descriptors()
    yield
    for fd in _descriptors() - before:
        with contextlib.suppress(OSError):  # no socket, or gone
            _drop_empty(fd)


def _drop_empty(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as one:
        if one.family is socket.AF_UNIX and one.type is socket.SOCK_DGRAM:
            program = ctypes.create_string_buffer(_PROGRAM, len(_PROGRAM))
            header = struct.pack("HP", len(_PROGRAM) // struct.calcsize("HBBI"), ctypes.addressof(program))
            one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}
