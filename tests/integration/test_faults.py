"""Deployments that are broken under load: answers are exact or errors, nothing hangs, and every block comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import httpx
import pytest
from support.fault_cluster import (
    LIMIT_S,
    QUIESCE_TIMEOUT_S,
    SETTINGS,
    SILENCE_LIMIT_S,
    TRANSFER_TIMEOUT_S,
    Broken,
    alive_in,
    broken_deployment,
)
from support.fault_load import Outcome, body

from blockferry.engine.request import FinishReason

pytestmark = [pytest.mark.ray, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(600)]

IN_SHORT = "dense over tcp"  # what `make test` runs; the rest is for `make test-faults`


@pytest.fixture(
    scope="module",
    params=[IN_SHORT, *(pytest.param(one, marks=pytest.mark.full) for one in SETTINGS if one != IN_SHORT)],
)
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    with broken_deployment(SETTINGS[request.param], tmp_path_factory.mktemp("faults")) as deployment:
        yield deployment


def check(outcome: Outcome, *, num_requests: int) -> None:
    """Exact, or an error that says so, in time."""
    print(outcome)
    assert outcome.wrong == []
    assert outcome.num_hung == 0
    assert outcome.slowest_s <= LIMIT_S
    assert outcome.num_requests == num_requests


# the tests of a deployment run in this order: each takes an instance away that the later ones do without


def test_clients_that_leave_and_requests_that_are_aborted_at_random_moments(broken: Broken) -> None:
    draw = random.Random(1)
    with broken.under(broken.load(40, leaving=0.5)) as outcome:
        reasons = broken.abort_at_random([draw.uniform(0.0, 1.0) for _ in range(20)])
    assert set(reasons) <= {FinishReason.ABORT, FinishReason.LENGTH}
    check(outcome, num_requests=40)
    assert outcome.num_errors == 0
    broken.settle()


def test_a_decode_rank_that_freezes_in_mid_transfer_and_comes_back(broken: Broken) -> None:
    victim = broken.alive("decode")[0]
    with broken.under(broken.load(24)) as outcome:
        broken.freeze(victim)
        time.sleep(TRANSFER_TIMEOUT_S * 1.75)  # its transfers time out; it is not yet given up
        broken.thaw(victim)
    check(outcome, num_requests=24)
    assert outcome.num_errors == 0
    assert victim in broken.alive("decode")
    broken.settle()


def test_a_prefill_rank_that_freezes_and_comes_back(broken: Broken) -> None:
    victim = broken.alive("prefill")[0]
    with broken.under(broken.load(24)) as outcome:
        broken.wait_for_transfers()
        broken.freeze(victim)
        time.sleep(TRANSFER_TIMEOUT_S * 1.75)
        broken.thaw(victim)
    check(outcome, num_requests=24)
    assert outcome.num_errors == 0
    assert victim in broken.alive("prefill")
    broken.settle()


def test_a_decode_rank_that_comes_back_after_the_connection_was_given_up(broken: Broken) -> None:
    victim = broken.alive("decode")[0]
    with broken.under(broken.load(24)) as outcome:
        broken.wait_for_transfers()
        broken.freeze(victim)
        time.sleep(TRANSFER_TIMEOUT_S + QUIESCE_TIMEOUT_S + 0.7)
        broken.thaw(victim)
    check(outcome, num_requests=24)
    assert outcome.num_errors == 0
    assert victim in broken.alive("decode")
    broken.settle()


def test_a_prefill_rank_killed_in_mid_transfer(broken: Broken) -> None:
    victim = broken.alive("prefill")[0]
    with broken.under(broken.load(30)) as outcome:
        broken.wait_for_transfers()
        broken.kill(victim)
    check(outcome, num_requests=30)
    assert outcome.num_exact == 30, "what was cut goes on at the other one"
    assert victim not in broken.alive("prefill")
    broken.settle()
    assert httpx.get(f"{broken.live.running.url}/health", timeout=30).status_code == 200


def test_a_decode_rank_frozen_for_good_is_given_up_and_killed(broken: Broken) -> None:
    victim = broken.alive("decode")[0]
    with broken.under(broken.load(24)) as outcome:
        broken.wait_for_transfers()
        broken.freeze(victim)
        broken.until(lambda status: victim not in alive_in(status, "decode"), limit_s=SILENCE_LIMIT_S + 10.0)
        broken.thaw(victim)  # what it had begun goes on, until Ray kills it
    check(outcome, num_requests=24)
    assert outcome.num_exact == 24, "what was cut goes on at the other one"
    broken.settle()


def test_without_a_prefill_instance_every_request_ends_with_an_error_in_time(broken: Broken) -> None:
    (victim,) = broken.alive("prefill")
    with broken.under(broken.load(16)) as outcome:
        broken.wait_for_transfers()
        broken.freeze(victim)
        broken.until(lambda status: not status["is_serving"], limit_s=SILENCE_LIMIT_S + 10.0)
        broken.thaw(victim)
    check(outcome, num_requests=16)
    answer = httpx.post(f"{broken.live.running.url}/v1/completions", json=body(broken.prompts[0], 4), timeout=30)
    assert answer.status_code == 503
    assert victim in answer.json()["error"]["message"]
    broken.settle()
