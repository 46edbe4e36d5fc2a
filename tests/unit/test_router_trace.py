"""The router over a trace of many conversations, on simulated prefill and decode instances."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from support.simulator import VOCAB_SIZE, Shape, SimCluster

from blockferry.cluster.router import Candidate, Policy, candidate_of, least_loaded, prefix_affinity
from blockferry.engine.config import Role
from blockferry.engine.request import Request, SamplingParams

BLOCK_SIZE = 4
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One request of a conversation; it begins with all of the turn before."""

    step: int
    token_ids: np.ndarray


def conversations(num_conversations: int = 30, num_turns: int = 5, *, num_steps: int = 200) -> list[Turn]:
    """Three system prompts; turns of a conversation come at about equal distances. In order of arrival."""
    draw = np.random.default_rng(0)

    def tokens(num_tokens: int) -> np.ndarray:
        return draw.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)

    systems = [tokens(3 * BLOCK_SIZE) for _ in range(3)]
    turns = []
    for number in range(num_conversations):
        token_ids = systems[number % 3]
        steps = np.sort(draw.integers(0, num_steps, num_turns))
        for step in steps.tolist():
            token_ids = np.concatenate([token_ids, tokens(int(draw.integers(12, 28)))])
            turns.append(Turn(step, token_ids))
    return sorted(turns, key=lambda turn: turn.step)


def ideal_hit_tokens(turns: list[Turn]) -> int:
    """What one instance that forgets nothing would find."""
    seen: set[bytes] = set()
    total = 0
    for turn in turns:
        stops = range(BLOCK_SIZE, len(turn.token_ids) + 1, BLOCK_SIZE)
        prefixes = [turn.token_ids[:stop].tobytes() for stop in stops]
        total += min(sum(prefix in seen for prefix in prefixes) * BLOCK_SIZE, len(turn.token_ids) - 1)
        seen.update(prefixes)
    return total


def shape(instance_id: str, role: Role) -> Shape:
    return Shape(
        instance_id=instance_id,
        role=role,
        num_blocks=1500,
        block_size=BLOCK_SIZE,
        max_num_seqs=32,
        max_num_batched_tokens=32,
    )


def candidates(cluster: SimCluster, assigned: Counter[str]) -> list[Candidate]:
    return [
        candidate_of(
            cluster.central.load(instance_id),
            instance_id=instance_id,
            role=instance.role,
            num_assigned=assigned[instance_id],
        )
        for instance_id, instance in cluster.instances.items()
    ]


def replay(turns: list[Turn], policy: Policy) -> SimCluster:
    cluster = SimCluster(
        *(shape(name, Role.PREFILL) for name in PREFILLS),
        *(shape(name, Role.DECODE) for name in DECODES),
        max_model_len=200,
    )
    routes = {}
    waiting = list(enumerate(turns))
    for step in range(turns[-1].step + 1):
        while waiting and waiting[0][1].step <= step:
            handle, turn = waiting.pop(0)
            request = Request(
                request_id=f"r{handle}",
                handle=handle,
                prompt_token_ids=turn.token_ids,
                sampling=SamplingParams(max_tokens=4),
                arrival_s=cluster.now_s,
            )
            running = [routes[one] for one in routes if one not in cluster.finished]
            assigned = Counter(name for route in running for name in (route.prefill, route.decode))
            newcomer = cluster.central.meet(request)
            routes[handle] = policy(candidates(cluster, assigned), newcomer)
            cluster.central.add(request, routes[handle], newcomer)
            cluster.requests[handle] = request
        cluster.step_all()
    cluster.drain()
    return cluster


def num_hit_tokens(cluster: SimCluster) -> int:
    return sum(finished.stats.num_cached_tokens for finished in cluster.finished.values())


def ledger(cluster: SimCluster, instance_id: str):
    return cluster.instances[instance_id].kv.stats()


@pytest.fixture(scope="module")
def turns():
    return conversations()


@pytest.fixture(scope="module")
def by_affinity(turns):
    return replay(turns, prefix_affinity)


@pytest.fixture(scope="module")
def by_load(turns):
    return replay(turns, least_loaded)


def test_affinity_finds_nine_tenths_of_what_one_endless_cache_would(turns, by_affinity):
    assert num_hit_tokens(by_affinity) >= 0.9 * ideal_hit_tokens(turns)


def test_load_alone_does_not(turns, by_load):
    assert num_hit_tokens(by_load) < 0.9 * ideal_hit_tokens(turns)


def test_no_prefill_instance_computes_more_than_its_share(by_affinity):
    stats = [ledger(by_affinity, name) for name in PREFILLS]
    computed = [one.num_queried_tokens - one.num_hit_tokens for one in stats]
    assert max(computed) <= 1.5 * np.mean(computed)


def test_no_decode_instance_gets_more_than_its_share(by_affinity):
    num_queried = [ledger(by_affinity, name).num_queried_tokens for name in DECODES]
    assert max(num_queried) <= 1.5 * np.mean(num_queried)


def test_decode_instances_are_ferried_less_by_affinity(by_affinity, by_load):
    hits = [sum(ledger(one, name).num_hit_tokens for name in DECODES) for one in (by_affinity, by_load)]
    assert hits[0] > hits[1]


def test_every_block_is_free_in_the_end(by_affinity, by_load):
    by_affinity.check_all_free()
    by_load.check_all_free()
