"""The pool of KV pages on one rank: one run of bytes, seen as pages in any of four axis orders.

Owns the tensor views, never the memory: whoever calls allocate() keeps it alive and may register it with a
transport.

    axes   B block, L layer, H KV head, N token of the block, C content: K then V of one head of one token
    BHLNC  | block 0: | head 0: | layer 0: N x C | layer 1 | ... | head 1 ... | | block 1 ...     (default)
    BLHNC  | block 0: | layer 0: | head 0: N x C | head 1 | ...
    LBHNC  | layer 0: | block 0: | head 0: N x C | ...
    LBNHC  | layer 0: | block 0: | token 0: H x C | ...

Legend: B, L, N as above; K KV heads of this rank; D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.connectors.base import PoolLayout

LAYOUTS = ("BHLNC", "BLHNC", "LBHNC", "LBNHC")
Allocate = Callable[[int], NDArray[np.uint8]]


def page_bytes(layout: PoolLayout) -> int:
    """Bytes of one block on this rank, all its layers."""
    return layout.num_bytes // layout.num_blocks


class KVPool:
    """Views of one rank's pages."""

    def __init__(self, layout: PoolLayout, memory: torch.Tensor, dtype: torch.dtype) -> None:
        """`memory` is uint8 [num_bytes] on any device. Raises ValueError for an unknown order or a wrong size."""
        if layout.order not in LAYOUTS:
            raise ValueError(f"layout {layout.order} is unknown; use one of {', '.join(LAYOUTS)}")
        if memory.numel() != layout.num_bytes:
            raise ValueError(f"pool memory has {memory.numel()} bytes, the layout needs {layout.num_bytes}")
        sizes = {
            "B": layout.num_blocks,
            "L": len(layout.layer_ids),
            "H": layout.num_heads,
            "N": layout.block_size,
            "C": layout.content_bytes // dtype.itemsize,
        }
        pages = memory.view(dtype).view([sizes[axis] for axis in layout.order])
        self.layout = layout
        self._pages_BLHNC = pages.permute([layout.order.index(axis) for axis in "BLHNC"])
        self.layers = list(self._pages_BLHNC.unbind(1))  # per local layer [B, K, N, 2*D]

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole blocks; pairs is [n, 2] of (source, destination), no destination being a source."""
        if len(pairs):
            source, destination = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
            self._pages_BLHNC[destination] = self._pages_BLHNC[source]

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        """Clear whole blocks."""
        if len(block_ids):
            self._pages_BLHNC[torch.from_numpy(block_ids.astype(np.int64))] = 0


def make_pool(layout: PoolLayout, dtype: torch.dtype, *, device: torch.device, allocate: Allocate) -> KVPool:
    """A pool in host memory from allocate(num_bytes), or in device memory, where allocate is not called."""
    if device.type == "cpu":
        memory = torch.from_numpy(allocate(layout.num_bytes))
    else:
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    return KVPool(layout, memory, dtype)
