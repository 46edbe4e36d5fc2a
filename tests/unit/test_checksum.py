"""The checksum of byte runs: XXH64 as published, and what it must notice."""

import numpy as np
import pytest

from blockferry.connectors.transport.native_checksum import sum_runs, xxh64

PUBLISHED = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


@pytest.mark.parametrize("data", list(PUBLISHED))
def test_it_is_xxh64(data):
    memory = np.frombuffer(data + b"\0", np.uint8)
    assert int(xxh64(memory.ctypes.data, len(data), np.uint64(0))) == PUBLISHED[data]


@pytest.fixture
def memory():
    return np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8)


def total(memory, *runs):
    offsets, lengths = np.array(runs, np.int64).reshape(-1, 2).T.copy()
    return int(sum_runs(memory.ctypes.data, offsets, lengths))


@pytest.mark.parametrize("place", [0, 31, 32, 63, 71, 75, 78])
def test_one_wrong_bit_changes_it(memory, place):
    before = total(memory, (0, 79))
    memory[place] ^= 1
    assert total(memory, (0, 79)) != before


def test_runs_that_changed_places_change_it(memory):
    assert total(memory, (0, 64), (64, 64)) != total(memory, (64, 64), (0, 64))


def test_it_does_not_depend_on_where_the_runs_lie(memory):
    memory[1001:1101] = memory[:100]
    assert total(memory, (0, 100)) == total(memory, (1001, 100))


def test_no_runs_have_a_sum(memory):
    assert total(memory) == 0
