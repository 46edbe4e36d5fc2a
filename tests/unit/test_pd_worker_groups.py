"""Transfers between pools of several cache groups over loopback: every byte of every rank, moved once."""

import numpy as np
import pytest
from support.pd_pools import Instance, command_of, token_view
from support.plan_pools import GroupPair, PoolKey, copy_naively, group_pairs, layouts_of, owned_blocks, part_of, plan_of

from blockferry.connectors.base import TransferMode, TransferState
from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorkerOptions
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport
from blockferry.engine.kv.plan import Planner

SMALL_BATCHES = PdWorkerOptions(limits=TransferLimits(batch_bytes=4096, quiesce_timeout_s=0.2), connect_timeout_s=2.0)
SLAB, UNIFIED = Planner.SLAB, Planner.UNIFIED


@pytest.fixture
def open_instance():
    """Makes instances of plans on one loopback fabric and closes them."""
    fabric, made = LoopbackFabric(), []

    def make(instance_id, keys):
        layouts = [layouts_of(key) for key in keys]
        instance = Instance(
            instance_id,
            layouts,
            lambda: LoopbackTransport(fabric),
            tp_size=keys[0].tp_size,
            options=SMALL_BATCHES,
        )
        made.append(instance)
        return instance

    yield make
    for instance in made:
        instance.close()


def ranks(mix, *, tp_size=1, **changes):
    return [PoolKey(mix=mix, tp_size=tp_size, tp_rank=rank, **changes) for rank in range(tp_size)]


def stages(mix, *, pp_size, **changes):
    return [PoolKey(mix=mix, pp_size=pp_size, pp_rank=rank, **changes) for rank in range(pp_size)]


PAIRS = {
    "full and windows": (ranks("full and windows"), ranks("full and windows")),
    "one group to two": (ranks("full and windows", planner=UNIFIED), ranks("full and windows", planner=SLAB)),
    "slabs to groups of equally many layers": (
        ranks("four full, two windows", planner=SLAB),
        ranks("four full, two windows"),
    ),
    "groups of equally many layers to slabs": (
        ranks("four full, two windows", block_size=8),
        ranks("four full, two windows", planner=SLAB, tp_size=2),
    ),
    "slabs": (ranks("full and windows", planner=SLAB), ranks("full and windows", planner=SLAB)),
    "uniform to slabs": (ranks("full and states"), ranks("full and states", planner=SLAB)),
    "layers outermost to blocks outermost": (
        ranks("full and windows", order="LBNHC"),
        ranks("full and windows", order="BHLNC"),
    ),
    "blocks of 8 to 4": (ranks("three reaches", planner=SLAB, block_size=8), ranks("three reaches", planner=SLAB)),
    "blocks of 4 to 16": (ranks("three reaches"), ranks("three reaches", block_size=16)),
    "tp 2 to 1": (ranks("full and windows", tp_size=2), ranks("full and windows")),
    "tp 1 to 2": (ranks("full and windows", planner=SLAB), ranks("full and windows", planner=SLAB, tp_size=2)),
    "states on two ranks": (ranks("full and states", tp_size=2), ranks("full and states", tp_size=2, order="BLHNC")),
    "states of two ranks to one": (ranks("full and states", tp_size=2), ranks("full and states", planner=SLAB)),
    "states of one rank to two": (ranks("full and states"), ranks("full and states", tp_size=2, order="LBNHC")),
    "states of four ranks to two": (ranks("three kinds", tp_size=4), ranks("three kinds", tp_size=2)),
    "states of two ranks to four": (ranks("latents and states", tp_size=2), ranks("latents and states", tp_size=4)),
    "heads in two copies to two ranks": (ranks("full and windows", tp_size=8), ranks("full and windows", tp_size=2)),
    "two ranks to heads in two copies": (ranks("full and states", tp_size=2), ranks("full and states", tp_size=8)),
    "two stages to one": (stages("full and states", pp_size=2), ranks("full and states", planner=SLAB)),
    "one stage to three": (ranks("three kinds", block_size=8), stages("three kinds", pp_size=3, order="LBNHC")),
    "two stages to two ranks": (stages("full and states", pp_size=2), ranks("full and states", tp_size=2)),
    "three kinds": (ranks("three kinds", planner=SLAB, tp_size=2), ranks("three kinds", planner=SLAB, tp_size=2)),
    "latents of two ranks to one": (ranks("latents", tp_size=2), ranks("latents")),
    "latents of one rank to two": (ranks("latents"), ranks("latents", tp_size=2)),
    "latents and states": (
        ranks("latents and states", planner=SLAB, tp_size=2),
        ranks("latents and states", planner=SLAB, tp_size=2, order="BHLNC"),
    ),
    "two widths and a ring": (
        ranks("two widths and a ring", order="BHLNC", planner=SLAB),
        ranks("two widths and a ring", planner=SLAB, tp_size=2),
    ),
}


def parts_of(src_keys, dst_keys):
    """Of all pairs of groups that have layers in common on any ranks."""
    pairs = sorted({pair for src in src_keys for dst in dst_keys for pair in group_pairs(src, dst)})
    return [part_of(src_keys[0], dst_keys[0], pair, num_blocks=1 + pair.dst % 2) for pair in pairs]


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("name", list(PAIRS))
def test_blocks_of_all_groups_arrive_and_nothing_else_changes(open_instance, name, mode):
    src_keys, dst_keys = PAIRS[name]
    prefill, decode = open_instance("p0", src_keys), open_instance("d0", dst_keys)
    instance, other = (prefill, decode) if mode is TransferMode.PUSH else (decode, prefill)
    instance.connect(other)
    fill_alike(src_keys, prefill.pools)
    parts = parts_of(src_keys, dst_keys)
    instance.start(command_of(*parts, mode=mode))
    events = instance.wait()
    assert {event.state for event in events} == {TransferState.DONE}, [event.reason for event in events]
    num_bytes = 0
    for key, pool in zip(dst_keys, decode.pools):
        expected = np.zeros(plan_of(key).pool_bytes, np.uint8)
        for src_key, src_pool in zip(src_keys, prefill.pools):
            copy_naively(src_key, key, padded(src_pool, src_key), expected, parts)
        assert (expected[: len(pool)] == pool).all()
        num_bytes += np.count_nonzero(expected)
    assert sum(event.num_bytes for event in events) == num_bytes


def fill_alike(keys, pools):
    """Random bytes; the same on all ranks where they hold copies."""
    for rank, (key, pool) in enumerate(zip(keys, pools)):
        pool[:] = np.random.default_rng(rank).integers(1, 255, len(pool))
        for index, layout in enumerate(layouts_of(key)):
            first = rank - layout.copy
            original = token_view(pools[first], layouts_of(keys[first])[index])
            owned = owned_blocks(plan_of(key), layout.group)
            token_view(pool, layout)[owned] = original[owned]


def padded(pool, key):
    """As long as the plan says: layouts end with the last content."""
    return np.concatenate([pool, np.zeros(plan_of(key).pool_bytes - len(pool), np.uint8)])


def test_a_group_without_a_part_moves_nothing(open_instance):
    (key,) = keys = ranks("full and windows", planner=SLAB)
    prefill, decode = open_instance("p0", keys), open_instance("d0", keys)
    prefill.connect(decode)
    prefill.pools[0][:] = 7
    parts = [part_of(key, key, GroupPair(1, 1), num_blocks=2)]
    prefill.start(command_of(*parts))
    (event,) = prefill.wait()
    expected = np.zeros(plan_of(key).pool_bytes, np.uint8)
    copy_naively(key, key, padded(prefill.pools[0], key), expected, parts)
    assert event.state is TransferState.DONE
    assert (decode.pools[0] == expected[: len(decode.pools[0])]).all()
