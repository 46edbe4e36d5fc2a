"""Where a block's bytes lie in a rank's pool, and where in a tier's units: the runs that a copy is made of.

Arithmetic on PoolLayouts; touches no memory. In a tier a block's bytes are packed in the order of the pool and cut at
the borders of units, which lie anywhere.

    pool, one block    | layer 0 ....| other blocks |  layer 1 ...|              R runs a block
    tier               | unit 17 ........|  | unit 3 .........|                  cut where a unit ends
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from blockferry.connectors.base import Int32Array, Int64Array, PoolLayout
from blockferry.connectors.layout import strides
from blockferry.connectors.offload_base import TierShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyRuns:
    """Contiguous byte runs of a copy; all arrays [R]."""

    pool_offsets: Int64Array
    tier_offsets: Int64Array
    lengths: Int64Array

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.lengths.sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """The runs of one block; all arrays [R]."""

    pool_offsets: Int64Array  # of block 0
    block_strides: Int64Array
    unit: Int64Array  # which of the block's units
    unit_offsets: Int64Array
    lengths: Int64Array


class PageRuns:
    """The runs of any blocks of a rank's pool."""

    def __init__(self, layouts: Sequence[PoolLayout], shape: TierShape) -> None:
        """`layouts` of everything that is cached. Raises ValueError for units too small for a block."""
        self.shape = shape
        self._templates = [
            _template([layout for layout in layouts if layout.group == group], shape.unit_bytes)
            for group in range(len(shape.units_per_block))
        ]
        for group in range(len(shape.units_per_block)):
            shape.check_holds(group, self.page_bytes(group))

    def page_bytes(self, group: int) -> int:
        """Bytes of one block of a group on this rank."""
        return int(self._templates[group].lengths.sum())

    def of(self, group: int, block_ids: Int32Array, units: Int32Array) -> CopyRuns:
        """Runs of blocks [N] of a group that lie in units [N, units of a block] of the tier."""
        one = self._templates[group]
        pool_offsets = one.pool_offsets + block_ids.astype(np.int64)[:, None] * one.block_strides
        return CopyRuns(
            pool_offsets=pool_offsets.ravel(),
            tier_offsets=self.tier_offsets(group, units).ravel(),
            lengths=np.tile(one.lengths, len(block_ids)),
        )

    def tier_offsets(self, group: int, units: Int32Array) -> Int64Array:
        """Where the runs of blocks start that lie in units [N, units of a block]; shape [N, runs]."""
        one = self._templates[group]
        offsets: Int64Array = units.astype(np.int64)[:, one.unit] * self.shape.unit_bytes + one.unit_offsets
        return offsets

    def unit_lengths(self, group: int) -> list[int]:
        """Bytes of a block in each of its units."""
        full, page = self.shape.unit_bytes, self.page_bytes(group)
        return [max(0, min(full, page - number * full)) for number in range(self.shape.units_per_block[group])]


def _template(layouts: Sequence[PoolLayout], unit_bytes: int) -> _Template:
    pieces = [_pieces(layout) for layout in layouts]
    if not pieces:  # a pipeline stage without layers of the group
        empty = np.empty(0, np.int64)
        return _Template(pool_offsets=empty, block_strides=empty, unit=empty, unit_offsets=empty, lengths=empty)
    offsets, block_strides, lengths = (np.concatenate(one) for one in zip(*pieces, strict=True))
    order = np.argsort(offsets, kind="stable")
    offsets, block_strides, lengths = offsets[order], block_strides[order], lengths[order]
    is_start = np.ones(len(offsets), np.bool_)
    is_start[1:] = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (block_strides[1:] != block_strides[:-1])
    starts = np.flatnonzero(is_start)
    return _cut(offsets[starts], block_strides[starts], np.add.reduceat(lengths, starts), unit_bytes)


def _pieces(layout: PoolLayout) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Offset in block 0, block stride and length of every (layer, head, token) of a layout."""
    step = strides(layout)
    axes = (
        np.arange(len(layout.layer_ids), dtype=np.int64)[:, None, None] * step.layer,
        np.arange(layout.num_heads, dtype=np.int64)[:, None] * step.head,
        np.arange(layout.block_size, dtype=np.int64) * step.token,
    )
    offsets = (layout.offset + axes[0] + axes[1] + axes[2]).ravel()
    return offsets, np.full_like(offsets, step.block), np.full_like(offsets, layout.content_bytes)


def _cut(offsets: Int64Array, block_strides: Int64Array, lengths: Int64Array, unit_bytes: int) -> _Template:
    """Pack runs one after the other and cut them where a unit ends."""
    packed = np.cumsum(lengths) - lengths
    borders = np.arange(0, int(lengths.sum()), unit_bytes, dtype=np.int64)
    starts = np.union1d(packed, borders)
    owner = np.searchsorted(packed, starts, side="right") - 1
    return _Template(
        pool_offsets=offsets[owner] + starts - packed[owner],
        block_strides=block_strides[owner],
        unit=starts // unit_bytes,
        unit_offsets=starts % unit_bytes,
        lengths=np.diff(starts, append=lengths.sum()),
    )
