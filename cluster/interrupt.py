"""Signals that ask this process to stop, as an exception at a safe point.

Ctrl-C, SIGTERM and SIGHUP raise Interrupted in the main thread, so that finally blocks clean up. Inside Ray's
calls an exception from a handler would corrupt them: there signals are only noted, and check() raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

CHECK_S = 0.1
ResultT = TypeVar("ResultT")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked this process to stop; not an Exception, so that nothing swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopSignals:
    """How stopping signals are taken. One per process, as signal handlers are; main thread only."""

    def __init__(self) -> None:
        self._noted: list[int] = []

    def raise_at_once(self) -> None:
        """From now on a stopping signal raises Interrupted wherever the main thread is."""
        for number in _SIGNALS:
            signal.signal(number, _raise)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Only note signals; check() raises them. Afterwards the handlers of before are back.

        Elsewhere than in the main thread it changes nothing: signals are not delivered there.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.renew()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def renew(self) -> None:
        """Note signals again after somebody (ray.init) has put another handler."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._note)

    def check(self) -> None:
        """Raises Interrupted when a signal has been noted; once."""
        if self._noted:
            number = self._noted[0]
            self._noted.clear()
            raise Interrupted(number)

    def forget(self) -> None:
        """Drop noted signals: whatever they asked for is being done."""
        self._noted.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted.append(number)
        # between connecting and renew() Ray's core handles signals first, and lets an alarm abort us 3 s later
        signal.alarm(0)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


stop_signals = StopSignals()  # signal handlers belong to the process, so their state does too


async def until_stopped(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`; a noted signal cancels it, lets it clean up and raises Interrupted."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CHECK_S)
            stop_signals.check()
    except BaseException:
        task.cancel()
        await asyncio.wait({task})
        raise
    return task.result()
