"""Intel AMX: bfloat16 products of 16-row tiles, as LLVM expressions.

A tile register holds 16 rows of 64 bytes. dot: C [m, n] float32 += sum over k of A [m, k] * B [k, n], where B keeps
two consecutive k of each n side by side. Registers are numbered 0 to 7; their shapes come from a 64-byte configuration
that each thread loads before use. A sum runs over k in order, whatever m and n are.

      A: m rows x 32 k (bfloat16)    B: 16 pairs of k x 16 n    C: m rows x 16 n (float32)
"""

from __future__ import annotations

import ctypes
import functools

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from blockferry.kernels import cpu_emit as emit
from blockferry.kernels.cpu_emit import I8, word

TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_INPUTS = 32  # bfloat16 in a row of A
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64


@functools.cache
def has_amx() -> bool:
    """Whether this process may use AMX tiles for bfloat16; asks Linux for the permission."""
    features = llvmlite.binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def make_configuration(rows: dict[int, int]) -> NDArray[np.uint8]:
    """uint8 [64]: rows of each register in use, all of them 64 bytes wide."""
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1  # palette
    for register, num_rows in rows.items():
        configuration[16:48].view(np.uint16)[register] = TILE_ROW_BYTES
        configuration[48 + register] = num_rows
    return configuration


def configure(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Load a configuration, which empties every register."""
    _tile(builder, "ldtilecfg", _pointer(builder, address))


def release(builder: ir.IRBuilder) -> None:
    """Give the registers back, so that the thread's state is small again."""
    _tile(builder, "tilerelease")


def zero(builder: ir.IRBuilder, register: int) -> None:
    """Clear a register."""
    _tile(builder, "tilezero", ir.Constant(I8, register))


def load(builder: ir.IRBuilder, register: int, address: ir.Value, stride: ir.Value) -> None:
    """Fill a register from rows that lie `stride` bytes apart."""
    _tile(builder, "tileloadd64", ir.Constant(I8, register), _pointer(builder, address), stride)


def store(builder: ir.IRBuilder, register: int, address: ir.Value) -> None:
    """Write a register to rows that follow each other."""
    _tile(builder, "tilestored64", ir.Constant(I8, register), _pointer(builder, address), word(TILE_ROW_BYTES))


def dot(builder: ir.IRBuilder, total: int, a: int, b: int) -> None:
    """Multiply registers a and b and add the product to `total`."""
    _tile(builder, "tdpbf16ps", *(ir.Constant(I8, register) for register in (total, a, b)))


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I8.as_pointer())


def _tile(builder: ir.IRBuilder, name: str, *operands: ir.Value) -> None:
    emit.call(builder, f"llvm.x86.{name}", ir.VoidType(), list(operands))
