"""Compiled copies of runs move exactly their bytes, whatever their alignment and length."""

import numpy as np
import pytest

from blockferry.connectors.transport.native_loops import copy_runs, stream_runs


@pytest.mark.parametrize("move", [copy_runs, stream_runs])
def test_runs_of_any_alignment_and_length_are_copied_and_nothing_else(move):
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    target = np.zeros(1 << 20, np.uint8)
    lengths = np.array([0, 1, 63, 1023, 1024, 1025, 1279, 1280, 1343, 4096, 5000, 70_001], np.int64)
    src = rng.integers(0, 1 << 19, len(lengths))
    dst = np.cumsum(lengths + rng.integers(1, 90, len(lengths))) - lengths
    expected = target.copy()
    for s, d, length in zip(src, dst, lengths):
        expected[d : d + length] = source[s : s + length]
    move(target.ctypes.data, source.ctypes.data, dst, src, lengths)
    assert (target == expected).all()
