"""What compiled loops need of the machine: C calls by address, memcpy, loads, stores and a fence, without the GIL.

Owns the intrinsics and the decorator of every compiled loop of the transports; knows nothing of UCX or of pools.
Addresses are plain integers: the caller owns the memory and has checked the bounds.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from llvmlite import ir
from numba.extending import intrinsic

_P = ParamSpec("_P")
_R = TypeVar("_R")
_I64 = ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()
_INT = numba.types.int64
_LINE = ir.VectorType(_I64, 8)  # 64 bytes: a cache line
_LINE_BYTES = 64
_MIN_STREAM_BYTES = 1024


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile at first use and keep the machine code on disk. Division by zero gives no exception."""
    dispatcher: Callable[_P, _R] = numba.njit(nogil=True, cache=True, error_model="numpy")(stamped(function))
    return dispatcher


def stamped(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Name a function's machine code on disk after the text of every native module.

    Numba looks only at the file that a function stands in, and would keep what it had inlined from another.
    """
    function.__qualname__ += f"-{_stamp()}"
    return function


@functools.cache
def _stamp() -> str:
    texts = [path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("native_*.py"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:8]


def _intrinsic(lower: Callable[..., Any]) -> Any:
    return intrinsic(lower)


def _lower_call(_typing_context: Any, _function: Any, arguments: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values = [builder.extract_value(args[1], i) for i in range(len(arguments))]
        function = ir.FunctionType(_I64, [_I64] * len(values))
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), values)

    return _INT(_INT, arguments), generate


def _lower_copy(_typing_context: Any, _target: Any, _source: Any, _length: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [_BYTE_POINTER, _BYTE_POINTER, _I64])
        target, source = (builder.inttoptr(address, _BYTE_POINTER) for address in args[:2])
        builder.call(memcpy, [target, source, args[2], ir.Constant(ir.IntType(1), 0)])
        return ir.Constant(_I64, 0)

    return _INT(_INT, _INT, _INT), generate


def _lower_load(_typing_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return _INT(_INT), generate


def _lower_load_byte(_typing_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], _BYTE_POINTER), align=1), _I64)

    return _INT(_INT), generate


def _lower_store(_typing_context: Any, _address: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()), align=1)
        return ir.Constant(_I64, 0)

    return _INT(_INT, _INT), generate


def _lower_stream_line(_typing_context: Any, _target: Any, _source: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        line = builder.load(builder.inttoptr(args[1], _LINE.as_pointer()), align=1)
        stored = builder.store(line, builder.inttoptr(args[0], _LINE.as_pointer()), align=_LINE_BYTES)
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", hint)
        return ir.Constant(_I64, 0)

    return _INT(_INT, _INT), generate


def _lower_fence(_typing_context: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return ir.Constant(_I64, 0)

    return _INT(), generate


# For compiled code only.
call: Callable[[int, tuple[int, ...]], int] = _intrinsic(_lower_call)  # a C function of integers and pointers
copy: Callable[[int, int, int], int] = _intrinsic(_lower_copy)  # memcpy(target, source, num_bytes)
load: Callable[[int], int] = _intrinsic(_lower_load)  # the int64 at an address of any alignment
load_byte: Callable[[int], int] = _intrinsic(_lower_load_byte)
store: Callable[[int, int], int] = _intrinsic(_lower_store)  # store(address, value)
fence: Callable[[], int] = _intrinsic(_lower_fence)  # order every store before it, streamed ones too
_stream_line: Callable[[int, int], int] = _intrinsic(_lower_stream_line)


# ucp_am_recv_param_t: its first word, the attributes; its second, the endpoint to answer by.
HAS_REPLY_ENDPOINT = 1 << 0
RENDEZVOUS = 1 << 17


def message_handler(function: Callable[[int, int, int, int, int, int], int]) -> Any:
    """A ucp_am_recv_callback_t as a C function: `.address`. Compiled once per machine; called by UCX only."""
    integer = numba.types.int64
    signature = numba.types.int8(integer, integer, integer, integer, integer, integer)
    return numba.cfunc(signature, cache=True, error_model="numpy")(stamped(function))


@compiled
def stream(target: int, source: int, num_bytes: int) -> None:
    """Memcpy past the caches, 1.2 to 1.5 times as fast where nobody reads the target soon; end with a fence()."""
    if num_bytes < _MIN_STREAM_BYTES:
        copy(target, source, num_bytes)
        return
    head = -target & (_LINE_BYTES - 1)
    copy(target, source, head)
    done = head
    while done + 4 * _LINE_BYTES <= num_bytes:
        for line in range(4):
            _stream_line(target + done + line * _LINE_BYTES, source + done + line * _LINE_BYTES)
        done += 4 * _LINE_BYTES
    copy(target + done, source + done, num_bytes - done)
