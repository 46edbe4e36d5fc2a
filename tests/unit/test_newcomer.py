"""What instances have of a request before it has a route: exact, counted once, and without effect."""

import numpy as np
from support.simulator import VOCAB_SIZE, Shape, SimCluster, TierShapes

from blockferry.engine.request import Request, SamplingParams
from blockferry.engine.scheduler.outputs import Route

HERE = Route(prefill="m", decode="m")


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)


def request(token_ids: np.ndarray, handle: int = 99, **values) -> Request:
    sampling = SamplingParams(max_tokens=2, **values.pop("sampling", {}))
    return Request(
        request_id="r", handle=handle, prompt_token_ids=token_ids, sampling=sampling, arrival_s=0.0, **values
    )


def serve(cluster: SimCluster, handle: int, token_ids: np.ndarray) -> None:
    cluster.add(handle, token_ids, HERE, max_tokens=2)
    cluster.drain()


def held(cluster: SimCluster, asked: Request) -> int:
    return cluster.central.meet(asked).found_on("m").num_held_tokens


def test_cached_prefix_is_held():
    cluster = SimCluster(Shape(instance_id="m"))
    serve(cluster, 0, prompt(24))
    longer = np.concatenate([prompt(24), prompt(8, seed=1)])
    found = cluster.central.meet(request(longer)).found_on("m")
    assert (found.num_held_tokens, found.num_missing_tokens, found.has_room) == (24, 8, True)


def test_asking_changes_nothing():
    cluster = SimCluster(Shape(instance_id="m", num_blocks=8))
    serve(cluster, 0, prompt(12, seed=0))
    serve(cluster, 1, prompt(12, seed=1))
    before = cluster.central.status()
    assert held(cluster, request(prompt(12, seed=0))) == 8
    assert cluster.central.status() == before
    serve(cluster, 2, prompt(12, seed=2))  # evicts what was used least recently, asked for or not
    assert held(cluster, request(prompt(12, seed=0))) == 0
    assert held(cluster, request(prompt(12, seed=1))) == 8


def test_prefix_in_a_tier_is_held():
    cluster = SimCluster(Shape(instance_id="m", num_blocks=10, tiers=TierShapes()), max_model_len=64)
    serve(cluster, 0, prompt(32, seed=0))
    serve(cluster, 1, prompt(32, seed=1))
    assert held(cluster, request(prompt(32, seed=0))) == 28


def test_prefix_of_a_waiting_request_counts_as_held():
    cluster = SimCluster(Shape(instance_id="m"))
    cluster.add(0, prompt(24), HERE, max_tokens=2)
    assert held(cluster, request(np.concatenate([prompt(24)[:16], prompt(16, seed=1)]))) == 16
    cluster.abort(0)
    assert held(cluster, request(prompt(24))) == 0


def test_prefix_that_is_being_computed_counts_as_held():
    cluster = SimCluster(Shape(instance_id="m", max_num_batched_tokens=8))
    cluster.add(0, prompt(24), HERE, max_tokens=2)
    cluster.plan("m")
    assert held(cluster, request(prompt(24))) == 23


def test_request_that_may_not_look_finds_nothing():
    cluster = SimCluster(Shape(instance_id="m"))
    serve(cluster, 0, prompt(24))
    assert held(cluster, request(prompt(24), skip_reading_prefix_cache=True)) == 0
    assert held(cluster, request(prompt(24), sampling={"num_prompt_logprobs": 1})) == 0


def test_request_that_needs_more_blocks_than_are_free_has_no_room():
    cluster = SimCluster(Shape(instance_id="m", num_blocks=8))
    cluster.add(0, prompt(16), HERE, max_tokens=2)
    cluster.plan("m")
    assert not cluster.central.meet(request(prompt(24, seed=1))).found_on("m").has_room


def test_waiting_tokens_that_were_found_are_not_missing():
    cluster = SimCluster(Shape(instance_id="m"))
    serve(cluster, 0, prompt(24))
    again = request(np.concatenate([prompt(24), prompt(8, seed=1)]))
    newcomer = cluster.central.meet(again)
    newcomer.found_on("m")
    cluster.central.add(again, HERE, newcomer)
    load = cluster.central.load("m")
    assert (load.num_queued_tokens, load.num_missing_tokens) == (32, 8)


def test_resumed_request_is_looked_up_with_its_output():
    cluster = SimCluster(Shape(instance_id="m"))
    serve(cluster, 0, prompt(24))
    resumed = request(prompt(24)[:16], output_token_ids=prompt(24)[16:20])
    assert held(cluster, resumed) == 16
    assert cluster.central.meet(resumed).found_on("m").num_tokens == 20


def test_prompt_is_hashed_once_and_every_sequence_owns_its_hashes():
    cluster = SimCluster(Shape(instance_id="p"), Shape(instance_id="d"))
    newcomer = cluster.central.meet(request(prompt(24)))
    kv = cluster.instances["p"].kv
    first, second = newcomer.take_hashes(kv), newcomer.take_hashes(cluster.instances["d"].kv)
    assert first.digests == second.digests == kv.hash_prompt(prompt(24)).digests
    first.extend(prompt(28))
    assert len(second.digests) == 6


def test_equal_prompts_have_equal_keys():
    cluster = SimCluster(Shape(instance_id="m"))

    def key(token_ids):
        newcomer = cluster.central.meet(request(token_ids))
        newcomer.found_on("m")
        return newcomer.key

    assert key(prompt(24)) == key(prompt(24)) != key(prompt(24, seed=1))
