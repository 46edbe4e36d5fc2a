"""What a prefill chunk reads of the pages, laid out for the AMX kernel that attends: see cpu_paged_prefill.

    pages -> keys [K, S', D], values transposed [K, D, S''];  S' is S in whole tiles, S'' a little more

Legend: S tokens in reach, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from blockferry.kernels import cpu_emit as emit
from blockferry.kernels.cpu_emit import I32, I32_LANES, LANES, word
from blockferry.kernels.cpu_launch import compile_kernel
from blockferry.kernels.cpu_vector import copy_bytes, function, jit, load_i32, load_i64, scratch, splat, store_f32

KEY_TILE = 32
VALUE_PADDING = 32  # keys more than S' in a row of values: rows then begin in different cache sets


def compile_stage(head_dim: int) -> Any:
    """Keys and transposed values of a row's tokens in reach, zeros before and after; an item: 32 tokens of a KV head.

    Staged token 0 is position `base` of the row; none before `low` or from seq_len on is read.
    """
    head_bytes, pair_words = head_dim * 2, KEY_TILE // 2

    @jit
    def find(index: int, cache: int, table: int, arguments: int) -> Any:
        """Address of a token's key."""
        block_size = load_i64(arguments, 8)
        column = index // block_size
        page = cache + load_i32(table, column) * load_i64(arguments, 9)
        return page + (index - column * block_size) * load_i64(arguments, 11)

    def stage_tile(arguments: int, index: int) -> None:
        keys, values, table = load_i64(arguments, 3), load_i64(arguments, 4), load_i64(arguments, 5)
        num_tiles, seq_len = load_i64(arguments, 6), load_i64(arguments, 7)
        base, low = load_i64(arguments, 12), load_i64(arguments, 13)
        kv_head = index // num_tiles
        first = (index - kv_head * num_tiles) * KEY_TILE
        num_keys = num_tiles * KEY_TILE
        cache = load_i64(arguments, 2) + kv_head * load_i64(arguments, 10)
        value_stride = (num_keys + VALUE_PADDING) * 2
        target = keys + (kv_head * num_keys + first) * head_bytes
        column = values + kv_head * head_dim * value_stride + first * 2
        zeros = scratch(head_dim)
        for position in range(0, head_dim, LANES):
            store_f32(zeros, position, splat(np.float32(0.0)))
        for pair in range(pair_words):
            token = base + first + 2 * pair
            even, odd = zeros, zeros
            if low <= token < seq_len:
                even = find(token, cache, table, arguments)
            if low <= token + 1 < seq_len:
                odd = find(token + 1, cache, table, arguments)
            copy_bytes(target, even, head_bytes)
            copy_bytes(target + head_bytes, odd, head_bytes)
            target += 2 * head_bytes
            if even != zeros:
                even += head_bytes
            if odd != zeros:
                odd += head_bytes
            for dim in range(0, head_dim, LANES):
                _store_column(even + dim * 2, odd + dim * 2, column + dim * value_stride, value_stride)
            column += 4

    return compile_kernel(stage_tile)


def _emit_store_column(
    builder: ir.IRBuilder, even: ir.Value, odd: ir.Value, target: ir.Value, stride: ir.Value
) -> None:
    """Sixteen bfloat16 at `even` and at `odd`, as one word of both in each of sixteen rows."""
    halves = []
    for source in (even, odd):
        bits = builder.load(emit.pointer(builder, source, word(0), emit.I16, emit.I16_LANES))
        bits.align = 2
        halves.append(builder.zext(bits, I32_LANES))
    words = builder.or_(halves[0], builder.shl(halves[1], emit.constant_like(I32_LANES, 16)))
    for lane in range(LANES):
        row = builder.add(target, builder.mul(stride, word(lane)))
        scalar = builder.extract_element(words, ir.Constant(I32, lane))
        builder.store(scalar, emit.pointer(builder, row, word(0), I32, I32))


_store_column = function(types.void, [types.intp] * 4, _emit_store_column)
