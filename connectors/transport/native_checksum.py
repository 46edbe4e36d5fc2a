"""A 64-bit checksum of byte runs, in compiled code near memory speed.

XXH64 (Yann Collet, xxHash, doc/xxhash_spec.md) of each run with the run's index as seed, added up modulo 2**64: so
that it tells runs apart that changed places, and parts of a list of runs can be summed apart.
"""

from __future__ import annotations

import numpy as np

from blockferry.connectors.base import Int64Array
from blockferry.connectors.transport.native_calls import compiled, load, load_byte

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_LOW = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(64)


@compiled
def _rotated(value: np.uint64, bits: int) -> np.uint64:
    return np.uint64((value << np.uint64(bits)) | (value >> (_BITS - np.uint64(bits))))


@compiled
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return np.uint64(_rotated(np.uint64(lane + word * _P2), 31) * _P1)


@compiled
def _merged(value: np.uint64, lane: np.uint64) -> np.uint64:
    return np.uint64((value ^ _round(np.uint64(0), lane)) * _P1 + _P4)


@compiled
def xxh64(address: int, length: int, seed: np.uint64) -> np.uint64:
    """XXH64 of `length` bytes."""
    end = address + length
    if length >= 32:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed + np.uint64(0), seed - _P1
        while address + 32 <= end:
            a = _round(a, np.uint64(load(address)))
            b = _round(b, np.uint64(load(address + 8)))
            c = _round(c, np.uint64(load(address + 16)))
            d = _round(d, np.uint64(load(address + 24)))
            address += 32
        value = np.uint64(_rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18))
        value = _merged(_merged(_merged(_merged(value, a), b), c), d)
    else:
        value = np.uint64(seed + _P5)
    return _finished(np.uint64(value + np.uint64(length)), address, end)


@compiled
def _finished(value: np.uint64, address: int, end: int) -> np.uint64:
    """Take in the last bytes, fewer than 32, and spread every bit."""
    while address + 8 <= end:
        value = np.uint64(_rotated(value ^ _round(np.uint64(0), np.uint64(load(address))), 27) * _P1 + _P4)
        address += 8
    if address + 4 <= end:
        low = np.uint64(0)
        for i in range(4):
            low |= np.uint64(load_byte(address + i)) << np.uint64(8 * i)
        value = np.uint64(_rotated(value ^ (low * _P1), 23) * _P2 + _P3)
        address += 4
    while address < end:
        value = np.uint64(_rotated(value ^ (np.uint64(load_byte(address)) * _P5), 11) * _P1)
        address += 1
    value = np.uint64((value ^ (value >> np.uint64(33))) * _P2)
    value = np.uint64((value ^ (value >> np.uint64(29))) * _P3)
    return np.uint64(value ^ (value >> np.uint64(32)))


@compiled
def sum_runs(base: int, offsets: Int64Array, lengths: Int64Array) -> np.uint64:
    """The checksum of runs. The caller has checked their bounds."""
    total = np.uint64(0)
    for i in range(len(lengths)):
        total += xxh64(base + offsets[i], lengths[i], np.uint64(i))
    return total
