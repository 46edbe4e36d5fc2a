"""Compiled loops over many runs: copies and UCX calls without the GIL and without one Python call per run.

Numba compiles them once per machine (cached on disk; call warm_up() before they are needed in a hurry). They
take raw addresses: the caller owns the memory and has checked the bounds. They know neither endpoints nor
errors and hand UCX status codes back as they are.
"""

from __future__ import annotations

import numpy as np

from blockferry.connectors.base import Int64Array
from blockferry.connectors.transport.native_calls import call, compiled, copy, fence, stream

# Places in the `handles` array of post_runs: machine addresses of functions and objects of libucp.
FUNCTION, ENDPOINT, LOCAL, REMOTE, REMOTE_KEY, PARAM, PROGRESS, WORKER, FREE = range(9)
NUM_HANDLES = 9

_PROGRESS_INTERVAL = 32  # posts between two calls of progress: keeps queues short at little cost
_ERR_LAST = -100  # UCS_ERR_LAST: a returned pointer in [-100, -1] is an error, any other non-zero one a request


@compiled
def copy_runs(
    dst_base: int, src_base: int, dst_offsets: Int64Array, src_offsets: Int64Array, lengths: Int64Array
) -> None:
    """Plain memcpy of every run: what benchmarks hold stream_runs() against. Runs must not overlap."""
    for i in range(len(lengths)):
        copy(dst_base + dst_offsets[i], src_base + src_offsets[i], lengths[i])
    fence()


@compiled
def stream_runs(
    dst_base: int, src_base: int, dst_offsets: Int64Array, src_offsets: Int64Array, lengths: Int64Array
) -> None:
    """Copy every run past the caches. Runs must not overlap."""
    for i in range(len(lengths)):
        stream(dst_base + dst_offsets[i], src_base + src_offsets[i], lengths[i])
    fence()


@compiled
def post_runs(handles: Int64Array, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> int:
    """Post one ucp_put_nbx or ucp_get_nbx per run and free the requests at once; 0 or the first error."""
    for i in range(len(lengths)):
        local, remote = handles[LOCAL] + local_offsets[i], handles[REMOTE] + remote_offsets[i]
        request = call(
            handles[FUNCTION],
            (handles[ENDPOINT], local, lengths[i], remote, handles[REMOTE_KEY], handles[PARAM]),
        )
        if request != 0:
            if _ERR_LAST <= request < 0:
                return request
            call(handles[FREE], (request,))
        if i % _PROGRESS_INTERVAL == _PROGRESS_INTERVAL - 1:
            call(handles[PROGRESS], (handles[WORKER],))
    return 0


@compiled
def drain(progress: int, worker: int, max_rounds: int) -> bool:
    """Call progress while it reports work, at most max_rounds times; whether there was any."""
    for i in range(max_rounds):
        if (call(progress, (worker,)) & 0xFFFFFFFF) == 0:
            return i > 0
    return True


@compiled
def spin(progress: int, worker: int, max_rounds: int) -> bool:
    """Call progress until it reports work, at most max_rounds times; whether there was any."""
    for i in range(max_rounds):
        if (call(progress, (worker,)) & 0xFFFFFFFF) != 0:
            return i >= 0
    return False


@compiled
def reach_within(offsets: Int64Array, lengths: Int64Array, num_bytes: int) -> bool:
    """Whether every run lies in [0, num_bytes)."""
    for i in range(len(lengths)):
        if offsets[i] < 0 or lengths[i] < 0 or lengths[i] > num_bytes or offsets[i] > num_bytes - lengths[i]:
            return False
    return True


def warm_up() -> None:
    """Compile every loop of this module, or take it from the cache. Takes about 1 s on a machine that never did."""
    nothing = np.empty(0, np.int64)
    copy_runs(0, 0, nothing, nothing, nothing)
    stream_runs(0, 0, nothing, nothing, nothing)
    post_runs(np.zeros(NUM_HANDLES, np.int64), nothing, nothing, nothing)
    reach_within(nothing, nothing, 0)
    drain(0, 0, 0)
    spin(0, 0, 0)
