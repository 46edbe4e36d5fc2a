# ruff: noqa: ARG001  # numba prescribes the arguments of intrinsics and of their code generators
"""Functions for numba-compiled code: sixteen-lane float32 vectors (type f32x16) and memory by address.

Addresses are int64 bytes, indices count elements. Owns no memory. The expressions are those of cpu_emit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from blockferry.kernels import cpu_emit as emit
from blockferry.kernels.cpu_emit import Element

jit: Any = njit  # typed as if it decorated decorators


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16: Any = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, emit.F32_LANES)  # type: ignore[no-untyped-call]  # numba is half typed


def function(result: Any, operands: list[Any], generate: Callable[..., ir.Value | None]) -> Any:
    """A function of 1 to 6 operands for numba code, emitted by generate(builder, *values); None: returns nothing."""
    signature = result(*operands)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        value = generate(builder, *args)
        return context.get_dummy_value() if value is None else value

    # numba reads the number of operands off the Python signature
    def one(typing_context: Any, a: Any) -> Any:
        return signature, codegen

    def two(typing_context: Any, a: Any, b: Any) -> Any:
        return signature, codegen

    def three(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, codegen

    def four(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return signature, codegen

    def five(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return signature, codegen

    def six(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        return signature, codegen

    return intrinsic((one, two, three, four, five, six)[len(operands) - 1])


def _lanewise(num_operands: int, generate: Callable[..., ir.Value]) -> Any:
    return function(f32x16, [f32x16] * num_operands, generate)


_ADDRESS = [types.intp, types.intp]
_LOAD = {e: function(f32x16, _ADDRESS, lambda b, a, i, e=e: emit.load(b, e, a, i)) for e in Element}
_LOAD_EVEN = {e: function(f32x16, _ADDRESS, lambda b, a, i, e=e: emit.load_pair(b, e, a, i)[0]) for e in Element}
_LOAD_ODD = {e: function(f32x16, _ADDRESS, lambda b, a, i, e=e: emit.load_pair(b, e, a, i)[1]) for e in Element}
_STORE = {
    e: function(types.void, [*_ADDRESS, f32x16], lambda b, a, i, v, e=e: emit.store(b, e, a, i, v)) for e in Element
}
_STORE_IN_TURN = {
    e: function(
        types.void, [*_ADDRESS, f32x16, f32x16], lambda b, a, i, v, w, e=e: emit.store_in_turn(b, e, a, i, [v, w])
    )
    for e in Element
}
_STORE_PAIR = {
    e: function(types.void, [*_ADDRESS, f32x16, f32x16], lambda b, a, i, v, w, e=e: emit.store_pair(b, e, a, i, [v, w]))
    for e in Element
}


def load_of(element: Element) -> Any:
    """load(address, index): 16 elements as f32x16."""
    return _LOAD[element]


def store_of(element: Element) -> Any:
    """store(address, index, vector): 16 elements, rounded to nearest even."""
    return _STORE[element]


def load_even_of(element: Element) -> Any:
    """load(address, index): the first vector of cpu_emit.load_pair; the compiler merges the loads of both."""
    return _LOAD_EVEN[element]


def load_odd_of(element: Element) -> Any:
    """load(address, index): the second vector of cpu_emit.load_pair."""
    return _LOAD_ODD[element]


def store_pair_of(element: Element) -> Any:
    """store(address, index, even, odd): 32 elements back in their order."""
    return _STORE_PAIR[element]


def store_in_turn_of(element: Element) -> Any:
    """store(address, index, first, second): 32 elements, one vector after the other."""
    return _STORE_IN_TURN[element]


load_f32, store_f32 = load_of(Element.FLOAT32), store_of(Element.FLOAT32)


def _emit_load_element(element: Element) -> Callable[..., ir.Value]:
    def generate(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
        raw = builder.load(emit.pointer(builder, address, index, element.memory, element.memory))
        return raw if element is Element.FLOAT32 else emit.widen(builder, raw)

    return generate


def _emit_store_element(element: Element) -> Callable[..., None]:
    def generate(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        raw = value if element is Element.FLOAT32 else emit.narrow(builder, value)
        builder.store(raw, emit.pointer(builder, address, index, element.memory, element.memory))

    return generate


_LOAD_ELEMENT = {e: function(types.float32, _ADDRESS, _emit_load_element(e)) for e in Element}
_STORE_ELEMENT = {e: function(types.void, [*_ADDRESS, types.float32], _emit_store_element(e)) for e in Element}


def load_element_of(element: Element) -> Any:
    """load(address, index): one element as float32."""
    return _LOAD_ELEMENT[element]


def store_element_of(element: Element) -> Any:
    """store(address, index, value): one element, rounded to nearest even."""
    return _STORE_ELEMENT[element]


load_scalar, store_scalar = load_element_of(Element.FLOAT32), store_element_of(Element.FLOAT32)


def _emit_load_integer(llvm_type: ir.Type) -> Callable[..., ir.Value]:
    def generate(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
        raw = builder.load(emit.pointer(builder, address, index, llvm_type, llvm_type))
        return raw if llvm_type == emit.I64 else builder.sext(raw, emit.I64)

    return generate


def _emit_store_integer(llvm_type: ir.Type) -> Callable[..., None]:
    def generate(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        raw = value if llvm_type == emit.I64 else builder.trunc(value, llvm_type)
        builder.store(raw, emit.pointer(builder, address, index, llvm_type, llvm_type))

    return generate


load_i32 = function(types.intp, _ADDRESS, _emit_load_integer(emit.I32))
load_i64 = function(types.intp, _ADDRESS, _emit_load_integer(emit.I64))
store_i32 = function(types.void, [*_ADDRESS, types.intp], _emit_store_integer(emit.I32))
store_i64 = function(types.void, [*_ADDRESS, types.intp], _emit_store_integer(emit.I64))


def _emit_select(operator: str) -> Callable[..., ir.Value]:
    """Choose a if it compares so with b, else b: the result is NaN where b is, as in x86's minimum and maximum."""

    def generate(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
        return builder.select(builder.fcmp_ordered(operator, a, b), a, b)

    return generate


def _emit_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fadd(a, b)


def _emit_power_of_two(builder: ir.IRBuilder, exponent: ir.Value) -> ir.Value:
    biased = builder.add(builder.fptosi(exponent, emit.I32_LANES), emit.constant_like(emit.I32_LANES, 127))
    return builder.bitcast(builder.shl(biased, emit.constant_like(emit.I32_LANES, 23)), emit.F32_LANES)


def _emit_round(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    return emit.call(builder, "llvm.rint.v16f32", emit.F32_LANES, [a])


add = _lanewise(2, _emit_add)
subtract = _lanewise(2, lambda builder, a, b: builder.fsub(a, b))
multiply = _lanewise(2, lambda builder, a, b: builder.fmul(a, b))
divide = _lanewise(2, lambda builder, a, b: builder.fdiv(a, b))
multiply_add = _lanewise(3, emit.multiply_add)
multiply_subtract = _lanewise(3, lambda builder, a, b, c: emit.multiply_add(builder, a, b, builder.fneg(c)))
maximum = _lanewise(2, _emit_select(">"))
minimum = _lanewise(2, _emit_select("<"))
_round = _lanewise(1, _emit_round)
_power_of_two = _lanewise(1, _emit_power_of_two)
splat = function(f32x16, [types.float32], emit.splat)
sum_lanes = function(types.float32, [f32x16], lambda builder, a: emit.fold(builder, a, _emit_add))
max_lanes = function(types.float32, [f32x16], lambda builder, a: emit.fold(builder, a, _emit_select(">")))


def _emit_keep_lanes(builder: ir.IRBuilder, vector: ir.Value, count: ir.Value, filler: ir.Value) -> ir.Value:
    numbers = emit.lane_numbers(list(range(emit.LANES)))
    kept = builder.icmp_signed("<", numbers, emit.splat(builder, builder.trunc(count, emit.I32)))
    return builder.select(kept, vector, emit.splat(builder, filler))


def _emit_sum_rows(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    starts = (emit.word(row * emit.LANES) for row in range(emit.LANES))
    return emit.sum_rows(builder, [emit.load(builder, Element.FLOAT32, address, start) for start in starts])


def _emit_fetch_add(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", builder.inttoptr(address, emit.I64.as_pointer()), emit.word(1), "acq_rel")


def _emit_load_acquire(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load_atomic(builder.inttoptr(address, emit.I64.as_pointer()), "acquire", 8)


def _emit_copy_bytes(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, num_bytes: ir.Value) -> None:
    pointers = [builder.inttoptr(address, emit.I8.as_pointer()) for address in (target, source)]
    is_volatile = ir.Constant(ir.IntType(1), 0)
    emit.call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [*pointers, num_bytes, is_volatile])


# keep_lanes(vector, count, filler): the first `count` lanes of vector, the rest `filler`
keep_lanes = function(f32x16, [f32x16, types.intp, types.float32], _emit_keep_lanes)
# sum_rows(address): lane t is the sum of the t-th of 16 consecutive float32 vectors
sum_rows = function(f32x16, [types.intp], _emit_sum_rows)
# fetch_add(address): atomically adds one to an int64, returns the value before
fetch_add = function(types.intp, [types.intp], _emit_fetch_add)
# load_acquire(address): an int64, and then everything written before it was
load_acquire = function(types.intp, [types.intp], _emit_load_acquire)
copy_bytes = function(types.void, [types.intp] * 3, _emit_copy_bytes)


def _scratch(typing_context: Any, num_floats: Any) -> Any:
    """Address of `num_floats` (a literal) float32 on the stack of the calling function, 64-byte aligned."""
    if not isinstance(num_floats, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        area = emit.stack(builder, ir.ArrayType(emit.F32, num_floats.literal_value))
        return builder.ptrtoint(area, emit.I64)

    return types.intp(num_floats), codegen


scratch: Any = intrinsic(prefer_literal=True)(_scratch)


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@jit
def exp(x: Any) -> Any:
    """Exponential of each lane to about 1 ulp between e^-87 and e^88, where it saturates; NaN stays NaN.

    Cephes expf (Moshier, Methods and Programs for Mathematical Functions, 1989): x = k ln2 + r, then a polynomial.
    """
    x = maximum(splat(np.float32(-87.0)), minimum(splat(np.float32(88.0)), x))
    k = _round(multiply(x, splat(_LOG2_E)))
    r = multiply_add(k, splat(-_LN2_HIGH), x)
    r = multiply_add(k, splat(-_LN2_LOW), r)
    p = splat(np.float32(1.9875691500e-4))
    p = multiply_add(p, r, splat(np.float32(1.3981999507e-3)))
    p = multiply_add(p, r, splat(np.float32(8.3334519073e-3)))
    p = multiply_add(p, r, splat(np.float32(4.1665795894e-2)))
    p = multiply_add(p, r, splat(np.float32(1.6666665459e-1)))
    p = multiply_add(p, r, splat(np.float32(5.0000001201e-1)))
    p = multiply_add(multiply(p, r), r, add(r, splat(np.float32(1.0))))
    return multiply(p, _power_of_two(k))


def _emit_scale(builder: ir.IRBuilder, vector: ir.Value, exponent: ir.Value) -> ir.Value:
    kept, mode = ir.Constant(emit.I16, -1), ir.Constant(emit.I32, 4)  # every lane, rounded as usual
    operands = [vector, exponent, vector, kept, mode]
    return emit.call(builder, "llvm.x86.avx512.mask.scalef.ps.512", emit.F32_LANES, operands)


_scale_avx512 = _lanewise(2, _emit_scale)


@jit
def exp2_for_bfloat16(x: Any) -> Any:
    """2^x of each lane to 4e-6, far below bfloat16's rounding; AVX-512 only.

    x = k + r, then the Chebyshev interpolant of degree 4 of 2^r. Of minus infinity r is NaN, but the last instruction
    makes 0 of a NaN times 2^-infinity.
    """
    k = _round(x)
    r = subtract(x, k)
    p = splat(np.float32(0.009676037356257439))
    p = multiply_add(p, r, splat(np.float32(0.05592203512787819)))
    p = multiply_add(p, r, splat(np.float32(0.2402210682630539)))
    p = multiply_add(p, r, splat(np.float32(0.6931210160255432)))
    p = multiply_add(p, r, splat(np.float32(1.0)))
    return _scale_avx512(p, k)
