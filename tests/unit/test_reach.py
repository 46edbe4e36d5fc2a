"""How many blocks a sequence holds at most, against counting them at every step of every small sequence."""

from __future__ import annotations

import itertools

import pytest

from blockferry.engine.kv.reach import ChunkReach, Reach, SequenceLimits, WindowReach

MAX_MODEL_LEN = 40
SIZES = (1, 4, 6, 8, 10)
REACHES = [*(ChunkReach(chunk=size) for size in SIZES), *(WindowReach(window=size) for size in SIZES)]


def first_read(reach: Reach, position: int) -> int:
    """The first token that a token at a position reads."""
    if isinstance(reach, ChunkReach):
        return position // reach.chunk * reach.chunk
    assert isinstance(reach, WindowReach)
    return max(0, position - reach.window + 1)


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_no_sequence_holds_more_blocks_than_its_cap(reach: Reach, block_size: int) -> None:
    for max_in_flight in (1, 2, 5, 16):
        limits = SequenceLimits(max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=max_in_flight)
        held = [
            -(-stop // block_size) - first_read(reach, settled) // block_size
            for settled, count in itertools.product(range(MAX_MODEL_LEN), range(1, max_in_flight + 1))
            if (stop := settled + count) <= MAX_MODEL_LEN
        ]
        assert max(held) <= reach.max_held_blocks(block_size, limits)
