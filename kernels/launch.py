"""What every Triton wrapper needs before a launch: the GPU family, and argument checks that word errors alike.

Owns nothing. Never launches or allocates.
"""

from __future__ import annotations

import enum
import functools

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256


class Target(enum.StrEnum):
    """GPU families that get tile sizes of their own, by shared memory per block and by matrix unit."""

    ADA = "ada"  # sm_86, sm_89, sm_120: 99 KiB
    AMPERE = "ampere"  # sm_80: 163 KiB
    HOPPER = "hopper"  # sm_90, sm_100: 227 KiB
    CDNA = "cdna"  # gfx90a, gfx942, gfx950: at least 64 KiB

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one program may use."""
        return {"ada": 99, "ampere": 163, "hopper": 227, "cdna": 64}[self.value] << 10


@functools.cache
def target_of(device: torch.device) -> Target:
    """The family of a device. Without a GPU (the interpreter) any would do; it is Hopper."""
    if device.type != "cuda":
        return Target.HOPPER
    if torch.version.hip is not None:
        return Target.CDNA
    capability = torch.cuda.get_device_capability(device)
    if capability == (8, 0):
        return Target.AMPERE
    return Target.HOPPER if capability[0] in {9, 10} else Target.ADA


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a device; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def check_tensor(
    name: str, tensor: torch.Tensor, *, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raises ValueError for another shape (None: any size), dtype, or a last dim that is not contiguous."""
    fits = tensor.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, tensor.shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, the kernel needs [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, the kernel takes {', '.join(map(str, dtypes))}; cast it first")
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} on its last dim, the kernel needs 1; copy it first")


def check_head_dim(head_dim: int) -> None:
    """Raises ValueError for a head dim that no tile covers."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim} is outside 1..{MAX_HEAD_DIM}; use the torch backend for this model")


def check_group(num_heads: int, num_kv_heads: int) -> int:
    """Query heads per kv head. Raises ValueError when they do not divide."""
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    return num_heads // num_kv_heads
