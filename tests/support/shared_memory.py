"""A check that tests leave no shared memory segment of UCX behind."""

import contextlib
import os
import time


def _segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith("ucx")}


@contextlib.contextmanager
def no_segments_left(patience_s=15.0):
    """UCX unlinks a segment once it is filled, so another program's may be seen for a moment: wait for those."""
    before = _segments()
    yield
    deadline_s = time.monotonic() + patience_s
    left = _segments() - before
    while left and time.monotonic() < deadline_s:
        time.sleep(0.1)
        left &= _segments()
    assert not left, f"shared memory segments were left behind: {left}"
