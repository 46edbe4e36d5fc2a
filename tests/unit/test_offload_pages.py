"""Blocks of real plans go into a tier and come back into other blocks, every byte of every layer and no other."""

import numpy as np
import pytest
from support.plan_pools import MIXES, ORDERS, PoolKey, layouts_of, owned_blocks, plan_of, views_of

from blockferry.connectors.offload_base import TierShape
from blockferry.connectors.offload_pages import PageRuns
from blockferry.engine.kv.plan import Planner

KEYS = [
    PoolKey(mix=mix, planner=planner, order=order, tp_size=tp_size, tp_rank=tp_size - 1)
    for mix in MIXES
    for planner in Planner
    for order in ORDERS
    for tp_size in (1, 2)
]


def shape_of(key: PoolKey, unit_bytes: int) -> TierShape:
    num_groups = len(plan_of(key).groups)
    pages = [sum_of(key, group) for group in range(num_groups)]
    return TierShape(units_per_block=tuple(max(1, -(-page // unit_bytes)) for page in pages), unit_bytes=unit_bytes)


def sum_of(key: PoolKey, group: int) -> int:
    layouts = [one for one in layouts_of(key) if one.group == group]
    return sum(len(one.layer_ids) * one.num_heads * one.block_size * one.content_bytes for one in layouts)


@pytest.mark.parametrize("unit_bytes", [100, 4096])
def test_blocks_come_back_whole_into_other_blocks(unit_bytes: int) -> None:
    rng = np.random.default_rng(0)
    num_checked = 0
    for key in KEYS:
        plan = plan_of(key)
        if plan is None:
            continue
        shape = shape_of(key, unit_bytes)
        pages = PageRuns(layouts_of(key), shape)
        pool = rng.integers(0, 256, plan.pool_bytes, np.uint8)
        for group in range(len(plan.groups)):
            owned = owned_blocks(plan, group)
            count = len(owned) // 2
            if count:
                move_and_check(key, pages, pool, group=group, source=owned[:count], target=owned[count : 2 * count])
                num_checked += count
    assert num_checked > 500


def move_and_check(
    key: PoolKey, pages: PageRuns, pool: np.ndarray, *, group: int, source: list[int], target: list[int]
) -> None:
    before = pool.copy()
    num_units = len(source) * pages.shape.units_per_block[group]
    tier = np.zeros(num_units * pages.shape.unit_bytes, np.uint8)
    units = np.random.default_rng(1).permutation(num_units).astype(np.int32).reshape(len(source), -1)
    stored = pages.of(group, np.array(source, np.int32), units)
    for pool_offset, tier_offset, length in zip(stored.pool_offsets, stored.tier_offsets, stored.lengths):
        tier[tier_offset : tier_offset + length] = pool[pool_offset : pool_offset + length]
    loaded = pages.of(group, np.array(target, np.int32), units)
    touched = np.zeros(pool.nbytes, np.bool_)
    for pool_offset, tier_offset, length in zip(loaded.pool_offsets, loaded.tier_offsets, loaded.lengths):
        pool[pool_offset : pool_offset + length] = tier[tier_offset : tier_offset + length]
        touched[pool_offset : pool_offset + length] = True
    assert (pool == before)[~touched].all()
    assert stored.num_bytes == len(source) * pages.page_bytes(group) == len(source) * sum_of(key, group)
    layer_ids = {layer_id for one in layouts_of(key) if one.group == group for layer_id in one.layer_ids}
    for layer_id, tensors in views_of(key, pool).items():
        if layer_id in layer_ids:
            for one in tensors:
                assert (one[target] == one[source]).all(), (key, layer_id)


def test_units_too_small_for_a_block_are_refused() -> None:
    key = PoolKey(mix="full")
    with pytest.raises(ValueError, match="take the shape from the plan"):
        PageRuns(layouts_of(key), TierShape(units_per_block=(1,), unit_bytes=64))


def test_bytes_of_each_unit_of_a_block_add_up_to_its_page() -> None:
    key = PoolKey(mix="full and states", planner=Planner.SLAB)
    pages = PageRuns(layouts_of(key), shape_of(key, 100))
    for group in range(len(plan_of(key).groups)):
        lengths = pages.unit_lengths(group)
        assert len(lengths) == pages.shape.units_per_block[group]
        assert sum(lengths) == pages.page_bytes(group)
