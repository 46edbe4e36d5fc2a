"""Counter-based random numbers: a draw is a pure function of (seed, position), whatever else is in the batch.

Owns no state, so preemption, recompute and hand-off to another worker repeat every draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.request import Int32Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], positions: Int32Array) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one per (seed, position).

    Two rounds of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
    """
    streams = _mix(seeds + _GOLDEN)
    bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
