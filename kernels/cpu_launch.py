"""Compiled CPU kernels: machine code kept on disk, called in about a microsecond on torch's own OpenMP threads.

A kernel is `void kernel(int64_t *arguments)`: slot 0 counts the work items taken, slot 1 is their number, slot 23
counts the items done, the rest is the kernel's own. Every thread takes items until none is left, so an item must be
computed the same way whoever takes it. numba's thread pools are not used: a second pool would fight with torch's for
the cores.

    one thread     kernel(arguments)
    n threads      GOMP_parallel(kernel, arguments, n)     the pool that torch's operators run on
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import msgpack
import numba
import numpy as np
import torch
from numba import cfunc, njit, types
from numba.core.bytecode import FunctionIdentity
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from blockferry.kernels.cpu_vector import fetch_add, jit, load_i64

FIRST_ARGUMENT, DONE_SLOT, BLOCK_WORDS = 2, 23, 24
PARALLEL_BYTES = 1 << 17  # less memory traffic than this is not worth waking threads for (about 10 us)
_PACK = tuple(
    struct.Struct(f"={length + FIRST_ARGUMENT}q").pack_into for length in range(DONE_SLOT - FIRST_ARGUMENT + 1)
)
# these keep the GIL: kernels are short
_KERNEL_TYPE = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL_TYPE = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def _do_nothing(arguments: int) -> None:
    pass


def compile_kernel(
    item: Callable[[int, int], None],
    *,
    enter: Callable[[int], None] = _do_nothing,
    leave: Callable[[int], None] = _do_nothing,
) -> Any:
    """A numba C callback from `item(arguments, index)`; takes up to seconds.

    A thread that gets any items calls enter(arguments) before its first and leave(arguments) after its last.
    """
    run_item = njit(types.void(types.intp, types.intp), error_model="numpy")(item)
    run_enter, run_leave, done_offset = jit(enter), jit(leave), 8 * DONE_SLOT

    def take_items(arguments: int) -> None:
        num_items = load_i64(arguments, 1)
        index = fetch_add(arguments)
        if index >= num_items:
            return
        run_enter(arguments)
        while index < num_items:
            run_item(arguments, index)
            fetch_add(arguments + done_offset)
            index = fetch_add(arguments)
        run_leave(arguments)

    return cfunc(types.void(types.intp), error_model="numpy")(take_items)


class KernelStore:
    """Machine code by name: from `folder` where an equal source was compiled before for this kind of CPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        rtsys.initialize(cpu_target.target_context)  # machine code from the folder refers to numba's runtime
        self._codegen = cpu_target.target_context.codegen()
        digest = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, self._codegen.magic_tuple())).encode())
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
        self._version = digest.hexdigest()[:16]
        self._loaded: dict[str, CompiledKernel] = {}

    def get(self, name: str, build: Callable[[], Any]) -> CompiledKernel:
        """The kernel `name`, built by build() (a compile_kernel result) if the folder has none of this version."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name, build)
        return self._loaded[name]

    def _load(self, name: str, build: Callable[[], Any]) -> CompiledKernel:
        path = self._folder / f"{name}-{self._version}.bin"
        if path.exists():
            library_name, symbol, code, bitcode = msgpack.unpackb(path.read_bytes())
            library = self._codegen.unserialize_library((library_name, "object", (code, bitcode)))
            return CompiledKernel(library.get_pointer_to_function(symbol), library)
        with _numbered_for(name):
            kernel = build()
        library_name, _, (code, bitcode) = kernel._library.serialize_using_object_code()
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgpack.packb((library_name, kernel.native_name, code, bitcode)))
        partial.replace(path)  # other workers may be compiling the same
        return CompiledKernel(kernel.address, kernel)


@contextlib.contextmanager
def _numbered_for(name: str) -> Iterator[None]:
    """Let numba number functions by the kernel that they are made for.

    Its symbols end in a count of the process's functions. Two kernels that were each the first of a process would carry
    one symbol, and a process that loads both would call one for the other.
    """
    counted = FunctionIdentity._unique_ids
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:5], "big") << 16
    FunctionIdentity._unique_ids = itertools.count(first)
    try:
        yield
    finally:
        FunctionIdentity._unique_ids = counted


class CompiledKernel:
    """The address of a kernel and whatever keeps its machine code alive."""

    def __init__(self, address: int, owner: Any) -> None:
        self.address = address
        self.function = _KERNEL_TYPE(address)
        self._owner = owner


class Launcher:
    """Runs kernels for one thread; owns the argument block that they read. Cheap to make."""

    def __init__(self, store: KernelStore) -> None:
        self.store = store
        self._words: Any = np.zeros(BLOCK_WORDS, np.int64)
        self._address: int = self._words.ctypes.data
        address = openmp_address("GOMP_parallel")
        self._parallel = _PARALLEL_TYPE(address) if address else None

    def run(self, kernel: CompiledKernel, num_threads: int, num_items: int, arguments: tuple[int, ...]) -> None:
        """Compute items 0..num_items-1; returns when all are done."""
        _PACK[len(arguments)](self._words, 0, 0, num_items, *arguments)
        if num_threads > 1 and self._parallel is not None:
            self._parallel(kernel.address, self._address, num_threads, 0)
        else:
            kernel.function(self._address)


@functools.cache
def kernel_store(folder: Path) -> KernelStore:
    """The process's one store of a folder."""
    return KernelStore(folder)


def choose_num_threads(num_bytes: int) -> int:
    """Threads for a kernel that moves num_bytes: torch's number, or one where waking others costs more."""
    return torch.get_num_threads() if num_bytes >= PARALLEL_BYTES else 1


def float_bits(value: float) -> int:
    """The float32 bits of a number, as an argument that a kernel reads with load_scalar(arguments, 2 * slot)."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@functools.cache
def openmp_address(name: str) -> int:
    """Address of a function of the OpenMP runtime that torch brings, 0 where that is not GNU's."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        function = getattr(ctypes.CDLL(str(path)), name)
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
