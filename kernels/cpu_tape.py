"""A fixed sequence of kernels run in one call, with no Python in between.

Between its kernels a step of a small model spends more time in Python, whose code each layer's weights push out of the
caches, than in the kernels. A tape keeps every kernel's argument block; each thread goes through the kernels in order
and starts one when all items of the one before are done, not when all threads are there: a thread that the operating
system holds back holds up nobody but by the item in its hands.

    tape      address of kernel, address of its arguments     one pair for each kernel
    blocks    as Launcher packs them                          one row for each kernel
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numpy.typing import NDArray

from blockferry.kernels import cpu_emit as emit
from blockferry.kernels.cpu_launch import (
    BLOCK_WORDS,
    DONE_SLOT,
    FIRST_ARGUMENT,
    CompiledKernel,
    KernelStore,
    openmp_address,
)
from blockferry.kernels.cpu_vector import function, load_acquire, load_i64

_PATIENCE = 10_000  # looks at a counter, some 50 us, before another thread is let run on this core
_PARALLEL_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TapedKernel:
    """One kernel of a tape."""

    kernel: CompiledKernel
    arguments: tuple[int, ...]  # that follow the two words every kernel begins with
    items_per_row: int = 0
    fixed_items: int = 0  # instead of items_per_row
    threads_at: int | None = None  # place among the arguments that holds the number of threads
    rows_at: int | None = None  # place among the arguments that holds the number of rows


class Tape:
    """Runs its kernels for up to as many rows as their memory holds. Called by one thread, which lets the GIL go."""

    def __init__(self, kernels: list[TapedKernel], store: KernelStore) -> None:
        """Whoever calls keeps the memory alive that the arguments point to."""
        self._kernels = kernels
        self._run = store.get("tape", compile_tape)
        self._blocks: NDArray[np.int64] = np.zeros((len(kernels), BLOCK_WORDS), np.int64)
        for block, taped in zip(self._blocks, kernels):
            block[FIRST_ARGUMENT : FIRST_ARGUMENT + len(taped.arguments)] = taped.arguments
        self._items_per_row = np.array([taped.items_per_row for taped in kernels])
        self._fixed_items = np.array([taped.fixed_items for taped in kernels])
        self._threads_at = self._places([taped.threads_at for taped in kernels])
        self._rows_at = self._places([taped.rows_at for taped in kernels])
        addresses = self._blocks.ctypes.data + np.arange(len(kernels)) * self._blocks.strides[0]
        self._tape = np.stack([[taped.kernel.address for taped in kernels], addresses], axis=1).astype(np.int64)
        give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
        self._header = np.array([len(kernels), self._tape.ctypes.data, give_way], np.int64)
        parallel = openmp_address("GOMP_parallel")
        self._parallel = _PARALLEL_TYPE(parallel) if parallel else None
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._run.address)
        self._shape = (0, 0)

    def run(self, num_rows: int, num_threads: int) -> None:
        """Run every kernel for num_rows rows."""
        if self._shape != (num_rows, num_threads):
            self._shape = (num_rows, num_threads)
            self._blocks[:, 1] = self._fixed_items + num_rows * self._items_per_row
            self._blocks.ravel()[self._threads_at] = num_threads
            self._blocks.ravel()[self._rows_at] = num_rows
        self._blocks[:, 0] = 0
        self._blocks[:, DONE_SLOT] = 0
        if num_threads > 1 and self._parallel is not None:
            self._parallel(self._run.address, self._header.ctypes.data, num_threads, 0)
        else:
            self._call(self._header.ctypes.data)

    @staticmethod
    def _places(places: list[int | None]) -> NDArray[np.int64]:
        """Positions in the flat blocks."""
        return np.array(
            [row * BLOCK_WORDS + FIRST_ARGUMENT + place for row, place in enumerate(places) if place is not None],
            np.int64,
        )


def _emit_call(builder: ir.IRBuilder, address: ir.Value, *operands: ir.Value) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [emit.I64] * len(operands))
    builder.call(builder.inttoptr(address, function_type.as_pointer()), operands)


_call_kernel = function(types.void, [types.intp, types.intp], _emit_call)
_give_way = function(types.void, [types.intp], _emit_call)


def compile_tape() -> Any:
    """A kernel whose header holds the number of kernels, the tape's address and sched_yield's."""
    done_offset = 8 * DONE_SLOT

    def run_tape(header: int) -> None:
        num_kernels, tape, give_way = load_i64(header, 0), load_i64(header, 1), load_i64(header, 2)
        for index in range(num_kernels):
            block = load_i64(tape, 2 * index + 1)
            _call_kernel(load_i64(tape, 2 * index), block)
            num_items = load_i64(block, 1)
            num_looks = 0
            while load_acquire(block + done_offset) < num_items:
                num_looks += 1
                if num_looks > _PATIENCE:
                    _give_way(give_way)

    return cfunc(types.void(types.intp), error_model="numpy")(run_tape)
