"""RMS norms on CPU: of the hidden state with the residual added first, and of each head of q or k.

An item is one row; its sum of squares is always taken in the same order.

Legend: T tokens, E hidden size, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from blockferry.kernels.cpu_emit import LANES, Element
from blockferry.kernels.cpu_launch import CompiledKernel, Launcher, choose_num_threads, compile_kernel, float_bits
from blockferry.kernels.cpu_layout import element_of
from blockferry.kernels.cpu_vector import (
    add,
    load_i64,
    load_of,
    load_scalar,
    multiply,
    multiply_add,
    splat,
    store_of,
    sum_lanes,
)


class RmsNorm:
    """Norms in one call each. Called by one thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._norms: dict[Element, CompiledKernel] = {}
        self._add_norms: dict[Element, CompiledKernel] = {}

    def prepare_norm(self, element: Element) -> CompiledKernel:
        """Compile or load the kernel of norm()."""
        if element not in self._norms:
            name = f"rms_norm-{element.value}"
            self._norms[element] = self._launcher.store.get(name, lambda: compile_rms_norm(element))
        return self._norms[element]

    def prepare_add_norm(self, element: Element) -> CompiledKernel:
        """Compile or load the kernel of add_norm()."""
        if element not in self._add_norms:
            name = f"add_rms_norm-{element.value}"
            self._add_norms[element] = self._launcher.store.get(name, lambda: compile_add_rms_norm(element))
        return self._add_norms[element]

    def norm(self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, out_THD: torch.Tensor) -> torch.Tensor:
        """Write x / sqrt(mean(x^2) + eps) * weight over the last dim to out, which may be x; returns out."""
        element = element_of(x_THD)
        if element is None or not _is_readable(x_THD, weight_D) or out_THD.stride(2) != 1:
            return out_THD.copy_(rms_norm_oracle(x_THD, weight_D, eps))
        num_tokens, num_heads, width = x_THD.shape
        num_items = num_tokens * num_heads
        num_threads = choose_num_threads(2 * num_items * width * element.num_bytes)
        arguments = self.norm_arguments(x_THD, weight_D, eps, out_THD)
        self._launcher.run(self.prepare_norm(element), num_threads, num_items, arguments)
        return out_THD

    def norm_arguments(
        self, x_THD: torch.Tensor, weight_D: torch.Tensor, eps: float, out_THD: torch.Tensor
    ) -> tuple[int, ...]:
        """Of the kernel; an item is a head of a token."""
        _, num_heads, width = x_THD.shape
        num_bytes = x_THD.element_size()
        return (
            x_THD.data_ptr(),
            out_THD.data_ptr(),
            weight_D.data_ptr(),
            width,
            float_bits(eps),
            num_heads,
            x_THD.stride(0) * num_bytes,
            x_THD.stride(1) * num_bytes,
            out_THD.stride(0) * num_bytes,
            out_THD.stride(1) * num_bytes,
        )

    def add_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> None:
        """In place: residual += x, rounded to its dtype; x = norm(residual) * weight."""
        element = element_of(x_TE)
        if element is None or not (_is_readable(x_TE, weight_E) and _is_readable(residual_TE, weight_E)):
            residual_TE += x_TE
            x_TE.copy_(rms_norm_oracle(residual_TE, weight_E, eps))
            return
        num_tokens, width = x_TE.shape
        num_threads = choose_num_threads(4 * num_tokens * width * element.num_bytes)
        arguments = self.add_norm_arguments(x_TE, residual_TE, weight_E, eps)
        self._launcher.run(self.prepare_add_norm(element), num_threads, num_tokens, arguments)

    def add_norm_arguments(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[int, ...]:
        """Of the kernel; an item is a token."""
        num_bytes = x_TE.element_size()
        return (
            x_TE.data_ptr(),
            residual_TE.data_ptr(),
            weight_E.data_ptr(),
            x_TE.shape[1],
            float_bits(eps),
            x_TE.stride(0) * num_bytes,
            residual_TE.stride(0) * num_bytes,
        )


def _is_readable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.shape[-1] % LANES == 0 and x.stride(-1) == 1 and weight.dtype == x.dtype and weight.stride(0) == 1


def rms_norm_oracle(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain torch: x / sqrt(mean(x^2) + eps) * weight over the last dim in float32, rounded once to x's dtype."""
    x_float = x.float()
    scale = torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return (x_float * scale * weight.float()).to(x.dtype)


def compile_rms_norm(element: Element) -> Any:
    """The kernel of RmsNorm.norm; an item is one head of one token."""
    load, store = load_of(element), store_of(element)

    def norm_row(arguments: int, index: int) -> None:
        x, out, weight = load_i64(arguments, 2), load_i64(arguments, 3), load_i64(arguments, 4)
        width, eps, num_heads = load_i64(arguments, 5), load_scalar(arguments, 2 * 6), load_i64(arguments, 7)
        token = index // num_heads
        head = index - token * num_heads
        x += token * load_i64(arguments, 8) + head * load_i64(arguments, 9)
        out += token * load_i64(arguments, 10) + head * load_i64(arguments, 11)
        squares = splat(np.float32(0.0))
        for position in range(0, width, LANES):
            values = load(x, position)
            squares = multiply_add(values, values, squares)
        mean = sum_lanes(squares) / np.float32(width)
        scale = splat(np.float32(1.0) / np.sqrt(mean + eps))
        for position in range(0, width, LANES):
            store(out, position, multiply(multiply(load(x, position), scale), load(weight, position)))

    return compile_kernel(norm_row)


def compile_add_rms_norm(element: Element) -> Any:
    """The kernel of RmsNorm.add_norm; an item is one token."""
    load, store = load_of(element), store_of(element)

    def add_norm_row(arguments: int, index: int) -> None:
        weight, width, eps = load_i64(arguments, 4), load_i64(arguments, 5), load_scalar(arguments, 2 * 6)
        x = load_i64(arguments, 2) + index * load_i64(arguments, 7)
        residual = load_i64(arguments, 3) + index * load_i64(arguments, 8)
        squares = splat(np.float32(0.0))
        for position in range(0, width, LANES):
            store(residual, position, add(load(x, position), load(residual, position)))
            values = load(residual, position)  # as rounded
            squares = multiply_add(values, values, squares)
        mean = sum_lanes(squares) / np.float32(width)
        scale = splat(np.float32(1.0) / np.sqrt(mean + eps))
        for position in range(0, width, LANES):
            store(x, position, multiply(multiply(load(residual, position), scale), load(weight, position)))

    return compile_kernel(add_norm_row)
