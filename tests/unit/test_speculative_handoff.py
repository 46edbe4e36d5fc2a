"""Speculation across a hand-over: drafts travel with the first token, and room for drafts never holds anybody up."""

import numpy as np
import pytest
from support.sim_drafts import SimDrafts
from support.simulator import Shape, SimCluster, reference

from blockferry.connectors.base import Overlap, TransferMode, TransferState
from blockferry.engine.config import Role
from blockferry.engine.scheduler.outputs import Route

FERRIED = Route(prefill="p", decode="d")
RIGHT = SimDrafts(accuracy=1.0, is_adaptive=False)


def make(*, source: SimDrafts | None = RIGHT, target: SimDrafts | None = RIGHT, **options) -> SimCluster:
    shape = {name: options.pop(name) for name in list(options) if name in Shape.__dataclass_fields__}
    return SimCluster(
        Shape(instance_id="p", role=Role.PREFILL, drafts=source, **shape),
        Shape(instance_id="d", role=Role.DECODE, drafts=target, **shape),
        **options,
    )


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


def prefill(cluster: SimCluster) -> None:
    """Compute the prompt and ferry it."""
    cluster.plan("p")
    cluster.execute("p")
    cluster.commit("p")
    cluster.plan("d")
    cluster.finish_transfer()
    cluster.check()


def test_the_first_step_of_the_decode_instance_verifies_what_the_prefill_instance_proposed():
    cluster = make()
    cluster.add(0, prompt(9), FERRIED, max_tokens=20)
    prefill(cluster)
    plan = cluster.plan("d")
    tokens, _, _ = reference(cluster.requests[0], max_model_len=96)
    assert plan.num_drafts.tolist() == [3]
    assert plan.draft_token_ids.tolist() == tokens[1:4]
    cluster.execute("d")
    cluster.commit("d")
    assert cluster.tokens[0] == tokens[:5]


def test_drafts_that_travelled_are_cut_at_the_decode_instances_number_and_the_end():
    cluster = make(target=SimDrafts(num_tokens=2, accuracy=1.0))
    cluster.add(0, prompt(9), FERRIED, max_tokens=20)
    prefill(cluster)
    assert cluster.plan("d").num_drafts.tolist() == [2]
    cluster = make()
    cluster.add(0, prompt(9), FERRIED, max_tokens=3)
    prefill(cluster)
    assert cluster.plan("d").num_drafts.tolist() == [1]


@pytest.mark.parametrize(("source", "target"), [(RIGHT, None), (None, RIGHT)])
def test_one_side_may_speculate_alone(source, target):
    cluster = make(source=source, target=target)
    for handle in range(3):
        cluster.add(handle, prompt(7, handle), FERRIED, max_tokens=12)
    cluster.drain()
    cluster.check_all_free()


def test_reserved_blocks_have_no_room_for_drafts():
    cluster = make(block_size=4)
    cluster.add(0, prompt(8), FERRIED, max_tokens=20)
    cluster.plan("p")
    instance = cluster.instances["d"]
    assert instance.kv.num_usable_blocks - instance.kv.num_free_blocks == 2


def test_a_failed_hand_over_forgets_the_drafts_that_travelled():
    cluster = make()
    cluster.add(0, prompt(9), FERRIED, max_tokens=20)
    cluster.plan("p")
    cluster.execute("p")
    cluster.commit("p")
    cluster.finish_transfer(0, TransferState.FAILED)
    plan = cluster.plan("d")
    assert (len(plan.num_drafts), plan.num_scheduled.tolist()) == (0, [10])
    cluster.drain()
    cluster.check_all_free()


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("family", ["full", "full+full"])
def test_two_requests_in_a_pool_of_7_blocks_with_drafts_and_a_connector_both_finish(mode, accuracy, family):
    # either needs 5 blocks of 4 in the end, and drafts reach into the next block in three steps of four
    num_groups = 1 if family == "full" else 2
    cluster = make(
        source=SimDrafts(accuracy=accuracy),
        target=SimDrafts(accuracy=accuracy),
        family=family,
        has_draft=num_groups == 2,
        num_blocks=1 + 7 * num_groups,
        block_size=4,
        watermark=0.0,
        mode=mode,
        overlap=Overlap.NONE,
    )
    for handle in range(2):
        cluster.add(handle, prompt(9, handle), FERRIED, max_tokens=11)
    cluster.drain(max_steps=200)
    cluster.check_all_free()
    assert [cluster.finished[handle].stats.num_output_tokens for handle in (0, 1)] == [11, 11]
