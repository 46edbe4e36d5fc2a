"""Storing keys and values of a step in their pages on CPU; bytes only, any dtype.

Legend: T tokens, K kv heads, D head dim, B blocks, N block size.
"""

from __future__ import annotations

from typing import Any

import torch

from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, choose_num_threads, compile_kernel
from blockferry.kernels.cpu_layout import has_dense_heads
from blockferry.kernels.cpu_vector import copy_bytes, load_i64


class KvWrite:
    """Writes one layer's keys and values in one call. Called by one thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kernel: CompiledKernel | None = None

    def prepare(self) -> CompiledKernel:
        """Compile or load the kernel."""
        if self._kernel is None:
            self._kernel = self._launcher.store.get("kv_write", compile_kv_write)
        return self._kernel

    def __call__(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,  # [B, K, N, 2*D], last dim contiguous
        slot_mapping_T: torch.Tensor,  # int64, block_id * N + offset; negative: write nothing
    ) -> None:
        """Write the first len(slot_mapping) tokens."""
        is_readable = has_dense_heads(k_TKD) and has_dense_heads(v_TKD) and k_TKD.dtype == kv_cache.dtype
        if not is_readable or slot_mapping_T.stride(0) != 1:
            kv_write_oracle(k_TKD, v_TKD, kv_cache, slot_mapping_T)
            return
        arguments = self.arguments(k_TKD, v_TKD, kv_cache, slot_mapping_T)
        num_bytes = 4 * len(slot_mapping_T) * k_TKD.shape[1] * k_TKD.shape[2] * kv_cache.element_size()
        self._launcher.run(self.prepare(), choose_num_threads(num_bytes), len(slot_mapping_T), arguments)

    def arguments(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> tuple[int, ...]:
        """Of the kernel; an item is a token. All are of one type, with dense heads."""
        num_bytes = kv_cache.element_size()
        _, num_kv_heads, head_dim = k_TKD.shape
        stride_block, stride_head, stride_token, _ = kv_cache.stride()
        return (
            k_TKD.data_ptr(),
            v_TKD.data_ptr(),
            kv_cache.data_ptr(),
            slot_mapping_T.data_ptr(),
            num_kv_heads,
            head_dim * num_bytes,
            kv_cache.shape[2],
            k_TKD.stride(0) * num_bytes,
            v_TKD.stride(0) * num_bytes,
            stride_block * num_bytes,
            stride_head * num_bytes,
            stride_token * num_bytes,
        )


def kv_write_oracle(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
) -> None:
    """Write in plain torch."""
    block_size = kv_cache.shape[2]
    is_kept_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_kept_T]
    kv_TKC = torch.cat((k_TKD, v_TKD), dim=-1)[: len(slot_mapping_T)][is_kept_T]
    kv_cache[slots // block_size, :, slots % block_size] = kv_TKC.to(kv_cache.dtype)


def compile_kv_write() -> Any:
    """The kernel of KvWrite; an item is one token."""

    def write_token(arguments: int, index: int) -> None:
        slot = load_i64(load_i64(arguments, 5), index)
        if slot < 0:
            return
        head_bytes, block_size = load_i64(arguments, 7), load_i64(arguments, 8)
        k = load_i64(arguments, 2) + index * load_i64(arguments, 9)
        v = load_i64(arguments, 3) + index * load_i64(arguments, 10)
        block = slot // block_size
        target = load_i64(arguments, 4) + block * load_i64(arguments, 11)
        target += (slot - block * block_size) * load_i64(arguments, 13)
        for head in range(load_i64(arguments, 6)):
            copy_bytes(target, k + head * head_bytes, head_bytes)
            copy_bytes(target + head_bytes, v + head * head_bytes, head_bytes)
            target += load_i64(arguments, 12)

    return compile_kernel(write_token)
