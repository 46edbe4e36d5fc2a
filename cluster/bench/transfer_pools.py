"""What the pools of `bench transfer` look like on both sides, and the bytes that must be in them.

Arithmetic and NumPy only: no transport, no process. Legend: L layers, H heads, T tokens, C bytes of one token of one
head, B blocks, N tokens of a block, U units of G tokens, each within one block on both sides.

A seed's content is one array [L, H, T, C], T in the order of the source's block ids. Every rank of either side can
make it and so fill its own share of a pool, or say what must have arrived there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from blockferry.connectors.base import ByteArray, ContentKind, Int32Array, PoolLayout, TransferPart
from blockferry.connectors.layout import intersect_runs, strides
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.instance_plan import InstanceRequest, plan_instance
from blockferry.engine.models.sharding import Span, split_evenly
from blockferry.engine.worker.pool_layouts import HeldHeads, pool_layouts

BLOCK_SIZE = 16
ORDERS = ("BHLNC", "BLHNC", "LBHNC", "LBNHC")
MODEL_DTYPE = "bfloat16"
MAX_BYTES = 4 << 30  # of one transfer
_CHECKED_BYTES = 4 << 20  # compared at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of every transfer."""

    tp_size: int = 1
    order: str = "BHLNC"
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 1 <= self.tp_size <= 64:
            raise ValueError(f"tp={self.tp_size} is outside 1 .. 64 ranks of a side; use fewer")
        if self.order not in ORDERS:
            raise ValueError(f"layout={self.order!r} is unknown; use {', '.join(ORDERS)}")
        if not 1 <= self.block_size <= 1024:
            raise ValueError(f"block_size={self.block_size} is outside 1 .. 1024 tokens; use one within")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much one transfer moves: so many bytes at most, or so many blocks of the source at least."""

    num_bytes: int = 0
    num_blocks: int = 0  # 0: num_bytes says

    def count_tokens(self, token_bytes: int, src: Side, dst: Side) -> int:
        """Tokens that are whole blocks on both sides. Raises ValueError when that is none, or too many."""
        step = math.lcm(src.block_size, dst.block_size)
        if self.num_blocks:
            num_tokens = -(-self.num_blocks * src.block_size // step) * step
        else:
            num_tokens = self.num_bytes // token_bytes // step * step
        if num_tokens <= 0:
            raise ValueError(
                f"size={self.num_bytes} bytes of a transfer is less than a block's {step * token_bytes}; use more"
            )
        if num_tokens * token_bytes > MAX_BYTES:
            raise ValueError(
                f"{num_tokens * token_bytes} bytes in one transfer exceed {MAX_BYTES}, which every end holds "
                "several times in memory; use less"
            )
        return num_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is ferried, whoever holds which part of it."""

    num_layers: int
    num_heads: int
    num_tokens: int
    content_bytes: int
    src_block_size: int
    dst_block_size: int

    @property
    def num_bytes(self) -> int:
        """Of one transfer."""
        return self.num_layers * self.num_heads * self.num_tokens * self.content_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Both sides' pools: one layout per rank."""

    grid: Grid
    src: tuple[PoolLayout, ...]
    dst: tuple[PoolLayout, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Block tables of one transfer: which blocks of the source go to which of the destination."""

    src: Int32Array
    dst: Int32Array

    def part(self, grid: Grid) -> TransferPart:
        """All tokens of them."""
        return TransferPart(
            src_group=0,
            dst_group=0,
            src_block_ids=self.src,
            dst_block_ids=self.dst,
            num_tokens=grid.num_tokens,
        )


def piece_shape(piece_bytes: int, amount: Amount, src: Side, dst: Side) -> Shape:
    """Pools whose every run is piece_bytes long: one layer, one head per rank of the side that has more ranks.

    Raises ValueError for a piece that is no whole number of bytes per token, or larger than the amount.
    """
    shorter = min(src.block_size, dst.block_size)
    if piece_bytes <= 0 or piece_bytes % shorter:
        raise ValueError(f"piece_bytes={piece_bytes} is not a positive multiple of {shorter}, the tokens of a block")
    num_heads, content_bytes = max(src.tp_size, dst.tp_size), piece_bytes // shorter
    grid = Grid(
        num_layers=1,
        num_heads=num_heads,
        num_tokens=amount.count_tokens(num_heads * content_bytes, src, dst),
        content_bytes=content_bytes,
        src_block_size=src.block_size,
        dst_block_size=dst.block_size,
    )

    def layouts(side: Side) -> tuple[PoolLayout, ...]:
        return tuple(
            PoolLayout(
                order=side.order,
                num_blocks=grid.num_tokens // side.block_size + 1,
                block_size=side.block_size,
                layer_ids=(0,),
                head_start=heads.start,
                num_heads=len(heads),
                content_bytes=content_bytes,
                dtype="uint8",
            )
            for heads in _heads_of(num_heads, side)
        )

    return Shape(grid=grid, src=layouts(src), dst=layouts(dst))


def model_shape(config: Mapping[str, Any], amount: Amount, src: Side, dst: Side) -> Shape:
    """Pools as workers of a model have them, in bfloat16, from its config.json. Raises ValueError.

    A model whose layers have caches of several kinds is refused: its blocks have no single size.
    """
    (whole,) = _planned(config, dataclasses.replace(src, tp_size=1), num_heads=0, num_blocks=64)
    num_layers, num_heads = len(whole.layer_ids), whole.num_heads
    if max(src.tp_size, dst.tp_size) > num_heads:
        raise ValueError(f"tp={src.tp_size}:{dst.tp_size} exceeds the model's {num_heads} KV heads; use fewer ranks")
    grid = Grid(
        num_layers=num_layers,
        num_heads=num_heads,
        num_tokens=amount.count_tokens(num_layers * num_heads * whole.content_bytes, src, dst),
        content_bytes=whole.content_bytes,
        src_block_size=src.block_size,
        dst_block_size=dst.block_size,
    )

    def layouts(side: Side) -> tuple[PoolLayout, ...]:
        return _planned(config, side, num_heads=num_heads, num_blocks=grid.num_tokens // side.block_size + 1)

    return Shape(grid=grid, src=layouts(src), dst=layouts(dst))


def page_bytes(layouts: tuple[PoolLayout, ...]) -> int:
    """Bytes of one block, on all ranks of a side together."""
    return sum(
        len(layout.layer_ids) * layout.num_heads * layout.block_size * layout.content_bytes for layout in layouts
    )


def choose_blocks(pattern: str, grid: Grid, *, seed: int) -> Blocks:
    """Every block of both pools but block 0, in order (contiguous) or shuffled (scattered)."""
    src = np.arange(1, grid.num_tokens // grid.src_block_size + 1, dtype=np.int32)
    dst = np.arange(1, grid.num_tokens // grid.dst_block_size + 1, dtype=np.int32)
    if pattern == "contiguous":
        return Blocks(src=src, dst=dst)
    draw = np.random.default_rng(seed)
    return Blocks(src=draw.permutation(src), dst=draw.permutation(dst))


def mean_run_bytes(shape: Shape, blocks: Blocks) -> float:
    """Mean length of the contiguous byte runs that a transfer is made of."""
    part = blocks.part(shape.grid)
    return shape.grid.num_bytes / sum(len(intersect_runs(src, dst, part)) for src in shape.src for dst in shape.dst)


class PoolContent:
    """One rank's pool, filled and checked by seeds. Owns nothing but the last seed's content."""

    def __init__(self, pool: ByteArray, layout: PoolLayout, grid: Grid) -> None:
        self._grid = grid
        self._pages: ByteArray = np.lib.stride_tricks.as_strided(  # [B, L, H, N, C]
            pool[layout.offset :],
            (layout.num_blocks, len(layout.layer_ids), layout.num_heads, layout.block_size, layout.content_bytes),
            (*strides(layout), 1),
        )
        first, end = layout.layer_ids[0], layout.layer_ids[-1] + 1
        assert layout.layer_ids == tuple(range(first, end)), layout.layer_ids
        self._share = (slice(first, end), slice(layout.head_start, layout.head_start + layout.num_heads))
        self._seed = 0
        self._content: ByteArray | None = None

    def fill(self, seed: int) -> None:
        """Put this rank's share of a seed's content into the blocks of a source."""
        self._pages[1:] = self._blocks_of(self._share_of(seed), self._grid.src_block_size)

    def is_right(self, seed: int, blocks: Blocks) -> bool:
        """Whether a destination's blocks hold exactly the seed's content as `blocks` says, and block 0 nothing."""
        if self._pages[0].any():
            return False
        grid = self._grid
        unit = math.gcd(grid.src_block_size, grid.dst_block_size)
        per_src = grid.src_block_size // unit
        units = ((blocks.src[:, None] - 1) * per_src + np.arange(per_src)).reshape(len(blocks.dst), -1)
        share = self._share_of(seed)
        share = share.reshape(*share.shape[:2], -1, unit, grid.content_bytes)  # [L, H, U, G, C]
        for few in self._few_blocks(len(blocks.dst)):
            wanted = share[:, :, units[few].ravel()]
            if not np.array_equal(self._pages[blocks.dst[few]], self._blocks_of(wanted, grid.dst_block_size)):
                return False
        return True

    def _few_blocks(self, num_blocks: int) -> Iterator[slice]:
        step = max(1, _CHECKED_BYTES // self._pages[0].size)
        for start in range(0, num_blocks, step):
            yield slice(start, start + step)

    def _blocks_of(self, tokens: ByteArray, block_size: int) -> ByteArray:
        """Consecutive tokens [L, H, ..., C] as blocks [B, L, H, N, C]."""
        num_layers, num_heads = tokens.shape[:2]
        blocks = tokens.reshape(num_layers, num_heads, -1, block_size, self._grid.content_bytes)
        return blocks.transpose(2, 0, 1, 3, 4)

    def _share_of(self, seed: int) -> ByteArray:
        """This rank's share [L, H, T, C] of a seed's content."""
        if self._content is None or self._seed != seed:
            grid = self._grid
            words = np.random.default_rng(seed).integers(0, 1 << 64, -(-grid.num_bytes // 8), dtype=np.uint64)
            shape = (grid.num_layers, grid.num_heads, grid.num_tokens, grid.content_bytes)
            self._seed, self._content = seed, words.view(np.uint8)[: grid.num_bytes].reshape(shape)
        return self._content[self._share]


def _heads_of(num_heads: int, side: Side) -> list[Span]:
    return [split_evenly(num_heads, rank, side.tp_size) for rank in range(side.tp_size)]


def _planned(config: Mapping[str, Any], side: Side, *, num_heads: int, num_blocks: int) -> tuple[PoolLayout, ...]:
    """The layout of each rank of a side, by the engine's own plan. Raises ValueError."""
    request = InstanceRequest(
        dtype=MODEL_DTYPE,
        max_model_len=side.block_size,
        max_in_flight_tokens=side.block_size,
        memory_bytes=0,
        num_blocks=num_blocks,
        block_size=side.block_size,
        layout=side.order,
        tp_size=side.tp_size,
    )
    try:
        (stage,) = plan_instance(config, request).stages
    except ConfigError as error:
        raise ValueError(f"the model's pool cannot be planned: {error}") from None
    ranks = [
        pool_layouts(
            stage,
            order=side.order,
            dtype=MODEL_DTYPE,
            kv_heads=HeldHeads(span=heads),
            tp_rank=tp_rank,
            tp_size=side.tp_size,
        )
        for tp_rank, heads in enumerate(_heads_of(num_heads, side))
    ]
    if any(len(layouts) != 1 or layouts[0].content is not ContentKind.KV for layouts in ranks):
        raise ValueError("the model's layers have caches of several kinds, or none of keys and values; use a dense one")
    return tuple(layouts[0] for layouts in ranks)
