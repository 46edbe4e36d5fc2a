"""Soft caps for numba-compiled code: cap * tanh(score / cap) on sixteen float32 lanes. Owns nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from blockferry.kernels.cpu_emit import F32_LANES
from blockferry.kernels.cpu_vector import (
    add,
    divide,
    exp,
    f32x16,
    function,
    jit,
    multiply,
    multiply_add,
    splat,
    subtract,
)


def _emit_choose_below(
    builder: ir.IRBuilder, square: ir.Value, limit: ir.Value, below: ir.Value, others: ir.Value
) -> ir.Value:
    is_below = builder.fcmp_ordered("<", square, limit)
    assert below.type == others.type == F32_LANES, (below.type, others.type)
    return builder.select(is_below, below, others)


# choose_below(a, limit, below, others): lanes of `below` where a < limit
choose_below = function(f32x16, [f32x16] * 4, _emit_choose_below)


@jit
def tanh(x: Any) -> Any:
    """Hyperbolic tangent of each lane, to about 2 ulp; NaN stays NaN.

    Cephes tanhf (Moshier, Methods and Programs for Mathematical Functions, 1989): a polynomial up to 0.625, beyond it
    1 - 2 / (exp(2 x) + 1), which would cancel near 0.
    """
    z = multiply(x, x)
    p = splat(np.float32(-5.70498872745e-3))
    p = multiply_add(p, z, splat(np.float32(2.06390887954e-2)))
    p = multiply_add(p, z, splat(np.float32(-5.37397155531e-2)))
    p = multiply_add(p, z, splat(np.float32(1.33314422036e-1)))
    p = multiply_add(p, z, splat(np.float32(-3.33332819422e-1)))
    near = multiply_add(multiply(p, z), x, x)
    one = splat(np.float32(1.0))
    far = subtract(one, divide(splat(np.float32(2.0)), add(exp(add(x, x)), one)))
    return choose_below(z, splat(np.float32(0.625 * 0.625)), near, far)


@jit
def cap_scores(scores: Any, soft_cap: Any) -> Any:
    """soft_cap (one float32) times tanh of the scores over it."""
    cap = splat(soft_cap)
    return multiply(cap, tanh(divide(scores, cap)))
