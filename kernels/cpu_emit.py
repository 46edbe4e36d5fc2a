"""LLVM expressions on sixteen float32 lanes: what numba's vector functions and unrolled loops are made of.

LLVM lowers the lanes to what the machine has: one AVX-512, two AVX2 or four SSE/NEON registers. Addresses are int64
values counted in bytes, indices count elements; their validity is the caller's affair.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from llvmlite import ir

LANES = 16
FLOAT_BYTES = 4
CACHE_LINE_BYTES = 64

I8, I16, I32, I64, F32 = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
F32_LANES, I32_LANES, I16_LANES = (ir.VectorType(scalar, LANES) for scalar in (F32, I32, I16))
_FAST = ("contract", "nsz")


class Element(enum.Enum):
    """How numbers lie in memory; the value is the torch and NumPy name. All arithmetic is float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is Element.FLOAT32 else 2

    @property
    def memory(self) -> ir.Type:
        """LLVM type of one element in memory."""
        return F32 if self is Element.FLOAT32 else I16


def word(value: int) -> ir.Constant:
    """An int64 constant."""
    return ir.Constant(I64, value)


def constant_like(llvm_type: ir.Type, value: float) -> ir.Constant:
    """A constant of a scalar type, or of a vector type with every lane the same."""
    if isinstance(llvm_type, ir.VectorType):
        return ir.Constant(llvm_type, [ir.Constant(llvm_type.element, value)] * llvm_type.count)
    return ir.Constant(llvm_type, value)


def lane_numbers(lanes: list[int]) -> ir.Constant:
    """A shuffle mask."""
    return ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """All lanes the same scalar."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, constant_like(I32_LANES, 0))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, operands: list[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic, declared on first use."""
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    return builder.call(function, operands, fastmath=_FAST if result == F32_LANES else ())


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Product plus c, rounded once."""
    return call(builder, "llvm.fma.v16f32", F32_LANES, [a, b, c])


def pointer(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, element: ir.Type, target: ir.Type) -> ir.Value:
    """Pointer to `target` at element `index` from a byte address."""
    base = builder.inttoptr(address, element.as_pointer())
    return builder.bitcast(builder.gep(base, [index]), target.as_pointer())


def stack(builder: ir.IRBuilder, llvm_type: ir.Type) -> ir.Value:
    """Room for one value for as long as the function runs; in the entry block, where LLVM turns it into registers."""
    with builder.goto_entry_block():
        room = builder.alloca(llvm_type)
    room.align = CACHE_LINE_BYTES
    return room


def widen(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """bfloat16 bits to float32: the upper half of the word."""
    wide, result = (I32_LANES, F32_LANES) if isinstance(bits.type, ir.VectorType) else (I32, F32)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), constant_like(wide, 16)), result)


def round_to_upper(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 to words whose upper half is the bfloat16, to nearest even. NaNs as processors make them stay NaN."""
    wide = I32_LANES if isinstance(value.type, ir.VectorType) else I32
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant_like(wide, 16)), constant_like(wide, 1))
    return builder.add(bits, builder.add(odd, constant_like(wide, 0x7FFF)))


def narrow(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 to bfloat16 bits."""
    wide, half = (I32_LANES, I16_LANES) if isinstance(value.type, ir.VectorType) else (I32, I16)
    return builder.trunc(builder.lshr(round_to_upper(builder, value), constant_like(wide, 16)), half)


def load(builder: ir.IRBuilder, element: Element, address: ir.Value, index: ir.Value) -> ir.Value:
    """Sixteen elements of memory as float32."""
    raw = builder.load(pointer(builder, address, index, element.memory, ir.VectorType(element.memory, LANES)))
    raw.align = element.num_bytes
    return raw if element is Element.FLOAT32 else widen(builder, raw)


def store(builder: ir.IRBuilder, element: Element, address: ir.Value, index: ir.Value, vector: ir.Value) -> None:
    """Sixteen float32 to memory."""
    raw = vector if element is Element.FLOAT32 else narrow(builder, vector)
    builder.store(raw, pointer(builder, address, index, element.memory, raw.type)).align = element.num_bytes


def load_pair(builder: ir.IRBuilder, element: Element, address: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Thirty-two elements as two vectors, in whatever order is cheapest: bfloat16 even and odd, float32 in turn.

    Sums over a dim do not care and store_pair puts the order right; 16 elements widen in one operation, not two.
    """
    if element is Element.FLOAT32:
        return [load(builder, element, address, start) for start in (index, builder.add(index, word(LANES)))]
    words = builder.load(pointer(builder, address, index, I16, I32_LANES))
    words.align = element.num_bytes
    even = builder.shl(words, constant_like(I32_LANES, 16))
    odd = builder.and_(words, _upper_half())
    return [builder.bitcast(half, F32_LANES) for half in (even, odd)]


def store_pair(
    builder: ir.IRBuilder, element: Element, address: ir.Value, index: ir.Value, vectors: list[ir.Value]
) -> None:
    """Thirty-two elements that load_pair gave back in their order."""
    if element is Element.FLOAT32:
        store_in_turn(builder, element, address, index, vectors)
        return
    even, odd = (round_to_upper(builder, vector) for vector in vectors)
    words = builder.or_(builder.lshr(even, constant_like(I32_LANES, 16)), builder.and_(odd, _upper_half()))
    builder.store(words, pointer(builder, address, index, I16, I32_LANES)).align = element.num_bytes


def store_in_turn(
    builder: ir.IRBuilder, element: Element, address: ir.Value, index: ir.Value, vectors: list[ir.Value]
) -> None:
    """Thirty-two elements, two vectors one after the other."""
    if element is Element.FLOAT32:
        for start, vector in zip((index, builder.add(index, word(LANES))), vectors):
            store(builder, element, address, start, vector)
        return
    halves = [builder.bitcast(round_to_upper(builder, vector), ir.VectorType(I16, 2 * LANES)) for vector in vectors]
    upper = lane_numbers(list(range(1, 4 * LANES, 2)))
    packed = builder.shuffle_vector(halves[0], halves[1], upper)
    builder.store(packed, pointer(builder, address, index, I16, packed.type)).align = element.num_bytes


def _upper_half() -> ir.Constant:
    return constant_like(I32_LANES, 0xFFFF0000)


def load_scalar(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """One float32 of float32 memory."""
    return builder.load(pointer(builder, address, index, F32, F32))


def prefetch(builder: ir.IRBuilder, address: ir.Value, *, cache_level: int) -> None:
    """Ask for the cache line at a byte address in the L1 or L2 cache; harmless wherever it points.

    From memory, L2 is a tenth faster: few lines can be on their way to L1 at a time.
    """
    target = builder.inttoptr(address, I8.as_pointer())
    options = (ir.Constant(I32, value) for value in (0, 4 - cache_level, 1))  # read, locality, data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [target, *options])


def fold(builder: ir.IRBuilder, vector: ir.Value, combine: Callable[..., ir.Value]) -> ir.Value:
    """Halve until one lane is left: a fixed tree, so the same lanes always give the same sum."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        halves = [lane_numbers(list(range(start, start + width))) for start in (0, width)]
        vector = combine(builder, *(builder.shuffle_vector(vector, undefined, half) for half in halves))
    return builder.extract_element(vector, ir.Constant(I32, 0))


def sum_rows(builder: ir.IRBuilder, rows: list[ir.Value]) -> ir.Value:
    """Lane t of the result is the sum of the t-th of 16 vectors.

    A transposing tree: each level adds pairs of vectors, halving both the vectors and the lanes that a row takes.

        a0 a1 .. | b0 b1 ..   ->   a0+a2 a1+a3 b0+b2 b1+b3 ..   ->   a0+a1+a2+a3 ..
    """
    span = LANES
    while len(rows) > 1:
        half, period = span // 2, len(rows) // 2
        lower, upper = [], []
        for start in range(0, LANES, span):
            lower += [source + start + lane for source in (0, LANES) for lane in range(half)]
            upper += [source + start + half + lane for source in (0, LANES) for lane in range(half)]
        rows = [
            builder.fadd(
                builder.shuffle_vector(rows[index], rows[index + period], lane_numbers(lower)),
                builder.shuffle_vector(rows[index], rows[index + period], lane_numbers(upper)),
            )
            for index in range(period)
        ]
        span = half
    return rows[0]
