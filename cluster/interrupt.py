"""Signals as an exception: Ctrl-C and SIGTERM end whatever the main thread does, so that finally blocks clean up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked this process to stop; not an Exception, so that nothing swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def raise_on_signals() -> None:
    """From now on a stopping signal raises Interrupted in the main thread. Call it again after ray.init()."""
    for number in _SIGNALS:
        signal.signal(number, _raise)


@contextlib.contextmanager
def ignored_signals() -> Iterator[None]:
    """Let a clean-up, whose waits all have limits, finish whatever signals arrive."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        raise_on_signals()


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)
