"""A rank whose scheduler dies amid requests and that another scheduler takes over, tiers included. Without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import complete
from support.tiny_mtp import Likeness, build_mtp

from blockferry.cluster import bring_up
from blockferry.cluster.actors import WorkerActor
from blockferry.cluster.deployment import Deployment, load_deployment
from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.instance_plans import plan_of
from blockferry.cluster.offload_settings import tier_settings
from blockferry.cluster.running import InstanceRun, Running
from blockferry.cluster.scheduler_host import SchedulerSettings, build_loop
from blockferry.cluster.scheduler_loop import SchedulerLoop
from blockferry.cluster.worker_host import WorkerHost
from blockferry.connectors.transport.hosts import Hosts
from blockferry.engine.request import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
PROMPTS = [[(seed * 37 + position * 11) % 180 + 3 for position in range(120)] for seed in range(6)]
TEXT = """
model: {{path: {model}, dtype: float32, max_model_len: 256}}
cache: {{num_blocks: 24}}
speculation: {speculation}
instances: [{{role: mixed, offload: {{cpu_gib: 0.01}}}}]
"""


@dataclasses.dataclass(kw_only=True)
class Rank:
    """One rank and what is known of it."""

    deployment: Deployment
    instance: InstanceRun
    host: WorkerHost


@pytest.fixture(params=["plain", "drafting"])
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rank]:
    model = build_mtp("llama", tmp_path, likeness=Likeness.SOME)
    speculation = f"{{method: mtp, head: {model.head_path}}}" if request.param == "drafting" else "{}"
    file = tmp_path / "deployment.yaml"
    file.write_text(f"name: host-{os.getpid()}\n{TEXT.format(model=model.path, speculation=speculation)}")
    deployment = load_deployment(file)
    config = deployment.config
    instance = Running(deployment=deployment, hosts=Hosts.ONE).name_next(0)
    host = WorkerHost(bring_up._worker_settings(config, instance.placed, tp_rank=0, pp_rank=0, hosts=Hosts.ONE))
    host.load(init_method="")
    instance.plan = plan_of(config.model, deployment.header, config.instances[0], where="instances[0]")
    instance.tiers = tier_settings(instance.plan, config.instances[0], where="instances[0]")
    host.create_pool(instance.plan, instance.tiers)
    yield Rank(deployment=deployment, instance=instance, host=host)
    host.stop()
    host.close()


@contextlib.contextmanager
def scheduled(rank: Rank) -> Iterator[SchedulerLoop]:
    """A scheduler for the rank, which dies at the end and says nothing."""
    settings = SchedulerSettings(
        deployment="host",
        model="tiny",
        max_model_len=256,
        instances=(bring_up.settings_of(rank.instance),),
        connector=None,
        has_remote_ranks=False,
    )
    loop = build_loop(settings, bind_host="")
    loop._say_goodbye = lambda _reason: None  # type: ignore[method-assign]
    threads = [
        threading.Thread(target=loop.run),
        threading.Thread(target=rank.host.run, args=(loop.worker_endpoints.local,)),
    ]
    for thread in threads:
        thread.start()
    try:
        while not loop.is_complete:
            time.sleep(0.02)
        yield loop
    finally:
        loop.stop("killed")
        threads[0].join(20)
    assert threads[1].is_alive(), "the rank goes on: it does not know yet"


def answers(loop: SchedulerLoop) -> list[list[int]]:
    async def ask() -> list[list[int]]:
        client = ZmqEngineClient(loop.client_endpoints.local)
        await client.connect()
        try:
            done = await asyncio.gather(*(complete(client, prompt, SAMPLING) for prompt in PROMPTS))
            (instance,) = (await client.status())["instances"]
            assert instance["tiers"]["memory_stored_blocks"] > 0
            assert instance["speculation"] is None or instance["speculation"]["num_accepted"] > 0
            return [one.token_ids for one in done]
        finally:
            client.close()

    return asyncio.run(ask())


def half_an_answer(loop: SchedulerLoop) -> None:
    async def ask() -> None:
        client = ZmqEngineClient(loop.client_endpoints.local)
        await client.connect()
        requests = [asyncio.ensure_future(complete(client, prompt, SAMPLING)) for prompt in reversed(PROMPTS)]
        await asyncio.sleep(0.3)
        loop.stop("killed")
        await asyncio.sleep(0.1)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        client.close()

    asyncio.run(ask())


def test_another_scheduler_takes_a_rank_over_and_gets_the_same_answers(rank: Rank) -> None:
    with scheduled(rank) as loop:
        expected = answers(loop)
        half_an_answer(loop)
    rank.host.reset()
    with scheduled(rank) as loop:
        assert answers(loop) == expected
    rank.host.reset()


def test_a_worker_that_has_shut_down_leaves_no_objects_to_go_through_when_its_process_ends(rank: Rank) -> None:
    actor = WorkerActor(rank.host._settings)
    try:
        actor.shutdown()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()
