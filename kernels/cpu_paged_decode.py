"""Paged decode attention on CPU: one query per row, straight from the pages, the step's keys and values included.

An item is one KV head of one row, with all of its query heads: it first writes the row's new key and value to
their slot and then attends, so nothing is computed differently when other rows join or threads change. Online
softmax over chunks of 64 tokens, all in float32 (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
Reading begins at the first token in the query's reach. A sink is where the running maximum and sum begin.

Legend: R rows, H query heads, K kv heads, G query heads per kv head, D head dim, B blocks, N block size, M blocks of a
row, S tokens of the longest row.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from blockferry.kernels.attention_terms import NO_LIMIT, AttentionTerms, attend_dense, first_keys, seen_keys
from blockferry.kernels.cpu_attention_tiles import make_score_tile, make_weigh_values
from blockferry.kernels.cpu_emit import FLOAT_BYTES, LANES, Element
from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, compile_kernel
from blockferry.kernels.cpu_layout import element_of, has_dense_heads
from blockferry.kernels.cpu_soft_cap import cap_scores
from blockferry.kernels.cpu_vector import (
    add,
    copy_bytes,
    exp,
    jit,
    keep_lanes,
    load_even_of,
    load_f32,
    load_i32,
    load_i64,
    load_odd_of,
    load_of,
    load_scalar,
    max_lanes,
    maximum,
    multiply,
    multiply_add,
    scratch,
    splat,
    store_f32,
    store_i64,
    store_of,
    store_pair_of,
    store_scalar,
    subtract,
    sum_lanes,
    sum_rows,
)

CHUNK = 64  # tokens between two looks at the maximum; a multiple of 16
_pack_floats, _unpack_word = struct.Struct("=ff").pack, struct.Struct("=q").unpack


class PagedDecode:
    """Writes and attends all decode rows of one layer in one call. Called by one thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kernels: dict[tuple[Element, int, int], CompiledKernel] = {}

    def accepts(self, q_RHD: torch.Tensor, k_RKD: torch.Tensor, v_RKD: torch.Tensor, kv_cache: torch.Tensor) -> bool:
        """Whether the kernel can do it; else decode_oracle can."""
        return (
            element_of(q_RHD) is not None
            and q_RHD.dtype == kv_cache.dtype
            and q_RHD.shape[2] % LANES == 0
            and has_dense_heads(q_RHD)
            and has_dense_heads(k_RKD)
            and has_dense_heads(v_RKD)
        )

    def prepare(self, element: Element, *, head_dim: int, group_size: int) -> CompiledKernel:
        """Compile or load the kernel of one shape of heads."""
        shape = (element, head_dim, group_size)
        if shape not in self._kernels:
            name = f"paged_decode-{element.value}-{head_dim}-{group_size}"
            self._kernels[shape] = self._launcher.store.get(name, lambda: compile_paged_decode(*shape))
        return self._kernels[shape]

    def __call__(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # [R, H, D], [R, K, D] twice
        kv_cache: torch.Tensor,  # [B, K, N, 2*D], last dim contiguous
        *,
        block_table_RM: torch.Tensor,  # int32, columns contiguous
        seq_lens_R: torch.Tensor,  # int32, the new token counted
        slot_mapping_R: torch.Tensor,  # int64, negative: write nothing
        rule: AttentionTerms,
        out_RHD: torch.Tensor,  # contiguous, written
    ) -> None:
        """Attend over each row's tokens in reach after storing the newest. Call only what `accepts` takes.

        Blocks before a row's reach are not read, nor are their entries in the block table.
        """
        num_rows, num_heads, head_dim = qkv[0].shape
        num_kv_heads = qkv[1].shape[1]
        element = Element.FLOAT32 if qkv[0].dtype == torch.float32 else Element.BFLOAT16
        kernel = self.prepare(element, head_dim=head_dim, group_size=num_heads // num_kv_heads)
        num_items = num_rows * num_kv_heads
        # a row's pages are far more than 100 KB unless there is next to nothing to do
        num_threads = torch.get_num_threads() if num_items > 1 else 1
        arguments = self.arguments(
            qkv,
            kv_cache,
            block_table_RM=block_table_RM,
            seq_lens_R=seq_lens_R,
            slot_mapping_R=slot_mapping_R,
            rule=rule,
            out_RHD=out_RHD,
        )
        self._launcher.run(kernel, num_threads, num_items, (num_threads, *arguments))

    def arguments(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        *,
        block_table_RM: torch.Tensor,
        seq_lens_R: torch.Tensor,
        slot_mapping_R: torch.Tensor,
        rule: AttentionTerms,
        out_RHD: torch.Tensor,
    ) -> tuple[int, ...]:
        """Of the kernel, after the number of threads; an item is a KV head of a row.

        The rule's sinks must outlive the arguments' use.
        """
        q_RHD, k_RKD, v_RKD = qkv
        num_bytes = q_RHD.element_size()
        stride_block, stride_head, stride_token, _ = kv_cache.stride()
        return (
            k_RKD.shape[1],
            kv_cache.shape[2],
            block_table_RM.stride(0),
            q_RHD.data_ptr(),
            k_RKD.data_ptr(),
            v_RKD.data_ptr(),
            out_RHD.data_ptr(),
            kv_cache.data_ptr(),
            q_RHD.stride(0) * num_bytes,
            k_RKD.stride(0) * num_bytes,
            v_RKD.stride(0) * num_bytes,
            stride_block * num_bytes,
            stride_head * num_bytes,
            stride_token * num_bytes,
            block_table_RM.data_ptr(),
            seq_lens_R.data_ptr(),
            slot_mapping_R.data_ptr(),
            *_unpack_word(_pack_floats(rule.scale, rule.soft_cap or 0.0)),
            (rule.window or NO_LIMIT) | (rule.chunk or NO_LIMIT) << 32,
            0 if rule.sinks_H is None else rule.sinks_H.data_ptr(),
        )


def decode_oracle(
    q_RHD: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    block_table_RM: torch.Tensor,
    seq_lens_R: torch.Tensor,
    rule: AttentionTerms,
) -> torch.Tensor:
    """[R, H, D] in plain torch, the new tokens already in their pages; every row is padded to the longest reach."""
    block_size = kv_cache.shape[2]
    last_R = seq_lens_R.long() - 1
    first_R = first_keys(rule, last_R) // block_size  # columns
    num_columns = int((last_R // block_size - first_R).max()) + 1
    columns_RM = first_R[:, None] + torch.arange(num_columns)
    in_use_RM = columns_RM * block_size <= last_R[:, None]
    blocks_RM = block_table_RM.gather(1, columns_RM.where(in_use_RM, 0)).where(in_use_RM, 0)
    kv_RKSC = kv_cache[blocks_RM].transpose(1, 2).flatten(2, 3)
    keys_RS = (columns_RM[..., None] * block_size + torch.arange(block_size)).flatten(1)
    return attend_dense(q_RHD[:, None], kv_RKSC, seen_keys(rule, last_R[:, None], keys_RS), rule)[:, 0]


def compile_paged_decode(element: Element, head_dim: int, group_size: int) -> Any:
    """The kernel for one shape of heads; head_dim is a multiple of 16. Arguments: see `attend`."""
    load, load_even, load_odd = load_of(element), load_even_of(element), load_odd_of(element)
    store, store_pair, num_bytes = store_of(element), store_pair_of(element), element.num_bytes
    paired = head_dim - head_dim % (2 * LANES)
    score_tile = make_score_tile(element, head_dim, group_size)
    weigh_values = make_weigh_values(element, head_dim, group_size, CHUNK)
    query_floats, head_bytes = group_size * head_dim, head_dim * num_bytes
    partial_floats, weight_floats, address_floats = group_size * LANES * LANES, group_size * CHUNK, 2 * CHUNK
    sum_floats = group_size * LANES
    no_score = np.float32(-np.inf)

    @jit
    def locate(addresses: int, table: int, base: int, start: int, seq_len: int, strides: Any) -> None:
        """Byte addresses of CHUNK tokens from `start`; beyond the row's end the last token again."""
        stride_block, stride_token, block_size = strides
        last = max(seq_len - 1, 0)
        position = min(start, last)
        column = position // block_size
        offset = position - column * block_size
        page = base + load_i32(table, column) * stride_block
        for lane in range(CHUNK):
            address = page + offset * stride_token
            store_i64(addresses, lane, address)
            if position < last:
                position += 1
                offset += 1
                if offset == block_size:
                    offset = 0
                    column += 1
                    page = base + load_i32(table, column) * stride_block

    @jit
    def first_read(limits: Any, seq_len: int) -> Any:
        """The first token in reach of a row's last."""
        window, stretch = limits
        return max(0, seq_len - window, (seq_len - 1) // stretch * stretch)

    @jit
    def score(weights: int, queries: int, tokens: Any, partial: int, num_valid: int, soft_cap: Any) -> None:
        """Scores of a chunk's tokens into weights [G, CHUNK], -inf beyond num_valid up to whole tiles."""
        addresses, upcoming = tokens
        for tile in range(0, num_valid, LANES):
            score_tile(queries, addresses + tile * 8, upcoming + tile * 8, partial)
            for head in range(group_size):
                scores = sum_rows(partial + head * LANES * LANES * FLOAT_BYTES)
                if soft_cap > 0:
                    scores = cap_scores(scores, soft_cap)
                store_f32(weights, head * CHUNK + tile, keep_lanes(scores, num_valid - tile, no_score))

    @jit
    def soften(weights: int, totals: int, maxima: int, sums: int, num_valid: int) -> None:
        """Scores to exponentials, totals and sums brought to the new maximum."""
        for head in range(group_size):
            row = weights + head * CHUNK * FLOAT_BYTES
            highest = load_f32(row, 0)
            for tile in range(LANES, num_valid, LANES):
                highest = maximum(highest, load_f32(row, tile))
            top = max(max_lanes(highest), load_scalar(maxima, head))
            factor = exp(splat(load_scalar(maxima, head) - top))
            store_scalar(maxima, head, top)
            total = splat(np.float32(0.0))
            for tile in range(0, num_valid, LANES):
                exponentials = exp(subtract(load_f32(row, tile), splat(top)))
                exponentials = keep_lanes(exponentials, num_valid - tile, np.float32(0.0))
                store_f32(row, tile, exponentials)
                total = add(total, exponentials)
            # sums keeps 16 partial sums a head
            store_f32(sums, head * LANES, multiply_add(load_f32(sums, head * LANES), factor, total))
            for index in range(head * head_dim, (head + 1) * head_dim, LANES):
                store_f32(totals, index, multiply(load_f32(totals, index), factor))

    def attend(arguments: int, index: int) -> None:
        num_items, num_threads = load_i64(arguments, 1), load_i64(arguments, 2)
        num_kv_heads, block_size, table_stride = (
            load_i64(arguments, 3),
            load_i64(arguments, 4),
            load_i64(arguments, 5),  # elements
        )
        q, k, v, out, cache = (
            load_i64(arguments, 6),  # [R, H, D], heads contiguous
            load_i64(arguments, 7),  # [R, K, D], heads contiguous
            load_i64(arguments, 8),
            load_i64(arguments, 9),  # [R, H, D] contiguous
            load_i64(arguments, 10),  # [B, K, N, 2*D]
        )
        q_stride, k_stride, v_stride = (  # bytes from row to row
            load_i64(arguments, 11),
            load_i64(arguments, 12),
            load_i64(arguments, 13),
        )
        stride_block, stride_head, stride_token = (  # bytes
            load_i64(arguments, 14),
            load_i64(arguments, 15),
            load_i64(arguments, 16),
        )
        table, seq_lens, slots = load_i64(arguments, 17), load_i64(arguments, 18), load_i64(arguments, 19)
        scale, soft_cap = splat(load_scalar(arguments, 2 * 20)), load_scalar(arguments, 2 * 20 + 1)  # 0: no cap
        limits = (load_i32(arguments, 2 * 21), load_i32(arguments, 2 * 21 + 1))  # window, chunk
        sinks = load_i64(arguments, 22)  # float32 [H], 0: none

        row = index // num_kv_heads
        kv_head = index - row * num_kv_heads
        base = cache + kv_head * stride_head
        slot = load_i64(slots, row)
        if slot >= 0:
            block = slot // block_size
            target = base + block * stride_block + (slot - block * block_size) * stride_token
            copy_bytes(target, k + row * k_stride + kv_head * head_bytes, head_bytes)
            copy_bytes(target + head_bytes, v + row * v_stride + kv_head * head_bytes, head_bytes)

        queries, totals, weights = scratch(query_floats), scratch(query_floats), scratch(weight_floats)
        partial, maxima, sums = scratch(partial_floats), scratch(group_size), scratch(sum_floats)
        addresses, upcoming = scratch(address_floats), scratch(address_floats)
        source = q + row * q_stride + kv_head * group_size * head_bytes
        for position in range(0, query_floats, LANES):
            store_f32(totals, position, splat(np.float32(0.0)))
        for head in range(group_size):
            first = head * head_dim
            for position in range(first, first + paired, 2 * LANES):
                store_f32(queries, position, multiply(load_even(source, position), scale))
                store_f32(queries, position + LANES, multiply(load_odd(source, position), scale))
            for position in range(first + paired, first + head_dim, LANES):
                store_f32(queries, position, multiply(load(source, position), scale))
            if sinks != 0:  # a token whose exponential is 1 at the first maximum, in one of the partial sums
                store_scalar(maxima, head, load_scalar(sinks, kv_head * group_size + head))
                store_f32(sums, head * LANES, keep_lanes(splat(np.float32(1.0)), 1, np.float32(0.0)))
            else:
                store_scalar(maxima, head, no_score)
                store_f32(sums, head * LANES, splat(np.float32(0.0)))

        row_table = table + row * table_stride * 4
        seq_len = load_i32(seq_lens, row)
        strides = (stride_block, stride_token, block_size)
        first_token = first_read(limits, seq_len)
        locate(addresses, row_table, base, first_token, seq_len, strides)
        for start in range(first_token, seq_len, CHUNK):
            if start + CHUNK < seq_len:
                locate(upcoming, row_table, base, start + CHUNK, seq_len, strides)
            else:  # most likely what this thread takes next
                guess = min(index + num_threads, num_items - 1)
                guess_row = guess // num_kv_heads
                guess_table = table + guess_row * table_stride * 4
                guess_base = cache + (guess - guess_row * num_kv_heads) * stride_head
                guess_len = load_i32(seq_lens, guess_row)
                locate(upcoming, guess_table, guess_base, first_read(limits, guess_len), guess_len, strides)
            num_valid = min(CHUNK, seq_len - start)
            score(weights, queries, (addresses, upcoming), partial, num_valid, soft_cap)
            soften(weights, totals, maxima, sums, num_valid)
            weigh_values(totals, addresses, upcoming, weights, num_valid)
            addresses, upcoming = upcoming, addresses

        target = out + index * group_size * head_bytes
        for head in range(group_size):
            inverse = splat(np.float32(1.0) / sum_lanes(load_f32(sums, head * LANES)))
            first = head * head_dim
            for position in range(first, first + paired, 2 * LANES):
                even = multiply(load_f32(totals, position), inverse)
                store_pair(target, position, even, multiply(load_f32(totals, position + LANES), inverse))
            for position in range(first + paired, first + head_dim, LANES):
                store(target, position, multiply(load_f32(totals, position), inverse))

    return compile_kernel(attend)
