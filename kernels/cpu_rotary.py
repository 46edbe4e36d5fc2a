"""Rotary position embedding of q and k on CPU, in place, halves against each other (NeoX style).

Legend: T tokens, H query heads, K kv heads, D head dim, W width of the table: W < D rotates only the first W dims.
"""

from __future__ import annotations

from typing import Any

import torch

from blockferry.kernels.cpu_emit import LANES, Element
from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, choose_num_threads, compile_kernel
from blockferry.kernels.cpu_layout import element_of, has_dense_heads
from blockferry.kernels.cpu_vector import (
    jit,
    load_element_of,
    load_f32,
    load_i64,
    load_of,
    load_scalar,
    multiply,
    multiply_add,
    store_element_of,
    store_of,
    subtract,
)


class Rotary:
    """Rotates q and k in one call. Called by one thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kernels: dict[Element, CompiledKernel] = {}

    def prepare(self, element: Element) -> CompiledKernel:
        """Compile or load the kernel of one dtype."""
        if element not in self._kernels:
            name = f"rotary-{element.value}"
            self._kernels[element] = self._launcher.store.get(name, lambda: compile_rotary(element))
        return self._kernels[element]

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        cos_sin: torch.Tensor,  # float32 [max_len, W]: W/2 cosines, then W/2 sines
        positions_T: torch.Tensor,  # int64
    ) -> None:
        """Rotate both in place, in float32."""
        element = element_of(q_THD)
        is_readable = has_dense_heads(q_THD) and has_dense_heads(k_TKD)
        if element is None or not is_readable or positions_T.dtype != torch.int64 or positions_T.stride(0) != 1:
            rotate_oracle(q_THD, k_TKD, cos_sin, positions_T)
            return
        num_tokens, num_heads, head_dim = q_THD.shape
        num_threads = choose_num_threads(2 * num_tokens * (num_heads + k_TKD.shape[1]) * head_dim * element.num_bytes)
        arguments = self.arguments(q_THD, k_TKD, cos_sin, positions_T)
        self._launcher.run(self.prepare(element), num_threads, num_tokens, arguments)

    def arguments(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[int, ...]:
        """Of the kernel; an item is a token."""
        _, num_heads, head_dim = q_THD.shape
        num_bytes = q_THD.element_size()
        return (
            q_THD.data_ptr(),
            k_TKD.data_ptr(),
            cos_sin.data_ptr(),
            positions_T.data_ptr(),
            num_heads,
            k_TKD.shape[1],
            head_dim,
            q_THD.stride(0) * num_bytes,
            k_TKD.stride(0) * num_bytes,
            cos_sin.stride(0) * 4,
            cos_sin.shape[1],
        )


def rotate_oracle(q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor) -> None:
    """Rotate both in place, in plain torch."""
    cos_T1h, sin_T1h = cos_sin[positions_T].unsqueeze(1).chunk(2, dim=-1)
    for x_THW in (q_THD[..., : cos_sin.shape[1]], k_TKD[..., : cos_sin.shape[1]]):
        first, second = x_THW.float().chunk(2, dim=-1)
        x_THW.copy_(torch.cat((first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h), dim=-1))


def compile_rotary(element: Element) -> Any:
    """The kernel of Rotary; an item is one token."""
    load, store, num_bytes = load_of(element), store_of(element), element.num_bytes
    load_element, store_element = load_element_of(element), store_element_of(element)

    @jit
    def rotate_heads(x: int, table: int, num_heads: int, head_dim: int, width: int) -> None:
        half = width // 2
        whole = half - half % LANES
        for head in range(num_heads):
            lower = x + head * head_dim * num_bytes
            upper = lower + half * num_bytes
            for index in range(0, whole, LANES):
                cosine, sine = load_f32(table, index), load_f32(table, half + index)
                a, b = load(lower, index), load(upper, index)
                store(lower, index, subtract(multiply(a, cosine), multiply(b, sine)))
                store(upper, index, multiply_add(a, sine, multiply(b, cosine)))
            for index in range(whole, half):
                cosine, sine = load_scalar(table, index), load_scalar(table, half + index)
                a, b = load_element(lower, index), load_element(upper, index)
                store_element(lower, index, a * cosine - b * sine)
                store_element(upper, index, b * cosine + a * sine)

    def rotate_token(arguments: int, index: int) -> None:
        q = load_i64(arguments, 2) + index * load_i64(arguments, 9)
        k = load_i64(arguments, 3) + index * load_i64(arguments, 10)
        position = load_i64(load_i64(arguments, 5), index)
        table = load_i64(arguments, 4) + position * load_i64(arguments, 11)
        head_dim, width = load_i64(arguments, 8), load_i64(arguments, 12)
        rotate_heads(q, table, load_i64(arguments, 6), head_dim, width)
        rotate_heads(k, table, load_i64(arguments, 7), head_dim, width)

    return compile_kernel(rotate_token)
