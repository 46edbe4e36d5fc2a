"""Compiled loops over many runs: copies and UCX calls without the GIL and without one Python call per run.

Numba compiles them once per machine (cached on disk; call warm_up() before they are needed in a hurry). They
take raw addresses: the caller owns the memory and has checked the bounds. They know neither endpoints nor
errors and hand UCX status codes back as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from blockferry.connectors.base import Int64Array

# Places in the `handles` array of post_runs: machine addresses of functions and objects of libucp.
FUNCTION, ENDPOINT, LOCAL, REMOTE, REMOTE_KEY, PARAM, PROGRESS, WORKER, FREE = range(9)
NUM_HANDLES = 9

_PROGRESS_INTERVAL = 32  # posts between two calls of progress: keeps queues short at little cost
_IN_PROGRESS = 1  # UCS_INPROGRESS
_ERR_LAST = -100  # UCS_ERR_LAST: a returned pointer in [-100, -1] is an error, any other non-zero one a request

_P = ParamSpec("_P")
_R = TypeVar("_R")
_I64 = ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    compiled: Callable[_P, _R] = numba.njit(nogil=True, cache=True)(function)
    return compiled


def _intrinsic(lower: Callable[..., Any]) -> Any:
    return intrinsic(lower)


def _lower_call(_typing_context: Any, _function: Any, arguments: Any) -> Any:
    """Call the C function at an address with integers or pointers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values = [builder.extract_value(args[1], i) for i in range(len(arguments))]
        function = ir.FunctionType(_I64, [_I64] * len(values))
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), values)

    return numba.types.int64(numba.types.int64, arguments), generate


def _lower_copy(_typing_context: Any, _target: Any, _source: Any, _length: Any) -> Any:
    """C memcpy between two addresses."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [_BYTE_POINTER, _BYTE_POINTER, _I64])
        target, source = (builder.inttoptr(address, _BYTE_POINTER) for address in args[:2])
        builder.call(memcpy, [target, source, args[2], ir.Constant(ir.IntType(1), 0)])
        return ir.Constant(_I64, 0)

    i64 = numba.types.int64
    return i64(i64, i64, i64), generate


def _lower_fence(_typing_context: Any) -> Any:
    """Order every store before it for other processors; nearly free on x86, needed on Arm."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return ir.Constant(_I64, 0)

    return numba.types.int64(), generate


_call: Callable[[int, tuple[int, ...]], int] = _intrinsic(_lower_call)
_copy: Callable[[int, int, int], int] = _intrinsic(_lower_copy)
_fence: Callable[[], int] = _intrinsic(_lower_fence)


@_compiled
def copy_runs(
    dst_base: int, src_base: int, dst_offsets: Int64Array, src_offsets: Int64Array, lengths: Int64Array
) -> None:
    """Memcpy every run. Runs must not overlap."""
    for i in range(len(lengths)):
        _copy(dst_base + dst_offsets[i], src_base + src_offsets[i], lengths[i])
    _fence()


@_compiled
def post_runs(handles: Int64Array, local_offsets: Int64Array, remote_offsets: Int64Array, lengths: Int64Array) -> int:
    """Post one ucp_put_nbx or ucp_get_nbx per run and free the requests at once; 0 or the first error."""
    for i in range(len(lengths)):
        local, remote = handles[LOCAL] + local_offsets[i], handles[REMOTE] + remote_offsets[i]
        request = _call(
            handles[FUNCTION],
            (handles[ENDPOINT], local, lengths[i], remote, handles[REMOTE_KEY], handles[PARAM]),
        )
        if request != 0:
            if _ERR_LAST <= request < 0:
                return request
            _call(handles[FREE], (request,))
        if i % _PROGRESS_INTERVAL == _PROGRESS_INTERVAL - 1:
            _call(handles[PROGRESS], (handles[WORKER],))
    return 0


@_compiled
def drain(progress: int, worker: int, max_rounds: int) -> bool:
    """Call progress while it reports work, at most max_rounds times; whether there was any."""
    for i in range(max_rounds):
        if (_call(progress, (worker,)) & 0xFFFFFFFF) == 0:
            return i > 0
    return True


@_compiled
def spin(progress: int, worker: int, max_rounds: int) -> bool:
    """Call progress until it reports work, at most max_rounds times; whether there was any."""
    for i in range(max_rounds):
        if (_call(progress, (worker,)) & 0xFFFFFFFF) != 0:
            return i >= 0
    return False


def warm_up() -> None:
    """Compile every loop, or take it from the cache (0.1 s). Takes about 1 s on a machine that never did."""
    nothing = np.empty(0, np.int64)
    copy_runs(0, 0, nothing, nothing, nothing)
    post_runs(np.zeros(NUM_HANDLES, np.int64), nothing, nothing, nothing)
    drain(0, 0, 0)
    spin(0, 0, 0)
