"""Instances come and go while requests run: scheduler and worker loops over real sockets, without Ray."""

import asyncio

import pytest
from support.loops import MAX_MODEL_LEN, Rig, connected, finish, instance_settings, request, running_loops, until

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.scheduler_host import make_instance
from blockferry.engine.config import Role
from blockferry.engine.errors import InstanceFailed
from blockferry.engine.request import FinishReason

MIXED = {"mixed-0": Role.MIXED}
PD = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def slow(rig: Rig, delay_s: float = 0.01) -> None:
    for rank in rig.ranks.values():
        rank.executor.delay_s = delay_s


async def states(client: ZmqEngineClient) -> dict[str, str]:
    return {one["instance_id"]: one["state"] for one in (await client.status())["instances"]}


async def until_state(client: ZmqEngineClient, instance_id: str, state: str | None) -> None:
    async def is_reached() -> bool:
        return (await states(client)).get(instance_id) == state

    await until(is_reached)


async def test_instance_that_joins_serves_once_its_ranks_have_connected():
    with running_loops(MIXED) as rig:
        client = await connected(rig)
        rig.scheduler.add_instance(make_instance(instance_settings("mixed-1", Role.MIXED), max_model_len=MAX_MODEL_LEN))
        status = await client.status()
        assert (status["healthy"], status["is_serving"]) == (False, True)
        assert (await states(client))["mixed-1"] == "starting"
        client.close()


async def test_work_goes_to_an_instance_that_joined():
    with running_loops(PD) as rig:
        client = await connected(rig)
        rig.join("decode-1", Role.DECODE)
        await until_state(client, "decode-1", "serving")
        rig.scheduler.drain("decode-0", 10.0)
        token_ids, last = await finish(client)
        assert token_ids == [7] * 5
        assert last.stats.transfer_blocks == 2
        assert (await client.status())["healthy"]
        client.close()


async def test_draining_instance_ends_what_it_has_and_gets_nothing_new():
    with running_loops({"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}) as rig:
        client = await connected(rig)
        slow(rig)
        running = [asyncio.ensure_future(finish(client, max_tokens=20)) for _ in range(4)]
        await asyncio.sleep(0.05)
        rig.scheduler.drain("mixed-0", 30.0)
        num_steps = {one["instance_id"]: one["num_steps"] for one in (await client.status())["instances"]}
        results = await asyncio.gather(*running)
        await until_state(client, "mixed-0", "drained")
        assert all(last.finish_reason is FinishReason.LENGTH for _, last in results)
        assert num_steps["mixed-0"] > 0
        client.close()


async def test_drain_that_is_over_ends_requests_and_others_are_told_to_try_again():
    with running_loops(MIXED) as rig:
        client = await connected(rig)
        slow(rig)
        stream = client.submit(request(client.next_handle(), max_tokens=200))
        await anext(stream)
        rig.scheduler.drain("mixed-0", 0.1)
        with pytest.raises(InstanceFailed, match="starting or draining"):
            await finish(client)
        await until_state(client, "mixed-0", "drained")
        await stream.aclose()
        client.close()


async def test_removed_instance_is_told_to_stop_and_not_listed():
    with running_loops({"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}) as rig:
        client = await connected(rig)
        rig.scheduler.drain("mixed-0", 0.0)
        await until_state(client, "mixed-0", "drained")
        rig.scheduler.remove_instance("mixed-0")
        rig.ranks["mixed-0"].thread.join(5)
        assert rig.ranks["mixed-0"].loop.stop_reason == "its instance was removed"
        assert await states(client) == {"mixed-1": "serving"}
        assert await finish(client)
        client.close()


async def test_request_goes_on_when_the_instance_that_computed_its_prompt_has_left():
    with running_loops({"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}) as rig:
        client = await connected(rig)
        rig.ranks["decode-0"].executor.delay_s = 0.01
        stream = client.submit(request(client.next_handle(), max_tokens=50))
        num_tokens = [len((await anext(stream)).token_ids) for _ in range(2)]
        rig.scheduler.drain("prefill-0", 10.0)
        await until_state(client, "prefill-0", "drained")
        rig.scheduler.remove_instance("prefill-0")
        outputs = [output async for output in stream]
        assert sum(num_tokens) + sum(len(output.token_ids) for output in outputs) == 50
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert await states(client) == {"decode-0": "serving"}
        client.close()


async def test_instance_in_use_is_not_removed():
    with running_loops(MIXED) as rig:
        with pytest.raises(ValueError, match="instance mixed-0 is serving"):
            rig.scheduler.remove_instance("mixed-0")
        client = await connected(rig)
        assert await finish(client)
        client.close()


async def test_instance_that_does_not_come_up_is_given_up_when_it_is_removed():
    ended: list[str] = []
    with running_loops(MIXED, end_instance=ended.append) as rig:
        client = await connected(rig)
        rig.scheduler.add_instance(make_instance(instance_settings("mixed-1", Role.MIXED), max_model_len=MAX_MODEL_LEN))
        rig.scheduler.remove_instance("mixed-1")
        status = await client.status()
        assert (ended, status["healthy"]) == (["mixed-1"], True)
        rig.scheduler.report_gone("mixed-1")
        await until_state(client, "mixed-1", None)
        client.close()


async def test_failed_instance_counts_until_it_is_told_to_leave():
    ended: list[str] = []
    with running_loops({"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}, end_instance=ended.append) as rig:
        client = await connected(rig)
        rig.scheduler.report_failure("mixed-0", "it is frozen")
        await until_state(client, "mixed-0", "failed")
        rig.join("mixed-2", Role.MIXED)
        await until_state(client, "mixed-2", "serving")
        assert not (await client.status())["healthy"]
        rig.scheduler.remove_instance("mixed-0")
        status = await client.status()
        assert (status["healthy"], status["reason"]) == (True, "")
        rig.scheduler.report_gone("mixed-0")
        await until_state(client, "mixed-0", None)
        assert ended == ["mixed-0"]
        client.close()


async def test_late_words_of_an_instance_that_has_left_are_ignored():
    with running_loops({"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}) as rig:
        client = await connected(rig)
        rig.scheduler.drain("mixed-0", 0.0)
        await until_state(client, "mixed-0", "drained")
        rig.scheduler.remove_instance("mixed-0")
        rig.scheduler.report_failure("mixed-0", "it stopped")
        rig.scheduler.report_gone("mixed-0")
        assert await finish(client)
        assert (await client.status())["healthy"]
        client.close()


async def test_ranks_on_other_hosts_can_join_a_scheduler_that_listened_to_its_own_host_only():
    with running_loops(MIXED, bind_host="") as rig:
        assert rig.scheduler.worker_endpoints.remote is None
        endpoints = rig.scheduler.open_to_others("127.0.0.1")
        assert rig.scheduler.open_to_others("127.0.0.1") == endpoints
        rig.join("mixed-1", Role.MIXED)
        client = await connected(rig)
        await until_state(client, "mixed-1", "serving")
        client.close()


async def test_address_of_another_host_is_refused():
    with running_loops(MIXED, bind_host="") as rig:
        with pytest.raises(ValueError, match=r"no port of 192\.0\.2\.1 can be bound"):
            rig.scheduler.open_to_others("192.0.2.1")
        client = await connected(rig)
        assert await finish(client)
        client.close()
