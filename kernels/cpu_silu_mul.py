"""silu(gate) * up on CPU, from one tensor that holds gate and up side by side.

Legend: T tokens, F feed-forward size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from blockferry.kernels.cpu_emit import LANES, Element
from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, choose_num_threads, compile_kernel
from blockferry.kernels.cpu_layout import element_of
from blockferry.kernels.cpu_vector import add, divide, exp, load_i64, load_of, multiply, splat, store_of, subtract


class SiluMul:
    """The gated activation in one call. Called by one thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kernels: dict[Element, CompiledKernel] = {}

    def prepare(self, element: Element) -> CompiledKernel:
        """Compile or load the kernel of one dtype."""
        if element not in self._kernels:
            name = f"silu_mul-{element.value}"
            self._kernels[element] = self._launcher.store.get(name, lambda: compile_silu_mul(element))
        return self._kernels[element]

    def __call__(self, x_T2F: torch.Tensor) -> torch.Tensor:
        """[T, F]: silu(x[:, :F]) * x[:, F:], in float32, rounded once."""
        num_tokens, width = x_T2F.shape
        width //= 2
        element = element_of(x_T2F)
        if element is None or width % LANES or x_T2F.stride(1) != 1:
            return silu_mul_oracle(x_T2F)
        out_TF = torch.empty((num_tokens, width), dtype=x_T2F.dtype)
        num_threads = choose_num_threads(3 * num_tokens * width * element.num_bytes)
        self._launcher.run(self.prepare(element), num_threads, num_tokens, self.arguments(x_T2F, out_TF))
        return out_TF

    def arguments(self, x_T2F: torch.Tensor, out_TF: torch.Tensor) -> tuple[int, ...]:
        """Of the kernel; an item is a token. out is contiguous."""
        num_bytes, width = x_T2F.element_size(), out_TF.shape[1]
        return (x_T2F.data_ptr(), out_TF.data_ptr(), width, x_T2F.stride(0) * num_bytes, width * num_bytes)


def silu_mul_oracle(x_T2F: torch.Tensor) -> torch.Tensor:
    """[T, F] in plain torch."""
    gate_TF, up_TF = x_T2F.float().chunk(2, dim=-1)
    return (functional.silu(gate_TF) * up_TF).to(x_T2F.dtype)


def compile_silu_mul(element: Element) -> Any:
    """The kernel of SiluMul; an item is one token."""
    load, store = load_of(element), store_of(element)

    def activate_row(arguments: int, index: int) -> None:
        width = load_i64(arguments, 4)
        x = load_i64(arguments, 2) + index * load_i64(arguments, 5)
        out = load_i64(arguments, 3) + index * load_i64(arguments, 6)
        zero, one = splat(np.float32(0.0)), splat(np.float32(1.0))
        for position in range(0, width, LANES):
            gate = load(x, position)
            activated = divide(gate, add(one, exp(subtract(zero, gate))))
            store(out, position, multiply(activated, load(x, width + position)))

    return compile_kernel(activate_row)
