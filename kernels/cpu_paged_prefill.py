"""Causal attention of a prefill chunk in bfloat16 on CPUs with AMX.

Scores are computed transposed, keys by queries, so that every query is one lane: its maximum and its sum need no
exchange between lanes, and the exponentials of two keys side by side are already what the second product reads.

    stage    pages -> keys and transposed values in reach of the chunk     cpu_prefill_stage
    attend   for 32 queries of one head, for blocks of 128 keys:
             scores^T [keys, queries] = keys * queries^T                  AMX
             weights^T = exp(scores^T - running maximum)                  float32, rounded to bfloat16
             total^T [D, queries] = total^T * factor + values^T * weights^T    AMX, kept in float32

Blocks begin at multiples of 128 keys, so a query's output does not depend on the chunk that it comes in. Those wholly
out of the queries' reach are skipped. A sink is where the running maximum and sum begin. Online
softmax after Milakov and Gimelshein (2018) and FlashAttention (Dao et al., 2022).

Legend: Q queries, S tokens of the row, H query heads, K kv heads, D head dim, B blocks, N block size, M blocks of a
row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from blockferry.kernels import cpu_amx as amx
from blockferry.kernels import cpu_emit as emit
from blockferry.kernels.attention_terms import NO_LIMIT, AttentionTerms, first_in_reach
from blockferry.kernels.cpu_amx import TILE_INPUTS, TILE_ROWS
from blockferry.kernels.cpu_emit import I32, LANES, Element, word
from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, compile_kernel, float_bits
from blockferry.kernels.cpu_layout import has_dense_heads
from blockferry.kernels.cpu_prefill_stage import KEY_TILE, VALUE_PADDING, compile_stage
from blockferry.kernels.cpu_soft_cap import choose_below, tanh
from blockferry.kernels.cpu_vector import (
    add,
    divide,
    exp2_for_bfloat16,
    f32x16,
    function,
    jit,
    load_f32,
    load_i32,
    load_i64,
    load_scalar,
    maximum,
    multiply,
    multiply_add,
    multiply_subtract,
    scratch,
    splat,
    store_f32,
    store_i32,
    store_scalar,
    subtract,
)

QUERY_TILE, KEY_BLOCK = 32, 128
_TILE_BYTES = 1024


class PagedPrefill:
    """Attends one row's chunk of one layer. Called by one thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kernels: dict[int, tuple[CompiledKernel, CompiledKernel]] = {}
        self._configuration = amx.make_configuration(dict.fromkeys(range(8), TILE_ROWS))

    def accepts(self, q_QHD: torch.Tensor, kv_cache: torch.Tensor) -> bool:
        """Whether the kernels can do it."""
        is_bfloat16 = q_QHD.dtype == kv_cache.dtype == torch.bfloat16
        return is_bfloat16 and q_QHD.shape[2] % TILE_INPUTS == 0 and has_dense_heads(q_QHD) and amx.has_amx()

    def prepare(self, head_dim: int) -> tuple[CompiledKernel, CompiledKernel]:
        """Compile or load the kernels of one head dim: stage and attend."""
        if head_dim not in self._kernels:
            get = self._launcher.store.get
            self._kernels[head_dim] = (
                get(f"prefill_stage-{head_dim}", lambda: compile_stage(head_dim)),
                get(f"prefill_attend-{head_dim}", lambda: compile_attend(head_dim)),
            )
        return self._kernels[head_dim]

    def __call__(
        self,
        q_QHD: torch.Tensor,
        kv_cache: torch.Tensor,  # [B, K, N, 2*D], the chunk's keys and values written
        block_table_M: torch.Tensor,  # int32, contiguous
        *,
        seq_len: int,
        rule: AttentionTerms,
        out_QHD: torch.Tensor,  # contiguous, written
    ) -> None:
        """Attend the row's last Q tokens over those in reach. Call only what `accepts` takes."""
        num_queries, num_heads, head_dim = q_QHD.shape
        _, num_kv_heads, block_size, _ = kv_cache.shape
        stage, attend = self.prepare(head_dim)
        low = first_in_reach(rule, seq_len - num_queries)
        base = low // KEY_BLOCK * KEY_BLOCK  # of what is staged
        num_key_tiles = -(-(seq_len - base) // KEY_TILE)
        num_keys = num_key_tiles * KEY_TILE
        keys = torch.empty(num_kv_heads * num_keys * head_dim, dtype=torch.bfloat16)
        values = torch.empty(num_kv_heads * head_dim * (num_keys + VALUE_PADDING), dtype=torch.bfloat16)
        num_threads = torch.get_num_threads()
        stride_block, stride_head, stride_token, _ = (2 * stride for stride in kv_cache.stride())
        staging = (
            kv_cache.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            block_table_M.data_ptr(),
            num_key_tiles,
            seq_len,
            block_size,
            stride_block,
            stride_head,
            stride_token,
            base,
            low,
        )
        self._launcher.run(stage, num_threads, num_kv_heads * num_key_tiles, staging)
        # scores come as q k, or with a cap as tanh of it; `unit` makes logits of them
        inner, unit = (0.0, rule.scale) if rule.soft_cap is None else (rule.scale / rule.soft_cap, rule.soft_cap)
        sinks_H = None if rule.sinks_H is None else rule.sinks_H.float() / unit
        attending = (
            q_QHD.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out_QHD.data_ptr(),
            self._configuration.ctypes.data,
            num_queries,
            seq_len - base,
            num_keys,
            num_heads,
            num_heads // num_kv_heads,
            2 * q_QHD.stride(0),
            2 * out_QHD.stride(0),
            float_bits(unit * math.log2(math.e)),
            float_bits(inner),
            rule.window or NO_LIMIT,
            rule.chunk or NO_LIMIT,
            base,
            0 if sinks_H is None else sinks_H.data_ptr(),
        )
        self._launcher.run(attend, num_threads, num_heads * -(-num_queries // QUERY_TILE), attending)


def compile_attend(head_dim: int) -> Any:
    """Attention of staged keys and values; an item is 32 queries of one head, those with most keys first."""
    score_block, weigh_block = _make_score_block(head_dim), _make_weigh_block(head_dim)
    query_floats, score_floats, weight_floats = head_dim * LANES, KEY_BLOCK * QUERY_TILE, KEY_BLOCK * LANES
    total_floats, head_words, half_bytes = head_dim * QUERY_TILE, head_dim // 2, head_dim * LANES * 4
    first_floats = QUERY_TILE
    tile_bytes, running_floats = _TILE_BYTES, 4 * LANES
    no_maximum = np.float32(-1e30)  # finite: a query may see nothing of the first blocks

    @jit
    def first_seen(position: int, window: int, stretch: int) -> Any:
        """The first key that a query reads."""
        return max(0, position - window + 1, position // stretch * stretch)

    @jit
    def cap(scores: int, num_keys: int, inner: Any) -> None:
        """Scores of 16 queries to tanh(inner * score)."""
        for tile in range(0, num_keys, TILE_ROWS):
            place = scores + tile // TILE_ROWS * 2 * tile_bytes
            for key in range(TILE_ROWS):
                store_f32(place, key * LANES, tanh(multiply(load_f32(place, key * LANES), splat(inner))))

    @jit
    def hide_past(scores: int, num_keys: int, start: int, firsts: int) -> None:
        """Of each of 16 queries, hide the keys before its first; `start` is the position of the first score."""
        for tile in range(0, num_keys, TILE_ROWS):
            if start + tile < load_scalar(firsts, LANES - 1):
                place = scores + tile // TILE_ROWS * 2 * tile_bytes
                for key in range(TILE_ROWS):
                    position = splat(np.float32(start + tile + key))
                    score = load_f32(place, key * LANES)
                    hidden = choose_below(position, load_f32(firsts, 0), splat(np.float32(-np.inf)), score)
                    store_f32(place, key * LANES, hidden)

    @jit
    def soften(scores: int, weights: int, running: int, totals: int, num_keys: int, scale: Any, future: int) -> None:
        """Scores of 16 queries to weights; `running` holds their maxima and sums.

        Of lane l, keys from future + l on are hidden.
        """
        highest = load_f32(running, 0)
        for tile in range(0, num_keys, TILE_ROWS):
            place = scores + tile // TILE_ROWS * 2 * tile_bytes
            if tile + TILE_ROWS > future:
                for key in range(TILE_ROWS):
                    hidden = _hide_below(load_f32(place, key * LANES), tile + key - future + 1)
                    store_f32(place, key * LANES, hidden)
            for key in range(TILE_ROWS):
                highest = maximum(highest, load_f32(place, key * LANES))
        offset = multiply(highest, scale)
        factor = exp2_for_bfloat16(subtract(multiply(load_f32(running, 0), scale), offset))
        store_f32(running, 0, highest)
        total = splat(np.float32(0.0))
        for tile in range(0, num_keys, TILE_ROWS):
            place = scores + tile // TILE_ROWS * 2 * tile_bytes
            target = weights + tile // KEY_TILE * 2 * tile_bytes + tile % KEY_TILE * 32
            for key in range(0, TILE_ROWS, 2):
                even = exp2_for_bfloat16(multiply_subtract(load_f32(place, key * LANES), scale, offset))
                odd = exp2_for_bfloat16(multiply_subtract(load_f32(place, key * LANES + LANES), scale, offset))
                total = add(total, add(even, odd))
                _store_words(target + key * 32, even, odd)
        store_f32(running, LANES, multiply_add(load_f32(running, LANES), factor, total))
        for dim in range(head_dim):
            store_f32(totals, dim * LANES, multiply(load_f32(totals, dim * LANES), factor))

    @jit
    def pack_queries(queries: int, source: int, stride: int, num_valid: int) -> None:
        """Words (two dims) of 32 queries as tiles of 16 words by 16 queries; beyond num_valid the last one again."""
        for query in range(QUERY_TILE):
            row = source + min(query, num_valid - 1) * stride
            column = queries + (query // LANES) * tile_bytes + (query % LANES) * 4
            for step in range(0, head_words, TILE_ROWS):
                for index in range(TILE_ROWS):
                    store_i32(column, index * LANES, load_i32(row, step + index))
                column += 2 * tile_bytes

    @jit
    def write(target: int, stride: int, totals: int, running: int, words: int, num_valid: int) -> None:
        """Totals of 16 queries over their sums, each query to its row."""
        inverse = divide(splat(np.float32(1.0)), load_f32(running, LANES))
        for index in range(head_words):
            even = multiply(load_f32(totals, 2 * index * LANES), inverse)
            odd = multiply(load_f32(totals, (2 * index + 1) * LANES), inverse)
            _store_words(words + index * 64, even, odd)
        for query in range(num_valid):
            for index in range(head_words):
                store_i32(target, index, load_i32(words, index * LANES + query))
            target += stride

    def attend_tile(arguments: int, index: int) -> None:
        q, keys, values, out = (
            load_i64(arguments, 2),
            load_i64(arguments, 3),
            load_i64(arguments, 4),
            load_i64(arguments, 5),
        )
        num_queries, seq_len, num_keys = load_i64(arguments, 7), load_i64(arguments, 8), load_i64(arguments, 9)
        num_heads, group_size = load_i64(arguments, 10), load_i64(arguments, 11)
        q_stride, out_stride = load_i64(arguments, 12), load_i64(arguments, 13)
        scale, inner = splat(load_scalar(arguments, 2 * 14)), load_scalar(arguments, 2 * 15)  # times log2(e); 0: no cap
        window, stretch, base = load_i64(arguments, 16), load_i64(arguments, 17), load_i64(arguments, 18)
        sinks = load_i64(arguments, 19)  # float32 [H] in the scores' unit, 0: none

        num_tiles = (num_queries + QUERY_TILE - 1) // QUERY_TILE
        order = index // num_heads
        head = index - order * num_heads
        first = (num_tiles - 1 - order) * QUERY_TILE
        num_valid = min(QUERY_TILE, num_queries - first)
        position = seq_len - num_queries + first
        kv_head = head // group_size
        value_stride = (num_keys + VALUE_PADDING) * 2
        keys += kv_head * num_keys * head_dim * 2
        values += kv_head * head_dim * value_stride

        queries, scores, weights = scratch(query_floats), scratch(score_floats), scratch(weight_floats)
        totals, running = scratch(total_floats), scratch(running_floats)
        pack_queries(queries, q + first * q_stride + head * head_dim * 2, q_stride, num_valid)
        for dim in range(0, total_floats, LANES):
            store_f32(totals, dim, splat(np.float32(0.0)))
        firsts = scratch(first_floats)
        for query in range(QUERY_TILE):
            store_scalar(firsts, query, np.float32(first_seen(base + position + query, window, stretch) - base))
        maximum_at_first, sum_at_first = no_maximum, np.float32(0.0)
        if sinks != 0:
            maximum_at_first, sum_at_first = load_scalar(sinks, head), np.float32(1.0)
        for half in range(2):
            store_f32(running, half * 2 * LANES, splat(maximum_at_first))
            store_f32(running, half * 2 * LANES + LANES, splat(sum_at_first))
        begin = max(0, first_seen(base + position, window, stretch) - base) // KEY_BLOCK * KEY_BLOCK
        end = min(num_keys, (position + 2 * QUERY_TILE - 1) // KEY_TILE * KEY_TILE)
        for start in range(begin, end, KEY_BLOCK):
            count = min(KEY_BLOCK, end - start)
            for key in range(0, count, KEY_TILE):
                score_block(keys + (start + key) * head_dim * 2, queries, scores + key * QUERY_TILE * 4)
            for half in range(2):
                if inner > 0:
                    cap(scores + half * tile_bytes, count, inner)
                hide_past(scores + half * tile_bytes, count, start, firsts + half * LANES * 4)
                future = position + half * LANES - start + 1
                soften(
                    scores + half * tile_bytes,
                    weights + half * tile_bytes,
                    running + half * 2 * 64,
                    totals + half * half_bytes,
                    count,
                    scale,
                    future,
                )
            weigh_block(values + start * 2, value_stride, weights, totals, count // KEY_TILE)
        for half in range(2):
            rows = min(LANES, num_valid - half * LANES)
            target = out + (first + half * LANES) * out_stride + head * head_dim * 2
            write(target, out_stride, totals + half * half_bytes, running + half * 2 * 64, scores, rows)

    return compile_kernel(attend_tile, enter=_enter, leave=_leave)


def _enter(arguments: int) -> None:
    _configure(load_i64(arguments, 6))


def _leave(arguments: int) -> None:
    _release(arguments)


def _make_score_block(head_dim: int) -> Any:
    """score_block(keys, queries, scores): 32 keys by 32 queries, tiles of 16 by 16."""

    def generate(builder: ir.IRBuilder, keys: ir.Value, queries: ir.Value, scores: ir.Value) -> None:
        for register in range(4):
            amx.zero(builder, register)
        for step in range(head_dim // TILE_INPUTS):
            for half in range(2):
                tile = builder.add(queries, word((step * 2 + half) * _TILE_BYTES))
                amx.load(builder, 6 + half, tile, word(amx.TILE_ROW_BYTES))
            for part in range(2):
                offset = word(part * TILE_ROWS * head_dim * 2 + step * amx.TILE_ROW_BYTES)
                amx.load(builder, 4 + part, builder.add(keys, offset), word(head_dim * 2))
                for half in range(2):
                    amx.dot(builder, 2 * part + half, 4 + part, 6 + half)
        for register in range(4):
            amx.store(builder, register, builder.add(scores, word(register * _TILE_BYTES)))

    return function(types.void, [types.intp] * 3, generate)


def _make_weigh_block(head_dim: int) -> Any:
    """weigh_block(values, value stride, weights, totals, steps of 32 keys): adds to totals."""
    num_tiles = head_dim // TILE_ROWS

    def emit_tiles(builder: ir.IRBuilder, args: tuple[ir.Value, ...], half: int, tiles: range) -> None:
        values, stride, weights, totals, steps = args
        places = [builder.add(totals, word((half * num_tiles + tile) * _TILE_BYTES)) for tile in tiles]
        for register, place in enumerate(places):
            amx.load(builder, register, place, word(amx.TILE_ROW_BYTES))
        with cgutils.for_range(builder, steps) as loop:
            offset = builder.mul(builder.add(builder.mul(loop.index, word(2)), word(half)), word(_TILE_BYTES))
            amx.load(builder, 6, builder.add(weights, offset), word(amx.TILE_ROW_BYTES))
            column = builder.add(values, builder.mul(loop.index, word(KEY_TILE * 2)))
            for register, tile in enumerate(tiles):
                rows = builder.add(column, builder.mul(stride, word(tile * TILE_ROWS)))
                amx.load(builder, 4 + register % 2, rows, stride)
                amx.dot(builder, register, 4 + register % 2, 6)
        for register, place in enumerate(places):
            amx.store(builder, register, place)

    def generate(builder: ir.IRBuilder, *args: ir.Value) -> None:
        for half in range(2):
            for first in range(0, num_tiles, 4):
                emit_tiles(builder, args, half, range(first, min(first + 4, num_tiles)))

    return function(types.void, [types.intp] * 5, generate)


def _emit_hide_below(builder: ir.IRBuilder, scores: ir.Value, first_visible: ir.Value) -> ir.Value:
    """Minus infinity in lanes below first_visible."""
    numbers = emit.lane_numbers(list(range(LANES)))
    is_visible = builder.icmp_signed(">=", numbers, emit.splat(builder, builder.trunc(first_visible, I32)))
    return builder.select(is_visible, scores, emit.constant_like(emit.F32_LANES, float("-inf")))


def _emit_store_words(builder: ir.IRBuilder, address: ir.Value, even: ir.Value, odd: ir.Value) -> None:
    """Sixteen words of two bfloat16."""
    emit.store_pair(builder, Element.BFLOAT16, address, word(0), [even, odd])


_hide_below = function(f32x16, [f32x16, types.intp], _emit_hide_below)
_store_words = function(types.void, [types.intp, f32x16, f32x16], _emit_store_words)
_configure = function(types.void, [types.intp], amx.configure)
_release = function(types.void, [types.intp], lambda builder, _: amx.release(builder))
