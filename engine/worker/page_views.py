"""A rank's pool as its kernels see it: strided views of every layer's pages, for plans of any planner. Copies nothing.

Owns the views, never the memory. Where pages lie is the plan's; here addresses become tensors.

    content   view of one layer            innermost axes in memory, by layout
    KV        [B, K, N, C]                 BLHNC, LBHNC: K N C    LBNHC: N K C    BHLNC: K, then layers, N C
    latent    [B, N, R]                    N R
    state     [B, *shape] of each tensor   one tensor after the other
    ring      [B, bytes]                   bytes

Legend: B blocks of the group, block 0 its null block; K KV heads of this rank; N tokens of a block; C key and value of
one head of one token; R latent vector of one token, of bytes where a record mixes types.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.engine.kv.plan import KVCachePlan, PageRegion
from blockferry.engine.kv.plan_layout import is_block_outermost
from blockferry.engine.kv.reach import KVContent, LatentContent
from blockferry.engine.kv.spec import AttentionSpec, MambaSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageDTypes:
    """Element types of what pages hold; their sizes are the specs'."""

    kv: torch.dtype  # keys, values and latents
    states: tuple[torch.dtype, ...] = ()  # per tensor of a recurrent layer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockOps:
    """How a device moves whole blocks; pages are uint8 [B, bytes] with any row stride, ids int64."""

    copy: Callable[[torch.Tensor, torch.Tensor], None]  # (pages, pairs [n, 2] of (source, destination))
    zero: Callable[[torch.Tensor, torch.Tensor], None]  # (pages, block ids [n])


def _copy_rows(pages: torch.Tensor, pairs: torch.Tensor) -> None:
    pages[pairs[:, 1]] = pages[pairs[:, 0]]


def _zero_rows(pages: torch.Tensor, block_ids: torch.Tensor) -> None:
    pages[block_ids] = 0


TORCH_BLOCKS = BlockOps(copy=_copy_rows, zero=_zero_rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """A view within one layer's pages: its shape without B, byte strides, and the byte where it starts."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0


class PageViews:
    """Views of all layers that a plan puts on this rank."""

    def __init__(
        self,
        plan: KVCachePlan,
        memory: torch.Tensor,
        *,
        layout: str,
        dtypes: PageDTypes,
        num_kv_heads: int | None = None,
        block_ops: BlockOps = TORCH_BLOCKS,
    ) -> None:
        """`memory` is uint8, one-dimensional, of at least plan.pool_bytes, on any device; `layout` is the plan's.

        num_kv_heads: of this rank, where the plan is for one that has more.

        Raises ValueError for memory that is too small, element types of other sizes than the specs', and pages at
        addresses that their elements cannot have.
        """
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() < plan.pool_bytes:
            raise ValueError(
                f"pool memory is {memory.dtype} of shape {tuple(memory.shape)}; "
                f"the plan needs {plan.pool_bytes} bytes of uint8 in one dimension"
            )
        self._block_ops = block_ops
        self._device = memory.device
        self.layers: dict[int, tuple[torch.Tensor, ...]] = {}  # layer id -> its tensors
        self._rows: list[list[torch.Tensor]] = [[] for _ in plan.groups]  # uint8 [B, bytes]: all of a block, in runs
        for region in plan.regions:
            num_blocks = 1 + plan.slab.num_pages(region.group) if plan.slab else plan.num_blocks
            axes = [_narrow(one, region, num_kv_heads) for one in _axes_of(region, layout, dtypes)]
            for index, layer_id in enumerate(region.layer_ids):
                offset = region.offset + index * region.layer_stride
                self.layers[layer_id] = tuple(_view(memory, region, offset, num_blocks, one) for one in axes)
            self._rows[region.group] += _rows_of(memory, region, num_blocks, layout)

    def copy_blocks(self, group: int, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks of a group; pairs is [n, 2] of (source, destination), no destination being a source."""
        if len(pairs):
            pairs_n2 = torch.from_numpy(pairs.astype(np.int64)).to(self._device)
            for rows in self._rows[group]:
                self._block_ops.copy(rows, pairs_n2)

    def zero_blocks(self, group: int, block_ids: NDArray[np.int32]) -> None:
        """Clear whole blocks of a group."""
        if len(block_ids):
            block_ids_n = torch.from_numpy(block_ids.astype(np.int64)).to(self._device)
            for rows in self._rows[group]:
                self._block_ops.zero(rows, block_ids_n)


def _axes_of(region: PageRegion, layout: str, dtypes: PageDTypes) -> Iterator[_Axes]:
    """What one layer's page holds, one entry per tensor."""
    spec = region.spec
    match spec:
        case AttentionSpec(content=KVContent() as content):
            yield _kv_axes(content, region, layout, dtypes.kv)
        case AttentionSpec(content=LatentContent() as content):
            is_record = content.is_fp8_ds_mla or content.dtype_bytes != dtypes.kv.itemsize
            dtype = torch.uint8 if is_record else dtypes.kv
            width = content.token_bytes // dtype.itemsize
            yield _Axes(shape=(spec.block_size, width), strides=(content.token_bytes, dtype.itemsize), dtype=dtype)
        case MambaSpec():
            yield from _state_axes(spec, dtypes.states)
        case _:
            yield _Axes(shape=(spec.page_size_bytes,), strides=(1,), dtype=torch.uint8)


def _narrow(axes: _Axes, region: PageRegion, num_kv_heads: int | None) -> _Axes:
    """The leading KV heads of a view of keys and values; other views are whole on every rank."""
    spec = region.spec
    if num_kv_heads is None or not isinstance(spec, AttentionSpec) or not isinstance(spec.content, KVContent):
        return axes
    return dataclasses.replace(axes, shape=(num_kv_heads, *axes.shape[1:]))


def _kv_axes(content: KVContent, region: PageRegion, layout: str, dtype: torch.dtype) -> _Axes:
    num_tokens = region.spec.block_size
    token_bytes, head_bytes = content.head_bytes, num_tokens * content.head_bytes
    if layout == "LBNHC":
        token_bytes, head_bytes = content.token_bytes, content.head_bytes
    elif layout == "BHLNC":
        head_bytes = len(region.layer_ids) * region.layer_stride
    _check_size(dtype, content.dtype_bytes)
    return _Axes(
        shape=(content.num_kv_heads, num_tokens, content.head_bytes // dtype.itemsize),
        strides=(head_bytes, token_bytes, dtype.itemsize),
        dtype=dtype,
    )


def _state_axes(spec: MambaSpec, dtypes: Sequence[torch.dtype]) -> Iterator[_Axes]:
    if len(dtypes) < len(spec.shapes):
        raise ValueError(f"{len(dtypes)} element types for {len(spec.shapes)} state tensors; name one for each")
    start = 0
    for shape, dtype, num_bytes in zip(spec.shapes, dtypes, spec.dtype_bytes):
        _check_size(dtype, num_bytes)
        strides = tuple(math.prod(shape[axis + 1 :]) * num_bytes for axis in range(len(shape)))
        yield _Axes(shape=shape, strides=strides, dtype=dtype, start=start)
        start += math.prod(shape) * num_bytes


def _view(memory: torch.Tensor, region: PageRegion, offset: int, num_blocks: int, axes: _Axes) -> torch.Tensor:
    """One tensor of one layer, [B, ...]."""
    itemsize = axes.dtype.itemsize
    places = (memory.data_ptr() + offset + axes.start, region.block_stride, *axes.strides)
    if any(place % itemsize for place in places):
        raise ValueError(
            f"layers {region.layer_ids} of group {region.group}: pages at byte {offset + axes.start}, "
            f"{region.block_stride} apart, cannot hold {axes.dtype} of {itemsize} bytes; use state shapes or a block "
            f"size that make pages a multiple of {itemsize} bytes"
        )
    elements = memory[: memory.numel() // itemsize * itemsize].view(axes.dtype)
    strides = [place // itemsize for place in places[1:]]
    start = elements.storage_offset() + (offset + axes.start) // itemsize
    return elements.as_strided((num_blocks, *axes.shape), strides, start)


def _rows_of(memory: torch.Tensor, region: PageRegion, num_blocks: int, layout: str) -> Iterator[torch.Tensor]:
    """Bytes of whole pages, [B, bytes]: of all layers of a region where they lie in a row, else of each layer."""
    page_bytes = region.spec.page_size_bytes
    num_layers = len(region.layer_ids)
    runs = [(0, page_bytes * num_layers)]
    if not is_block_outermost(layout):
        runs = [(index * region.layer_stride, page_bytes) for index in range(num_layers)]
    for start, num_bytes in runs:
        offset = memory.storage_offset() + region.offset + start
        yield memory.as_strided((num_blocks, num_bytes), (region.block_stride, 1), offset)


def _check_size(dtype: torch.dtype, num_bytes: int) -> None:
    if dtype.itemsize != num_bytes:
        raise ValueError(f"{dtype} has {dtype.itemsize} bytes, the plan was made for {num_bytes}; plan with its size")
