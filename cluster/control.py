"""The door of a serving process for commands from other shells of this machine: a socket in the folder of notes.

Owns the socket's file. Who is let in is the user that serves, as the kernel says of the other end; what is said are
lines of JSON.

    shell    {"command": "scale", "arguments": {...}}
    process  {"progress": "prefill-1 serves"} ...   {"done": "..."} | {"error": "..."}
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blockferry.engine.errors import BlockferryError

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10
READ_TIMEOUT_S = 10.0  # for a command to be said
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: socket(7), SO_PEERCRED

Tell = Callable[[str], None]
Handler = Callable[[Mapping[str, Any], Tell], Awaitable[str]]  # arguments, progress -> what to say at the end


class ControlError(BlockferryError):
    """A command could not be given, or was refused; the message is for the person who gave it."""


@contextlib.asynccontextmanager
async def open_control(path: Path, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    """Take commands at a socket while the body runs. Handlers raise BlockferryError to refuse."""
    listener = _listen(path)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await _Caller(reader=reader, writer=writer).serve(handlers)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=listener, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Caller:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Carry out one command, to its end even when nobody listens any more."""
        try:
            name, arguments = await self._read_command()
            if name not in handlers:
                raise ControlError(f"the command {name!r} is unknown; run one release everywhere")
            self._say(done=await handlers[name](arguments, lambda text: self._say(progress=text)))
        except BlockferryError as error:
            self._say(error=str(error))
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def _read_command(self) -> tuple[str, Mapping[str, Any]]:
        try:
            line = await asyncio.wait_for(self.reader.readline(), READ_TIMEOUT_S)
        except (ValueError, TimeoutError, ConnectionError) as error:
            raise ControlError(f"that was no command: {error!r}") from None
        uid = peer_uid(self.writer.get_extra_info("socket"))
        if uid != os.getuid():  # only now: an answer to what was not read would not arrive
            logger.warning("refused a command of user %d: only user %d may give any", uid, os.getuid())
            raise ControlError(f"user {uid} may not command a deployment of user {os.getuid()}")
        try:
            command = json.loads(line)
            return str(command["command"]), dict(command["arguments"])
        except (ValueError, TypeError, KeyError) as error:
            raise ControlError(f"that was no command: {error!r}") from None

    def _say(self, **line: str) -> None:
        if not self.writer.is_closing():
            self.writer.write(json.dumps(line).encode() + b"\n")


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows him."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return int(uid)


def command(path: Path, name: str, arguments: Mapping[str, Any], tell: Tell) -> str:
    """Give a command and wait for its end; `tell` hears of progress. Raises ControlError."""
    with socket.socket(socket.AF_UNIX) as connection, _short(path) as name_of_path:
        try:
            connection.connect(name_of_path)
        except OSError as error:
            raise ControlError(f"the process that serves takes no commands at {path}: {error.strerror}") from None
        with contextlib.suppress(ConnectionError):
            connection.sendall(json.dumps({"command": name, "arguments": arguments}).encode() + b"\n")
            return _end_of(connection, tell)
    raise ControlError("the process that serves has ended meanwhile")


def _end_of(connection: socket.socket, tell: Tell) -> str:
    with connection.makefile("r") as lines:
        for line in lines:
            said = json.loads(line)
            if "done" in said:
                return str(said["done"])
            if "error" in said:
                raise ControlError(said["error"])
            tell(said["progress"])
    raise ConnectionAbortedError


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a process that was killed: its note would have been refused else
    listener = socket.socket(socket.AF_UNIX)
    with _short(path) as name:
        before = os.umask(0o177)
        try:
            listener.bind(name)
        finally:
            os.umask(before)
    return listener


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of at most 107 bytes, as sockets need it, for a path of any length."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
