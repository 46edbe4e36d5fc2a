"""The two inner loops of CPU decode attention, unrolled over the heads and vectors of one shape.

    scores     partial[g, t] = the products of query[g] and key[t], D of them left as 16 partial sums
    values     total[g] += sum over t of weight[g, t] * value[t]

They are emitted as LLVM code rather than written in numba, because how many accumulators live in registers depends on
the shape. Memory is widened once for all query heads that share it. Both loops fetch the tokens that come next into
the cache as they go: pages lie apart in memory, so the hardware does not see them coming.

Legend: G query heads per kv head, D head dim, t token of a chunk.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from blockferry.kernels import cpu_emit as emit
from blockferry.kernels.cpu_emit import CACHE_LINE_BYTES, LANES, Element, word
from blockferry.kernels.cpu_vector import function

MAX_HEADS, MAX_VECTORS = 4, 4  # accumulators that live in registers at once: their product, of 32 (AVX-512)


def _split(count: int, limit: int) -> list[range]:
    return [range(start, min(start + limit, count)) for start in range(0, count, limit)]


def _emit_row(
    builder: ir.IRBuilder, element: Element, address: ir.Value, columns: range, *, first: int, vectors: int
) -> dict[int, ir.Value]:
    """Vectors `columns` of the `vectors` that begin at element `first`; pairs in the order of cpu_emit.load_pair."""
    row = {}
    for column in columns:
        index = word(first + column * LANES)
        if column == vectors - 1 and vectors % 2:
            row[column] = emit.load(builder, element, address, index)
        elif column % 2 == 0:
            row[column], row[column + 1] = emit.load_pair(builder, element, address, index)
    return row


def _emit_prefetch(builder: ir.IRBuilder, table: ir.Value, token: ir.Value, first_byte: int, num_bytes: int) -> None:
    address = builder.load(builder.gep(table, [token]))
    for offset in range(first_byte, first_byte + num_bytes, CACHE_LINE_BYTES):
        emit.prefetch(builder, builder.add(address, word(offset)), cache_level=2)


def _emit_dot(builder: ir.IRBuilder, queries: ir.Value, first: int, row: dict[int, ir.Value]) -> ir.Value:
    """The products of one query with a key, as 16 partial sums."""
    products = None
    for column, vector in row.items():
        query = emit.load(builder, Element.FLOAT32, queries, word(first + column * LANES))
        if products is None:
            products = builder.fmul(query, vector)
        else:
            products = emit.multiply_add(builder, query, vector, products)
    return products


def make_score_tile(element: Element, head_dim: int, group_size: int) -> Any:
    """score_tile(queries [G, D] float32, addresses [16] of keys, upcoming [16], partial [G, 16, 16] float32)."""
    vectors = head_dim // LANES

    def generate(builder: ir.IRBuilder, *args: ir.Value) -> None:
        queries, addresses, upcoming, partial = args
        table, next_table = (builder.inttoptr(address, emit.I64.as_pointer()) for address in (addresses, upcoming))
        with cgutils.for_range(builder, word(LANES)) as loop:
            _emit_prefetch(builder, next_table, loop.index, 0, head_dim * element.num_bytes)
            key = builder.load(builder.gep(table, [loop.index]))
            row = _emit_row(builder, element, key, range(vectors), first=0, vectors=vectors)
            for head in range(group_size):
                products = _emit_dot(builder, queries, head * head_dim, row)
                index = builder.add(builder.mul(loop.index, word(LANES)), word(head * LANES * LANES))
                emit.store(builder, Element.FLOAT32, partial, index, products)

    return function(types.void, [types.intp] * 4, generate)


def make_weigh_values(element: Element, head_dim: int, group_size: int, chunk: int) -> Any:
    """weigh_values(totals [G, D] float32, addresses of pages' tokens, upcoming, weights [G, chunk], num_tokens)."""
    vectors = head_dim // LANES
    value_bytes = head_dim * element.num_bytes

    def emit_block(builder: ir.IRBuilder, args: Any, heads: range, columns: range) -> None:
        """The loop over tokens for the heads and vectors whose totals fit in registers together."""
        totals, addresses, upcoming, weights, num_tokens = args
        table, next_table = (builder.inttoptr(address, emit.I64.as_pointer()) for address in (addresses, upcoming))
        places = {(head, column): word(head * head_dim + column * LANES) for head in heads for column in columns}
        sums = {place: emit.stack(builder, emit.F32_LANES) for place in places}
        for place, index in places.items():
            builder.store(emit.load(builder, Element.FLOAT32, totals, index), sums[place])
        with cgutils.for_range(builder, num_tokens) as loop:
            if heads.start == columns.start == 0:
                _emit_prefetch(builder, next_table, loop.index, value_bytes, value_bytes)
            value = builder.load(builder.gep(table, [loop.index]))
            row = _emit_row(builder, element, value, columns, first=head_dim, vectors=vectors)
            for head in heads:
                index = builder.add(loop.index, word(head * chunk))
                weight = emit.splat(builder, emit.load_scalar(builder, weights, index))
                for column in columns:
                    total = builder.load(sums[head, column])
                    builder.store(emit.multiply_add(builder, weight, row[column], total), sums[head, column])
        for place, index in places.items():
            emit.store(builder, Element.FLOAT32, totals, index, builder.load(sums[place]))

    def generate(builder: ir.IRBuilder, *args: ir.Value) -> None:
        for heads in _split(group_size, MAX_HEADS):
            for columns in _split(vectors, MAX_VECTORS):
                emit_block(builder, args, heads, columns)

    return function(types.void, [types.intp] * 5, generate)
