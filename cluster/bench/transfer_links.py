"""How the ends of `bench transfer` are asked, and ends that are child processes. (transfer_actors.py: on Ray.)

Owns the processes that it starts; close() ends them. Knows nothing of blocks, nor of Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from blockferry.cluster.bench.transfer_end import EndServer
from blockferry.connectors.base import TransportError

ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0

Answer = Callable[[], Any]  # waits for what was asked and returns it. Raises TransportError


class EndLink(Protocol):
    """A way to one end. Questions to one end are answered in order."""

    def ask(self, verb: str, *arguments: Any) -> Answer:
        """Begin a call of EndServer.answer(). Raises TransportError when the end is gone."""

    def close(self) -> None:
        """End it. Idempotent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Every rank of both sides, in rank order. Owned by whoever opened them."""

    src: Sequence[EndLink]
    dst: Sequence[EndLink]

    @property
    def all(self) -> list[EndLink]:
        """Of both sides."""
        return [*self.src, *self.dst]

    def close(self) -> None:
        """End all of them. Idempotent."""
        for link in self.all:
            link.close()


def ask_all(links: Sequence[EndLink], verb: str, *arguments: Any) -> list[Any]:
    """Ask several ends at once; their answers in order."""
    answers = [link.ask(verb, *arguments) for link in links]
    return [answer() for answer in answers]


def open_processes(num_src: int, num_dst: int) -> Ends:
    """Ends as child processes on 127.0.0.1."""
    links: list[EndLink] = []
    try:
        for number in range(num_src + num_dst):
            side = f"src {number}" if number < num_src else f"dst {number - num_src}"
            links.append(_ProcessLink(side))
    except BaseException:
        for link in links:
            link.close()
        raise
    return Ends(src=links[:num_src], dst=links[num_src:])


class _ProcessLink:
    """A spawned child."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=f"bench-transfer-{name}", daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, verb: str, *arguments: Any) -> Answer:
        try:
            self._pipe.send((verb, arguments))
        except OSError as error:
            raise TransportError(f"the process {self._name} is gone before {verb!r}") from error
        return lambda: self._answer(verb)

    def _answer(self, verb: str) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TransportError(f"the process {self._name} did not answer {verb!r} within {ANSWER_TIMEOUT_S:g} s")
        try:
            is_error, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise TransportError(f"the process {self._name} died during {verb!r}") from error
        if is_error:
            raise TransportError(f"the process {self._name} failed in {verb!r}: {answer}")
        return answer

    def close(self) -> None:
        self._pipe.close()  # which ends its loop
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_TIMEOUT_S)


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's to handle, which then closes the pipe
    server = EndServer("127.0.0.1")
    while True:
        try:
            verb, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((False, server.answer(verb, arguments)))
        except Exception as error:  # noqa: BLE001  the process boundary: whoever asked raises it
            with contextlib.suppress(OSError):
                pipe.send((True, f"{type(error).__name__}: {error}"))
