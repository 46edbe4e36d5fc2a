"""The memory of one rank's pool, and the element types that its plan's pages hold.

Owns nothing: whoever allocates keeps the memory alive and may register it with a transport.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.kv.plan import KVCachePlan
from blockferry.engine.kv.spec import MambaSpec
from blockferry.engine.worker.page_views import PageDTypes
from blockferry.kernels.fp8 import FP8

Allocate = Callable[[int], NDArray[np.uint8]]


def make_memory(num_bytes: int, *, device: torch.device, allocate: Allocate) -> torch.Tensor:
    """uint8 [num_bytes] in host memory from allocate(num_bytes), or in device memory, where allocate is not called."""
    if device.type == "cpu":
        return torch.from_numpy(allocate(num_bytes))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def page_dtypes(plan: KVCachePlan, dtype: torch.dtype, cache_dtype: CacheDType = CacheDType.AUTO) -> PageDTypes:
    """Element types of a plan's pages on a model of `dtype`; states of four bytes are float32."""
    sizes = next((region.spec.dtype_bytes for region in plan.regions if isinstance(region.spec, MambaSpec)), ())
    return PageDTypes(
        kv=FP8 if cache_dtype is CacheDType.FP8 else dtype,
        states=tuple(torch.float32 if size == torch.float32.itemsize else dtype for size in sizes),
    )
