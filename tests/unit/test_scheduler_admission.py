"""Who is refused at once and who waits where."""

import numpy as np
import pytest
from support.simulator import Shape, SimCluster

from blockferry.engine.config import Role
from blockferry.engine.errors import QueueFull, RequestRejected
from blockferry.engine.scheduler.outputs import Route

MIXED = Route(prefill="m", decode="m")
FERRIED = Route(prefill="p", decode="d")


def prompt(num_tokens: int, family: int = 0):
    return np.random.default_rng(family).integers(0, 23, num_tokens)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "message"),
    [
        (0, 5, "the prompt has 0 tokens; send at least 1"),
        (4, -1, "max_tokens=-1 is negative; use 0 or more"),
        (64, 1, "the prompt has 64 tokens, but with max_tokens=1 and max_model_len=64 at most 63 fit"),
        (65, 0, "the prompt has 65 tokens, but with max_tokens=0 and max_model_len=64 at most 64 fit"),
        (30, 4, "needs KV blocks for 33 tokens, but the pool of instance m holds 32 tokens in 8 blocks"),
        (33, 0, "needs KV blocks for 33 tokens, but the pool of instance m holds 32 tokens in 8 blocks"),
    ],
)
def test_request_that_can_never_run_is_rejected_at_add(num_prompt_tokens, max_tokens, message):
    cluster = SimCluster(Shape(instance_id="m", num_blocks=9), max_model_len=64)
    with pytest.raises(RequestRejected, match=message):
        cluster.add(0, prompt(num_prompt_tokens), MIXED, max_tokens=max_tokens)
    assert cluster.central.num_unfinished == 0


def test_request_that_just_fits_the_pool_runs_to_its_end():
    cluster = SimCluster(Shape(instance_id="m", num_blocks=9, watermark=0.3), max_model_len=64)
    cluster.add(0, prompt(30), MIXED, max_tokens=3)
    cluster.drain()
    cluster.check_all_free()


def test_decode_pool_must_hold_the_output_but_the_prefill_pool_only_the_prompt():
    shapes = Shape(instance_id="p", role=Role.PREFILL, num_blocks=5), Shape(instance_id="d", num_blocks=9)
    cluster = SimCluster(*shapes)
    cluster.add(0, prompt(16), FERRIED, max_tokens=17)
    with pytest.raises(RequestRejected, match="the pool of instance d holds 32 tokens"):
        cluster.add(1, prompt(16), FERRIED, max_tokens=18)
    with pytest.raises(RequestRejected, match="the pool of instance p holds 16 tokens"):
        cluster.add(2, prompt(17), FERRIED, max_tokens=2)
    cluster.drain()
    cluster.check_all_free()


def test_full_queue_refuses_for_now():
    cluster = SimCluster(Shape(instance_id="m", max_queue_len=2))
    cluster.add(0, prompt(4), MIXED)
    cluster.add(1, prompt(4), MIXED)
    with pytest.raises(QueueFull, match="2 requests already wait for instance m, the limit is max_queue_len=2"):
        cluster.add(2, prompt(4), MIXED)
    cluster.plan("m")
    cluster.add(3, prompt(4), MIXED)


def test_handle_in_use_is_rejected():
    cluster = SimCluster(Shape(instance_id="m"))
    cluster.add(0, prompt(4), MIXED)
    with pytest.raises(RequestRejected, match="handle 0 is in use"):
        cluster.add(0, prompt(4), MIXED)


def test_unknown_instance_is_the_callers_mistake():
    cluster = SimCluster(Shape(instance_id="m"))
    with pytest.raises(ValueError, match="instance 'x' is unknown; there are: m"):
        cluster.add(0, prompt(4), Route(prefill="x", decode="x"))


def test_full_decode_instance_blocks_its_own_requests_only():
    shapes = [Shape(instance_id="p", num_blocks=64), Shape(instance_id="d", max_num_seqs=1), Shape(instance_id="e")]
    cluster = SimCluster(*shapes)
    for handle in range(2):
        cluster.add(handle, prompt(4, handle), FERRIED, max_tokens=9)
    cluster.add(2, prompt(4, 2), Route(prefill="p", decode="e"), max_tokens=9)
    plan = cluster.plan("p")
    started = [cluster.instances["p"].batch.sequences[row].ticket.handle for row in plan.rows]
    assert started == [0, 2]
    cluster.drain()
    cluster.check_all_free()


def test_request_that_needs_no_decode_step_takes_nothing_of_the_decode_instance():
    cluster = SimCluster(Shape(instance_id="p"), Shape(instance_id="d"))
    cluster.add(0, prompt(4), FERRIED, max_tokens=1)
    cluster.plan("p")
    assert cluster.instances["d"].batch.num_occupied == 0
    cluster.drain()
    assert cluster.transfers == []
    cluster.check_all_free()
