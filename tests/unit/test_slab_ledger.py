"""The whole ledger on slabs: made from a plan, and no different from one pool where slabs are single pages."""

import dataclasses
import random

import pytest
from support.slab_serving import CHUNK, Admission, Serving, act, full, geometry, latent, slab_config, states, window

from blockferry.engine.kv.events import BlockRemoved
from blockferry.engine.kv.ledger_config import ledger_config
from blockferry.engine.kv.plan import KVCachePlan, PlanRequest
from blockferry.engine.kv.pools import SharedPool, make_pools
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.reach import SequenceLimits
from blockferry.engine.kv.slab_planner import plan_slab
from blockferry.engine.kv.slab_pools import SlabPools
from blockferry.engine.kv.slab_queue import UNOWNED
from blockferry.engine.kv.spec import KVCacheConfig, KVCacheSpec


def shared_and_slab(num_blocks: int, *, watermark: float) -> tuple[Serving, Serving]:
    """The same ledger of one group, with blocks in one pool and with slabs of one page."""
    config = slab_config([full(4)], geometry((1,), num_blocks - 1))
    serve = [Serving(one, watermark=watermark) for one in (dataclasses.replace(config, slab=None), config)]
    return serve[0], serve[1]


@pytest.mark.parametrize("seed", range(12))
def test_slabs_of_one_page_of_one_group_behave_as_blocks_of_one_pool(seed: int) -> None:
    rng = random.Random(seed)
    pair = shared_and_slab(rng.randint(8, 40), watermark=rng.choice((0.0, 0.1)))
    assert isinstance(pair[0].kv._pools, SharedPool)
    assert isinstance(pair[1].kv._pools, SlabPools)
    for _ in range(150):
        state = rng.getstate()
        for serving in pair:
            rng.setstate(state)
            act(serving, rng)
        assert pair[0].journal == pair[1].journal
    assert [str(event) for event in pair[0].heard] == [str(event) for event in pair[1].heard]
    assert any(isinstance(event, BlockRemoved) for event in pair[0].heard)


def random_config(rng: random.Random) -> KVCacheConfig:
    """2 to 4 groups of any type, in slabs of any size, perhaps with a tail."""
    specs: list[KVCacheSpec] = []
    for _ in range(rng.randint(2, 4)):
        block_size = rng.choice((2, 4, 8))
        of_any_type: tuple[KVCacheSpec, ...] = (
            full(block_size),
            latent(block_size),
            window(block_size, rng.randint(1, 20)),
            states(block_size),
        )
        specs.append(rng.choice(of_any_type))
    pages = tuple(rng.randint(1, 6) for _ in specs)
    tail_group = rng.randrange(len(specs))
    tail_pages = rng.randrange(pages[tail_group])
    return slab_config(specs, geometry(pages, rng.randint(8, 40), tail_group=tail_group, tail_pages=tail_pages))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_long_histories_of_any_mix_end_with_everything_free(seed: int) -> None:
    rng = random.Random(seed)
    serving = Serving(random_config(rng), watermark=rng.choice((0.0, 0.05)), num_lookahead=rng.choice((0, 0, 3)))
    for _ in range(300):
        act(serving, rng)
        serving.kv.check_integrity()
    serving.finish()
    assert serving.reset()
    serving.kv.check_integrity()
    assert (serving.pools._table.owner[: serving.pools._table.num_slabs + 1] == UNOWNED).all()


MIB = 1 << 20
LIMITS = SequenceLimits(max_model_len=64, max_in_flight_tokens=CHUNK)


def plan(specs: list[KVCacheSpec]) -> KVCachePlan:
    return plan_slab(PlanRequest(layers=tuple(specs), limits=LIMITS, memory_bytes=MIB))


def test_a_slab_plan_becomes_a_ledger_that_serves() -> None:
    config = ledger_config(plan([full(4), *[window(4, 8)] * 3]))
    assert config.slab is not None
    assert config.num_blocks == 1 + max(config.slab.num_pages(group) for group in range(2))
    serving = Serving(config)
    assert serving.admit(Admission(tokens=[1] * 16))
    assert serving.decode([0], 2) == 1
    serving.kv.check_integrity()
    assert isinstance(serving.kv._pools, SlabPools)


def test_a_report_says_of_each_page_whose_it_is() -> None:
    serving = Serving(slab_config([full(4), window(4, 8)], geometry((2, 2), 4)))
    serving.admit(Admission(tokens=[1] * 6))
    assert str(serving.kv.report_block(1, 0)).startswith("block 1 is held by row 0 (group 0, column 0)")
    assert str(serving.kv.report_block(1, 1)) == ("block 1 is not in use; its slab belongs to another group or to none")
    serving.free(0)
    assert str(serving.kv.report_block(1, 0)).startswith("block 1 is free, found under 1 hashes of group 0")


def test_a_slab_plan_of_one_group_needs_no_slab_books() -> None:
    planned = plan([full(4)] * 3)
    config = ledger_config(planned)
    assert (config.slab, config.num_blocks, config.groups) == (None, planned.num_blocks, planned.groups)
    assert isinstance(make_pools(config, PrefixIndex(1, num_expected=8), None), SharedPool)


def test_a_geometry_of_other_groups_is_refused() -> None:
    config = dataclasses.replace(slab_config([full(4), full(4)], geometry((1, 1), 3)), slab=geometry((1,), 3))
    with pytest.raises(ValueError, match="the slab geometry has 1 groups, the KV cache 2"):
        make_pools(config, PrefixIndex(2, num_expected=8), None)
