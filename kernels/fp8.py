"""Keys and values in eight bits: float8_e4m3fn with one float32 scale per head, in plain torch.

    stored = to_e4m3(clamp(x / scale, -448, 448))        x is about scale * stored

Owns what quantising means: the CPU computes so, GPU kernels are held against it. After Micikevicius et al., "FP8
Formats for Deep Learning" (arXiv:2209.05433): e4m3 has no infinity, values beyond 448 are clamped and never wrap.

Legend: T tokens, K kv heads, D head dim, B blocks, N block size.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from blockferry.kernels.launch import check_tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_MIN_CAPABILITY = (8, 9)  # of NVIDIA GPUs that convert e4m3
_HIP_ARCHITECTURES = ("gfx94", "gfx95", "gfx12")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheScales:
    """What one stored unit of a layer's fp8 cache is worth; of a latent, one head whose k and v are the same."""

    k_K: torch.Tensor  # float32, positive and finite
    v_K: torch.Tensor


def quantise(x_TKD: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [T, K, D], rounded to nearest, ties to even. NaN stays NaN."""
    return (x_TKD.float() / scale_K[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def dequantise_kv(kv_BKNC: torch.Tensor, scales: CacheScales, dtype: torch.dtype) -> torch.Tensor:
    """[B, K, N, 2*D] in dtype: whole blocks, keys first. Blocks may hold NaN where nothing was stored."""
    num_blocks, num_kv_heads, block_size, width = kv_BKNC.shape
    scale_KS = torch.stack((scales.k_K, scales.v_K), dim=-1)
    parts = _values_of(kv_BKNC).view(num_blocks, num_kv_heads, block_size, 2, width // 2)
    return parts.mul_(scale_KS[None, :, None, :, None]).view(kv_BKNC.shape).to(dtype)


def dequantise(x_TKD: torch.Tensor, scale_K: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a reader of the cache makes of stored values, [T, K, D] in dtype."""
    return _values_of(x_TKD).mul_(scale_K[:, None]).to(dtype)


def _values_of(x: torch.Tensor) -> torch.Tensor:
    """float32 of the same shape. By table: torch converts e4m3 on CPUs at a fourth of this speed."""
    table = torch.arange(256, dtype=torch.uint8, device=x.device).view(FP8).float()
    return table.index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


def check_cache(
    kv_cache: torch.Tensor,
    scales: CacheScales | None,
    *,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raises ValueError for pages of another shape, and for pages of other types than dtypes, or fp8 with scales."""
    check_tensor("kv_cache", kv_cache, shape=shape, dtypes=dtypes if scales is None else (FP8,))
    if scales is None:
        return
    check_device(kv_cache.device)
    num_kv_heads = shape[1] if len(shape) == 4 else 1
    for name, scale_K in (("k scales", scales.k_K), ("v scales", scales.v_K)):
        check_tensor(name, scale_K, shape=(num_kv_heads,), dtypes=(torch.float32,))


@functools.cache
def check_device(device: torch.device) -> None:
    """Raises ValueError for a GPU that has no instruction for e4m3."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        is_able = name.startswith(_HIP_ARCHITECTURES)
    else:
        capability = torch.cuda.get_device_capability(device)
        name, is_able = "compute capability {}.{}".format(*capability), capability >= _MIN_CAPABILITY
    if not is_able:
        raise ValueError(
            f"a cache in fp8 needs a GPU that converts float8_e4m3fn (compute capability 8.9 and up, gfx942, gfx950), "
            f"this one is {name}; use cache.dtype auto"
        )
