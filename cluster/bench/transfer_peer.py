"""The two processes of `bench transfer`: each holds a pool behind a real PdWorker and can check or feed it.

The near end (this process) executes every transfer; the far end (spawned) serves it over loopback addresses only.
Owns pools, transports, the child process and the plain socket that sets TCP's ceiling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import queue
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from blockferry.connectors.base import (
    ByteArray,
    Int32Array,
    PoolLayout,
    RankIdentity,
    TransferCommand,
    TransferEvent,
    TransferState,
    TransportError,
)
from blockferry.connectors.layout import Runs
from blockferry.connectors.pd_worker import PdWorker
from blockferry.connectors.transport.ucx import UcxOptions, UcxTransport

NEAR, FAR = "near", "far"
TRANSPORTS = {"shm": ("posix", "self"), "tcp": ("tcp", "self")}
_ANSWER_TIMEOUT_S = 120.0
_BLOCK_SIZE = 16
_SOCKET_BYTES = 4 << 20  # as large as what the UCX transport asks for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Bytes that the destination must hold after a transfer: those of `seed`'s pool, block by block."""

    seed: int
    src_block_ids: Int32Array
    dst_block_ids: Int32Array


def make_layout(piece_bytes: int, num_pieces: int) -> PoolLayout:
    """A pool whose pages are piece_bytes long, block 0 left out. Raises ValueError for a page of odd size."""
    if piece_bytes % _BLOCK_SIZE or piece_bytes <= 0:
        raise ValueError(f"piece_bytes={piece_bytes} is not a multiple of {_BLOCK_SIZE}, the tokens of a block")
    return PoolLayout(
        order="BHLNC",
        num_blocks=num_pieces + 1,
        block_size=_BLOCK_SIZE,
        layer_ids=(0,),
        head_start=0,
        num_heads=1,
        content_bytes=piece_bytes // _BLOCK_SIZE,
        dtype="uint8",
    )


class End:
    """One pool and its PdWorker; opened anew for every path and piece size."""

    def __init__(self, instance_id: str, path: str, layout: PoolLayout) -> None:
        identity = RankIdentity(instance_id=instance_id, rank=0, tp_rank=0, pp_rank=0, model_fingerprint="bench")
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self._layout = layout
        self._pattern: tuple[int, ByteArray] | None = None
        self._worker = PdWorker(UcxTransport(UcxOptions(transports=TRANSPORTS[path])), identity, self._events.put)
        self.pool = self._worker.allocate(layout.num_bytes)
        self.endpoint = self._worker.endpoint((layout,))

    @property
    def pages(self) -> ByteArray:
        """The pool as [block, byte]."""
        return self.pool.reshape(self._layout.num_blocks, -1)

    def connect(self, endpoint: bytes) -> None:
        """Connect to the other end."""
        self._worker.connect([endpoint])

    def fill(self, seed: int) -> None:
        """Put a seed's pattern into the pool."""
        self.pool[:] = self._pattern_of(seed)

    def clear(self) -> None:
        """Put zeros into the pool."""
        self.pool[:] = 0

    def ferry(self, command: TransferCommand) -> int:
        """Execute a transfer; returns its bytes. Raises TransportError when it did not end well."""
        self._worker.start(command)
        event = self._events.get(timeout=command.deadline_s + 30.0)
        if event.state is not TransferState.DONE:
            raise TransportError(f"transfer {event.transfer_id} {event.state}: {event.reason}")
        return event.num_bytes

    def verify(self, check: Check) -> bool:
        """Whether every byte of the destination blocks is the source's."""
        source = self._pattern_of(check.seed).reshape(self.pages.shape)
        return bool((self.pages[check.dst_block_ids] == source[check.src_block_ids]).all())

    def close(self) -> None:
        """End the worker; the pool is gone."""
        del self.pool
        self._worker.close()

    def _pattern_of(self, seed: int) -> ByteArray:
        if self._pattern is None or self._pattern[0] != seed:
            rng = np.random.default_rng(seed)
            self._pattern = (seed, rng.integers(0, 256, self._layout.num_bytes, dtype=np.uint8))
        return self._pattern[1]


class FarEnd:
    """The other process. Its methods ask it and wait for the answer."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="bench-transfer-far", daemon=True)
        self._process.start()
        theirs.close()

    def open(self, path: str, layout: PoolLayout) -> bytes:
        """Open its end; returns the endpoint to connect to."""
        endpoint: bytes = self._ask("open", path, layout)
        return endpoint

    def fill(self, seed: int) -> None:
        """See End.fill."""
        self._ask("fill", seed)

    def clear(self) -> None:
        """See End.clear."""
        self._ask("clear")

    def verify(self, check: Check) -> bool:
        """See End.verify."""
        is_right: bool = self._ask("verify", check)
        return is_right

    def close_end(self) -> None:
        """Close its end; another one can be opened."""
        self._ask("close")

    def begin_receive(self, num_bytes: int) -> int:
        """Let it receive bytes on a plain socket; returns the port on 127.0.0.1."""
        port: int = self._ask("receive", num_bytes)
        return port

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(("exit", ()))
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)
        self._process.close()
        self._pipe.close()

    def _ask(self, verb: str, *arguments: Any) -> Any:
        self._pipe.send((verb, arguments))
        if not self._pipe.poll(_ANSWER_TIMEOUT_S):
            raise TransportError(f"the far process did not answer {verb!r} within {_ANSWER_TIMEOUT_S:g} s")
        try:
            is_error, answer = self._pipe.recv()
        except EOFError as error:
            raise TransportError(f"the far process died during {verb!r}") from error
        if is_error:
            raise TransportError(f"the far process failed in {verb!r}: {answer}")
        return answer


def send_plain(port: int, data: ByteArray, runs: Runs) -> None:
    """Send runs over a plain socket and wait for the receiver's word: the ceiling of any TCP transfer."""
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_TIMEOUT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for offset, length in zip(runs.src_offsets.tolist(), runs.lengths.tolist(), strict=True):
            connection.sendall(data[offset : offset + length].data)
        connection.recv(1)


class _FarServer:
    """The far process's state."""

    def __init__(self) -> None:
        self._end: End | None = None
        self._listener: socket.socket | None = None
        self._num_bytes = 0  # that the listener waits for

    def answer(self, verb: str, arguments: tuple[Any, ...]) -> Any:
        """What the near end gets back."""
        if verb == "open":
            self._end = End(FAR, *arguments)
            return self._end.endpoint
        if verb == "receive":
            (self._num_bytes,) = arguments
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            return self._listener.getsockname()[1]
        assert self._end is not None, verb
        verbs: dict[str, Callable[..., Any]] = {
            "fill": self._end.fill,
            "clear": self._end.clear,
            "verify": self._end.verify,
            "close": self._end.close,
        }
        return verbs[verb](*arguments)

    def finish_receive(self) -> None:
        """Take what the last receive promised, after its port was told."""
        if self._listener is None:
            return
        buffer = memoryview(bytearray(self._num_bytes))
        with self._listener as listener:
            listener.settimeout(_ANSWER_TIMEOUT_S)
            connection, _ = listener.accept()
        with connection:
            received = 0
            while received < self._num_bytes:
                received += connection.recv_into(buffer[received : received + _SOCKET_BYTES])
            connection.sendall(b"!")
        self._listener = None


def _serve(pipe: Connection) -> None:
    server = _FarServer()
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            return
        if verb == "exit":
            return
        try:
            pipe.send((False, server.answer(verb, arguments)))
            server.finish_receive()
        except Exception as error:  # noqa: BLE001  the process boundary: the near end raises it
            pipe.send((True, f"{type(error).__name__}: {error}"))
