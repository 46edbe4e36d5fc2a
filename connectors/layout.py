"""Byte runs between two pools: the one function that says which bytes go where in every transfer.

Pure arithmetic on PoolLayouts; touches no memory and knows no transport. Legend: R runs, S token segments.

A part of a transfer is the intersection of two boxes (tokens x layers x heads). Tokens are cut into segments that
lie in one block on both sides; within a segment both pools are strided arrays over the axes (layer, head, token)
with C bytes innermost:

    src  base_s + layer * src_stride + head * src_stride + token * src_stride + [0, C)
    dst  base_d + layer * dst_stride + head * dst_stride + token * dst_stride + [0, C)

Axes whose stride equals the run built so far on both sides are folded into the run, innermost first; what is
left is expanded. Runs that continue each other on both sides are merged at the end, which joins heads, layers
and consecutive block ids wherever both layouts allow it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import numpy as np

from blockferry.connectors.base import Int32Array, Int64Array, PoolLayout, Strides, TransferPart

AXES = frozenset("BLHN")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Contiguous byte runs in both pools, ordered by source offset. Offsets are relative to the pool's start."""

    src_offsets: Int64Array  # [R]
    dst_offsets: Int64Array  # [R]
    lengths: Int64Array  # [R], bytes, each > 0

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.lengths.sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One axis of the intersection: the offset of each of its elements on both sides."""

    src: Int64Array
    dst: Int64Array

    def continues(self, run_bytes: int) -> bool:
        """Whether its elements follow each other directly when each is `run_bytes` long, on both sides."""
        return bool((np.diff(self.src) == run_bytes).all() and (np.diff(self.dst) == run_bytes).all())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side of a transfer: its pool and the blocks that hold the tokens, from first_token on."""

    layout: PoolLayout
    strides: Strides
    block_ids: Int32Array
    first_token: int

    def borders(self, num_tokens: int) -> Int64Array:
        """Tokens of the transfer at which a block starts, and the first one."""
        block_size = self.layout.block_size
        borders = np.arange(-(self.first_token % block_size), num_tokens, block_size, dtype=np.int64)
        return np.maximum(borders, 0)

    def offsets(self, tokens: Int64Array) -> Int64Array:
        """Byte offsets of tokens of the transfer, at layer slot 0 and head 0."""
        column, within = np.divmod(tokens + self.first_token, self.layout.block_size)
        bases: Int64Array = self.block_ids[column].astype(np.int64) * self.strides.block
        bases += within * self.strides.token + self.layout.offset
        return bases


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    """Token ranges that lie within one block on both sides, at least one, in token order."""

    src_bases: Int64Array  # [S] byte offset of the first token at layer slot 0, head 0
    dst_bases: Int64Array  # [S]
    num_tokens: Int64Array  # [S]


def strides(layout: PoolLayout) -> Strides:
    """Strides of a pool. Raises ValueError for an order that is not B, L, H, N in some order and then C."""
    if layout.strides is not None:
        return layout.strides
    if len(layout.order) != 5 or layout.order[-1] != "C" or frozenset(layout.order[:-1]) != AXES:
        raise ValueError(
            f"layout order {layout.order!r} is not B, L, H and N in some order followed by C; "
            "use BHLNC, BLHNC, LBHNC or LBNHC"
        )
    sizes = {"B": layout.num_blocks, "L": len(layout.layer_ids), "H": layout.num_heads, "N": layout.block_size}
    step = layout.content_bytes
    steps = {}
    for axis in reversed(layout.order[:-1]):
        steps[axis] = step
        step *= sizes[axis]
    return Strides(block=steps["B"], layer=steps["L"], head=steps["H"], token=steps["N"])


def overlaps(one: PoolLayout, other: PoolLayout) -> bool:
    """Whether two pools store any common layer, field and head."""
    has_heads = one.field == other.field and _first_head(one, other) < _end_head(one, other)
    return has_heads and not set(one.layer_ids).isdisjoint(other.layer_ids)


def intersect_runs(
    src: PoolLayout, dst: PoolLayout, part: TransferPart, *, layer_ids: Container[int] | None = None
) -> Runs:
    """Runs that copy a part's tokens, of every layer and head that both pools store, from src to dst.

    `layer_ids`: only those of them. Costs O(R log R).
    Raises ValueError when the block ids do not hold the tokens or lie outside a pool.
    """
    num_tokens = part.num_tokens
    _check_blocks("source", src, part.src_block_ids, part.first_token + num_tokens)
    _check_blocks("destination", dst, part.dst_block_ids, part.dst_first_token + num_tokens)
    if num_tokens <= 0 or not overlaps(src, dst):
        return merge_runs([])
    source = _Side(layout=src, strides=strides(src), block_ids=part.src_block_ids, first_token=part.first_token)
    target = _Side(layout=dst, strides=strides(dst), block_ids=part.dst_block_ids, first_token=part.dst_first_token)
    layers, heads = _layer_axis(source, target, layer_ids), _head_axis(source, target)
    if not len(layers.src):
        return merge_runs([])
    segments = _segments(source, target, num_tokens)
    parts = []
    for length in sorted(set(segments.num_tokens.tolist())):  # whole blocks and at most a few odd ends
        index = np.arange(length, dtype=np.int64)
        tokens = _Axis(src=index * source.strides.token, dst=index * target.strides.token)
        is_length = segments.num_tokens == length
        blocks = _Axis(src=segments.src_bases[is_length], dst=segments.dst_bases[is_length])
        parts.append(_expand([tokens, heads, layers], blocks, dst.content_bytes))
    return merge_runs(parts)


def merge_runs(parts: Sequence[Runs]) -> Runs:
    """All runs of parts, ordered by source offset; those that continue each other on both sides are joined."""
    if not parts:
        empty = np.empty(0, np.int64)
        return Runs(src_offsets=empty, dst_offsets=empty, lengths=empty)
    src = np.concatenate([part.src_offsets for part in parts])
    dst = np.concatenate([part.dst_offsets for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    order = np.argsort(src)
    src, dst, lengths = src[order], dst[order], lengths[order]
    is_start = np.ones(len(src), np.bool_)
    is_start[1:] = (src[1:] != src[:-1] + lengths[:-1]) | (dst[1:] != dst[:-1] + lengths[:-1])
    starts = np.flatnonzero(is_start)
    return Runs(src_offsets=src[starts], dst_offsets=dst[starts], lengths=np.add.reduceat(lengths, starts))


def split_runs(runs: Runs, max_bytes: int) -> Runs:
    """The same bytes in runs of at most max_bytes, so that a long run can be posted bit by bit."""
    if not len(runs) or int(runs.lengths.max()) <= max_bytes:
        return runs
    pieces = -(-runs.lengths // max_bytes)
    owner = np.repeat(np.arange(len(runs)), pieces)
    first = np.cumsum(pieces) - pieces
    shift = (np.arange(len(owner)) - first[owner]) * max_bytes
    return Runs(
        src_offsets=runs.src_offsets[owner] + shift,
        dst_offsets=runs.dst_offsets[owner] + shift,
        lengths=np.minimum(runs.lengths[owner] - shift, max_bytes),
    )


def _check_blocks(side: str, layout: PoolLayout, block_ids: Int32Array, num_tokens: int) -> None:
    capacity = len(block_ids) * layout.block_size
    if num_tokens > capacity:
        raise ValueError(
            f"{num_tokens} tokens do not fit the {len(block_ids)} {side} blocks of {layout.block_size} tokens; "
            "pass every block of the transfer"
        )
    if len(block_ids) and (int(block_ids.min()) < 0 or int(block_ids.max()) >= layout.num_blocks):
        raise ValueError(f"{side} block ids must lie in [0, {layout.num_blocks}), got {block_ids.tolist()}")


def _first_head(one: PoolLayout, other: PoolLayout) -> int:
    return max(one.head_start, other.head_start)


def _end_head(one: PoolLayout, other: PoolLayout) -> int:
    return min(one.head_start + one.num_heads, other.head_start + other.num_heads)


def _layer_axis(source: _Side, target: _Side, layer_ids: Container[int] | None) -> _Axis:
    slot_of = {
        layer_id: slot
        for slot, layer_id in enumerate(source.layout.layer_ids)
        if layer_ids is None or layer_id in layer_ids
    }
    target_ids = target.layout.layer_ids
    pairs = [(slot_of[layer_id], slot) for slot, layer_id in enumerate(target_ids) if layer_id in slot_of]
    slots = np.array(pairs, np.int64).reshape(-1, 2)
    return _Axis(src=slots[:, 0] * source.strides.layer, dst=slots[:, 1] * target.strides.layer)


def _head_axis(source: _Side, target: _Side) -> _Axis:
    src, dst = source.layout, target.layout
    heads = np.arange(_first_head(src, dst), _end_head(src, dst), dtype=np.int64)
    return _Axis(src=(heads - src.head_start) * source.strides.head, dst=(heads - dst.head_start) * target.strides.head)


def _segments(source: _Side, target: _Side, num_tokens: int) -> _Segments:
    """Cut the tokens at every block border of either side."""
    starts, others = source.borders(num_tokens), target.borders(num_tokens)
    if not np.array_equal(starts, others):
        starts = np.union1d(starts, others)
    return _Segments(
        src_bases=source.offsets(starts),
        dst_bases=target.offsets(starts),
        num_tokens=np.diff(starts, append=num_tokens),
    )


def _expand(axes: list[_Axis], blocks: _Axis, content_bytes: int) -> Runs:
    """Fold what is contiguous on both sides into the run; expand the other axes and the blocks."""
    run_bytes = content_bytes
    src_offsets, dst_offsets = blocks.src, blocks.dst
    while folded := next((axis for axis in axes if axis.continues(run_bytes)), None):
        axes = [axis for axis in axes if axis is not folded]
        run_bytes *= len(folded.src)
        src_offsets, dst_offsets = src_offsets + folded.src[0], dst_offsets + folded.dst[0]
    for axis in axes:
        src_offsets = (src_offsets[:, None] + axis.src).ravel()
        dst_offsets = (dst_offsets[:, None] + axis.dst).ravel()
    lengths = np.full(len(src_offsets), run_bytes, np.int64)
    return Runs(src_offsets=src_offsets, dst_offsets=dst_offsets, lengths=lengths)
