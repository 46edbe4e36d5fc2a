"""The pools of `bench transfer`: what must be where, and that a wrong byte is seen."""

import numpy as np
import pytest

from blockferry.cluster.bench.transfer_pools import (
    Amount,
    PoolContent,
    Side,
    choose_blocks,
    model_shape,
    page_bytes,
    piece_shape,
)
from blockferry.cluster.plan_model import read_model_config
from blockferry.connectors.layout import intersect_runs

SEED = 3
SIDES = [
    (Side(), Side()),
    (Side(tp_size=2), Side(tp_size=1)),
    (Side(tp_size=2), Side(tp_size=3)),
    (Side(block_size=16), Side(block_size=24)),
    (Side(block_size=32), Side(block_size=16, order="LBNHC")),
]


def filled(layouts, grid):
    pools = [np.zeros(layout.num_bytes, np.uint8) for layout in layouts]
    return pools, [PoolContent(pool, layout, grid) for pool, layout in zip(pools, layouts)]


def ferried(shape, pattern):
    """Destination pools after a naive copy of every run, with their contents and the blocks."""
    sources, fillers = filled(shape.src, shape.grid)
    for one in fillers:
        one.fill(SEED)
    targets, checkers = filled(shape.dst, shape.grid)
    blocks = choose_blocks(pattern, shape.grid, seed=1)
    for src, source in zip(shape.src, sources):
        for dst, target in zip(shape.dst, targets):
            runs = intersect_runs(src, dst, blocks.part(shape.grid))
            for src_offset, dst_offset, length in zip(runs.src_offsets, runs.dst_offsets, runs.lengths):
                target[dst_offset : dst_offset + length] = source[src_offset : src_offset + length]
    return targets, checkers, blocks


SHAPES = [piece_shape(4096 * 3, Amount(num_blocks=6), src, dst) for src, dst in SIDES] + [
    model_shape(
        read_model_config("smollm2-135m"),
        Amount(num_blocks=4),
        Side(tp_size=3),
        Side(tp_size=2, order="LBNHC", block_size=32),
    )
]
NAMES = [*(f"piece {number}" for number in range(len(SIDES))), "model"]


@pytest.mark.parametrize("pattern", ["contiguous", "scattered"])
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_what_a_transfer_moves_is_right(shape, pattern):
    _, checkers, blocks = ferried(shape, pattern)
    assert all(one.is_right(SEED, blocks) for one in checkers)


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_one_wrong_byte_anywhere_is_seen(shape):
    targets, checkers, blocks = ferried(shape, "scattered")
    draw = np.random.default_rng(0)
    for target, checker, layout in zip(targets, checkers, shape.dst):
        written = np.flatnonzero(target)
        for at in [written[0], written[-1], *draw.choice(written, 20)]:
            target[at] ^= 1
            assert not checker.is_right(SEED, blocks), (layout, at)
            target[at] ^= 1
        assert checker.is_right(SEED, blocks)


def test_another_seed_or_other_blocks_are_wrong():
    shape = piece_shape(4096, Amount(num_blocks=8), Side(), Side())
    _, [checker], blocks = ferried(shape, "scattered")
    assert not checker.is_right(SEED + 1, blocks)
    assert not checker.is_right(SEED, choose_blocks("contiguous", shape.grid, seed=1))


def test_a_write_to_block_0_is_seen():
    shape = piece_shape(4096, Amount(num_blocks=8), Side(), Side())
    [target], [checker], blocks = ferried(shape, "scattered")
    target[0] = 1
    assert not checker.is_right(SEED, blocks)


def test_every_run_of_scattered_blocks_is_one_piece():
    for src, dst in [(Side(), Side()), (Side(tp_size=2), Side()), (Side(tp_size=2), Side(tp_size=4))]:
        shape = piece_shape(8192, Amount(num_bytes=1 << 20), src, dst)
        blocks = choose_blocks("scattered", shape.grid, seed=5)
        runs = [intersect_runs(s, d, blocks.part(shape.grid)) for s in shape.src for d in shape.dst]
        assert sum(one.num_bytes for one in runs) == 1 << 20
        assert {int(np.median(one.lengths)) for one in runs if len(one)} == {8192}


def test_blocks_of_a_model_are_those_of_its_plan():
    shape = model_shape(read_model_config("smollm2-135m"), Amount(num_blocks=4), Side(), Side(tp_size=3))
    assert page_bytes(shape.src) == page_bytes(shape.dst) == 30 * 3 * 16 * 2 * 64 * 2


def test_a_hybrid_model_has_no_single_block():
    with pytest.raises(ValueError, match="several kinds"):
        model_shape(read_model_config("gemma-3-27b"), Amount(num_blocks=4), Side(), Side())
