"""Attention over caches in fp8 on the CPU: blocks in reach are converted, then any backend attends to them.

    k, v --quantise--> pages      pages in reach --dequantise--> blocks of the model's dtype --> the inner backend

A step's own keys are written first and read back like all others, so that chunks of any size see the same values.
What is converted at a time is bounded: rows are taken in parts, which changes no result, as none depends on its batch.

Legend: T tokens of the step, R rows, H query heads, K kv heads, D head dim, C what a page stores of a token and head, B
blocks, N block size, M blocks of the longest row; latent names as in LatentBackend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from blockferry.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionRule, LatentBackend
from blockferry.engine.request import Int32Array
from blockferry.kernels.attention_terms import first_in_reach
from blockferry.kernels.fp8 import CacheScales, dequantise, dequantise_kv, quantise

MAX_PART_BYTES = 32 << 20  # of one layer's converted blocks; a single row may take more
MAX_REMEMBERED = 16  # views of steps: one per reach and cache group is in use


class ScaledAttention(AttentionBackend):
    """Wraps a backend on host memory. Every rule must carry scales. Called by the worker's model thread only."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self._gathers = _Gathers()

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Returns [T, H, D]; see AttentionBackend. Tokens past num_tokens come back undefined."""
        scales, slots_T = _scales_of(rule), metadata.slot_mapping_T
        k8_TKD, v8_TKD = quantise(k_TKD, scales.k_K), quantise(v_TKD, scales.v_K)
        write_slots(torch.cat((k8_TKD, v8_TKD), dim=-1), kv_cache, slots_T)
        k_TKD, v_TKD = (
            dequantise(x8, scale, q_THD.dtype) for x8, scale in ((k8_TKD, scales.k_K), (v8_TKD, scales.v_K))
        )
        rule = dataclasses.replace(rule, scales=None)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        for part in self._gathers.of(metadata, rule, kv_cache):
            out_THD[part.tokens] = self._inner.forward(
                q_THD[part.tokens],
                k_TKD[part.tokens],
                v_TKD[part.tokens],
                kv_cache=dequantise_kv(_gather(kv_cache, part.blocks_B), scales, q_THD.dtype),
                metadata=part.metadata,
                rule=rule,
            )
        return out_THD


class ScaledLatentAttention(LatentBackend):
    """The same for latents, which have one scale."""

    def __init__(self, inner: LatentBackend) -> None:
        self._inner = inner
        self._gathers = _Gathers()

    def forward(
        self,
        q_THR: torch.Tensor,
        latent_TR: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        rule: AttentionRule,
        value_dim: int,
    ) -> torch.Tensor:
        """Returns [T, H, value_dim]; see LatentBackend. Tokens past num_tokens come back undefined."""
        scale_1, dtype = _scales_of(rule).k_K, q_THR.dtype
        latent8_T1R = quantise(latent_TR[:, None], scale_1)
        write_slots(latent8_T1R, kv_cache[:, None], metadata.slot_mapping_T)
        latent_TR = dequantise(latent8_T1R, scale_1, dtype)[:, 0]
        rule = dataclasses.replace(rule, scales=None)
        out_THV = torch.empty((*q_THR.shape[:2], value_dim), dtype=dtype)
        for part in self._gathers.of(metadata, rule, kv_cache[:, None]):
            out_THV[part.tokens] = self._inner.forward(
                q_THR[part.tokens],
                latent_TR[part.tokens],
                kv_cache=dequantise(_gather(kv_cache, part.blocks_B), scale_1, dtype),
                metadata=part.metadata,
                rule=rule,
                value_dim=value_dim,
            )
        return out_THV


def write_slots(x8_TKC: torch.Tensor, kv_cache: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store quantised tokens in pages [B, K, N, C]; negative slots, and tokens past them, are padding."""
    block_size = kv_cache.shape[2]
    kept_T = slots_T >= 0
    slots = slots_T[kept_T]
    # as bytes: torch has few operations on fp8
    kept = x8_TKC.view(torch.uint8)[: len(slots_T)][kept_T]
    kv_cache.view(torch.uint8)[slots // block_size, :, slots % block_size] = kept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Some rows of a step over a copy of the blocks in their reach, which are numbered by their place in it."""

    tokens: slice
    blocks_B: torch.Tensor  # int64
    metadata: AttentionMetadata


class _Gathers:
    """The parts of the last steps, which layers of one reach share."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int | None, int | None, int], _Known] = {}

    def of(self, metadata: AttentionMetadata, rule: AttentionRule, kv_cache: torch.Tensor) -> Sequence[_Part]:
        """Parts of a step; kv_cache is [B, K, N, C]."""
        _, num_heads, block_size, width = kv_cache.shape
        block_bytes = num_heads * block_size * width * torch.float32.itemsize
        key = (id(metadata), rule.window, rule.chunk, block_bytes)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            reaches = _block_spans(metadata, rule, block_size)
            limit = max(1, MAX_PART_BYTES // block_bytes)
            parts = [_part_of(metadata, reaches, rows, block_size) for rows in _row_spans(reaches, limit)]
            known = self._known[key] = _Known(metadata=metadata, parts=parts)
        return known.parts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    metadata: AttentionMetadata  # kept, so that its id stays its own
    parts: Sequence[_Part]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BlockSpans:
    """Columns of the block table that each row reads: first up to stop."""

    first_R: Int32Array
    stop_R: Int32Array


def _block_spans(metadata: AttentionMetadata, rule: AttentionRule, block_size: int) -> _BlockSpans:
    first = [
        first_in_reach(rule, seq_len - query_len) // block_size
        for query_len, seq_len in zip(metadata.query_lens, metadata.seq_lens)
    ]
    stop = [-(-seq_len // block_size) for seq_len in metadata.seq_lens]
    return _BlockSpans(first_R=np.array(first, np.int32), stop_R=np.array(stop, np.int32))


def _row_spans(reaches: _BlockSpans, max_blocks: int) -> Iterator[slice]:
    """Runs of rows that read at most max_blocks together, or are one row."""
    start, num_blocks = 0, 0
    counts = (reaches.stop_R - reaches.first_R).tolist()
    for row, count in enumerate(counts):
        if row > start and num_blocks + count > max_blocks:
            yield slice(start, row)
            start, num_blocks = row, 0
        num_blocks += count
    yield slice(start, len(counts))


def _part_of(metadata: AttentionMetadata, reaches: _BlockSpans, rows: slice, block_size: int) -> _Part:
    first_R, stop_R = reaches.first_R[rows], reaches.stop_R[rows]
    counts_R = stop_R - first_R
    num_blocks = int(counts_R.sum())
    rows_B = np.repeat(np.arange(len(counts_R)), counts_R)
    columns_B = np.arange(num_blocks) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R) + first_R[rows_B]
    table_RM = np.zeros((len(counts_R), int(stop_R.max(initial=1))), np.int32)
    table_RM[rows_B, columns_B] = np.arange(num_blocks)
    query_lens, seq_lens = metadata.query_lens[rows], metadata.seq_lens[rows]
    query_start_R1 = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    first_token = sum(metadata.query_lens[: rows.start])
    tokens = slice(first_token, first_token + int(query_start_R1[-1]))
    rows_T = np.repeat(np.arange(len(query_lens)), query_lens)
    positions_T = np.arange(len(rows_T)) + (np.array(seq_lens) - query_start_R1[1:])[rows_T]
    slots_T = table_RM[rows_T, positions_T // block_size].astype(np.int64) * block_size + positions_T % block_size
    slots_T[metadata.slot_mapping_T[tokens].numpy() < 0] = -1
    return _Part(
        tokens=tokens,
        blocks_B=metadata.block_table_RM.long()[rows][torch.from_numpy(rows_B), torch.from_numpy(columns_B)],
        metadata=AttentionMetadata(
            num_rows=len(seq_lens),
            num_decode_rows=max(0, min(metadata.num_decode_rows, rows.stop) - rows.start),
            num_tokens=len(rows_T),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            query_start_R1=torch.from_numpy(query_start_R1),
            seq_lens_R=torch.from_numpy(np.array(seq_lens, np.int32)),
            block_table_RM=torch.from_numpy(table_RM),
            slot_mapping_T=torch.from_numpy(slots_T),
            query_lens=query_lens,
            seq_lens=seq_lens,
        ),
    )


def _gather(kv_cache: torch.Tensor, blocks_B: torch.Tensor) -> torch.Tensor:
    """Copies of whole blocks, [len(blocks), ...] in fp8."""
    return kv_cache.view(torch.uint8)[blocks_B].view(kv_cache.dtype)


def _scales_of(rule: AttentionRule) -> CacheScales:
    assert rule.scales is not None, "a layer in fp8 without scales"
    return rule.scales
