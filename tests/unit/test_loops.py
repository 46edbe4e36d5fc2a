"""Scheduler loop, worker loops and client together, over ZeroMQ in one process: requests, failures, goodbyes."""

import asyncio

import pytest
import zmq
import zmq.asyncio
from support.loops import MAX_MODEL_LEN, connected, finish, request, running_loops, until

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.scheduler_loop import LoopTiming
from blockferry.cluster.secret import ClusterSecret
from blockferry.cluster.sockets import Endpoint, connect_dealer
from blockferry.connectors.base import TransferState
from blockferry.engine.config import Role
from blockferry.engine.errors import InstanceFailed, QueueFull, RequestRejected
from blockferry.engine.request import FinishReason

MIXED = {"mixed-0": Role.MIXED}
PD = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


async def is_idle(client: ZmqEngineClient) -> bool:
    status = await client.status()
    has_all = all(one["num_free_blocks"] == one["num_blocks"] for one in status["instances"])
    return status["num_unfinished"] == 0 and has_all


async def test_tokens_come_back_in_order_with_stats():
    with running_loops(MIXED) as rig:
        client = await connected(rig)
        token_ids, last = await finish(client)
        client.close()
    assert token_ids == [7] * 5
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.stats.num_prompt_tokens, last.stats.num_output_tokens) == (20, 5)


async def test_blocks_are_ferried_between_prefill_and_decode():
    with running_loops(PD) as rig:
        client = await connected(rig)
        token_ids, last = await finish(client)
        status = await client.status()
        client.close()
        commands = rig.ranks["prefill-0"].ferry.commands
    assert token_ids == [7] * 5
    assert [len(part.src_block_ids) for command in commands for part in command.parts] == [2]
    assert (last.stats.transfer_blocks, last.stats.transfer_bytes) == (2, 2000)
    assert (status["transfers"]["num_done"], status["transfers"]["num_bytes"]) == (1, 2000)


async def test_failed_transfer_is_recomputed_on_the_decode_side():
    with running_loops(PD) as rig:
        rig.ranks["prefill-0"].ferry.state = TransferState.FAILED
        client = await connected(rig)
        token_ids, last = await finish(client)
        client.close()
    assert token_ids == [7] * 5
    assert last.finish_reason is FinishReason.LENGTH


async def test_two_clients_may_use_the_same_handles():
    with running_loops(MIXED) as rig:
        first, second = await connected(rig), await connected(rig)
        results = await asyncio.gather(*(finish(client, max_tokens=n) for n, client in ((3, first), (9, second))))
        first.close()
        second.close()
    assert [len(token_ids) for token_ids, _ in results] == [3, 9]


async def test_request_that_never_fits_is_rejected_at_once():
    with running_loops(MIXED) as rig:
        client = await connected(rig)
        with pytest.raises(RequestRejected, match="max_model_len"):
            await finish(client, num_prompt_tokens=MAX_MODEL_LEN + 1)
        client.close()


async def test_full_queue_is_said_to_be_full():
    with running_loops(MIXED, max_queue_len=2, max_num_seqs=1) as rig:
        rig.ranks["mixed-0"].executor.delay_s = 0.05
        client = await connected(rig)
        results = await asyncio.gather(*(finish(client) for _ in range(8)), return_exceptions=True)
        client.close()
    assert any(isinstance(one, QueueFull) for one in results)
    assert all(isinstance(one, QueueFull) or one[0] == [7] * 5 for one in results)


async def test_handle_in_use_is_refused_by_the_client():
    with running_loops(MIXED) as rig:
        rig.ranks["mixed-0"].executor.delay_s = 0.02
        client = await connected(rig)
        stream = client.submit(request(1, max_tokens=50))
        await anext(stream)
        with pytest.raises(ValueError, match="handle 1"):
            await anext(client.submit(request(1)))
        await stream.aclose()
        client.close()


@pytest.mark.parametrize("roles", [MIXED, PD])
async def test_leaving_the_iteration_aborts_the_request(roles):
    with running_loops(roles) as rig:
        for rank in rig.ranks.values():
            rank.executor.delay_s = 0.01
        client = await connected(rig)
        stream = client.submit(request(1, max_tokens=200))
        async for _ in stream:
            break
        await stream.aclose()
        await until(lambda: is_idle(client))
        client.close()


async def test_abort_ends_the_iterator():
    with running_loops(MIXED) as rig:
        rig.ranks["mixed-0"].executor.delay_s = 0.01
        client = await connected(rig)
        last = None
        async for output in client.submit(request(1, max_tokens=200)):
            last = output
            await client.abort(1)
        client.close()
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT


async def test_requests_of_a_vanished_client_are_aborted():
    with running_loops(PD) as rig:
        for rank in rig.ranks.values():
            rank.executor.delay_s = 0.01
        leaving, staying = await connected(rig), await connected(rig)
        await anext(leaving.submit(request(1, max_tokens=200)))
        leaving.close()
        await until(lambda: is_idle(staying))
        staying.close()


async def test_failed_step_fails_its_instance_and_its_requests():
    with running_loops(MIXED) as rig:
        client = await connected(rig)
        await finish(client)
        rig.ranks["mixed-0"].executor.error = "out of memory"
        _, last = await finish(client)
        status = await client.status()
        with pytest.raises(InstanceFailed, match="out of memory"):
            await finish(client)
        client.close()
    assert last.finish_reason is FinishReason.ERROR
    assert "out of memory" in last.error
    assert not status["healthy"]
    assert status["instances"][0]["state"] == "failed"


async def test_other_instances_go_on_when_one_fails():
    with running_loops({"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}) as rig:
        rig.scheduler.report_failure("mixed-0", "its process has died")
        client = await connected(rig)
        results = [await finish(client) for _ in range(4)]
        status = await client.status()
        client.close()
    assert all(token_ids == [7] * 5 for token_ids, _ in results)
    assert "mixed-0: its process has died" in status["reason"]


async def test_worker_that_leaves_is_noticed():
    with running_loops(MIXED) as rig:
        client = await connected(rig)
        rig.ranks["mixed-0"].loop.stop()
        rig.ranks["mixed-0"].thread.join(5)
        _, last = await finish(client, max_tokens=3)
        client.close()
    assert last.finish_reason is FinishReason.ERROR
    assert "lost its connection" in last.error


async def test_silent_worker_is_declared_failed():
    with running_loops(MIXED, LoopTiming(silence_limit_s=0.05, beat_s=0.05)) as rig:  # beats come every 0.1 s
        client = await connected(rig)

        async def is_failed() -> bool:
            return "silent" in (await client.status())["reason"]

        await until(is_failed)
        client.close()


async def test_rank_whose_transfer_thread_is_stuck_fails_its_instance():
    with running_loops(PD) as rig:
        client = await connected(rig)
        rig.ranks["prefill-0"].ferry.stuck_for_s = 60.0

        async def is_failed() -> bool:
            return "transfer thread" in (await client.status())["reason"]

        await until(is_failed)
        client.close()


async def test_processes_of_a_failed_instance_are_ended_once():
    ended: list[str] = []
    with running_loops({"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}, end_instance=ended.append) as rig:
        for _ in range(2):
            rig.scheduler.report_failure("mixed-0", "it is frozen")
        client = await connected(rig)
        await finish(client)
        client.close()
    assert ended == ["mixed-0"]


async def test_deployment_serves_as_long_as_every_role_has_an_instance():
    with running_loops({"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE}) as rig:
        client = await connected(rig)
        for instance_id, is_serving in (("prefill-0", True), ("prefill-1", False)):
            rig.scheduler.report_failure(instance_id, "its process has died")

            async def is_noted(instance_id: str = instance_id) -> bool:
                return instance_id in (await client.status())["reason"]

            await until(is_noted)
            status = await client.status()
            assert (status["healthy"], status["is_serving"]) == (False, is_serving)
        client.close()


async def test_stopping_scheduler_ends_every_request_with_its_reason():
    with running_loops(MIXED) as rig:
        rig.ranks["mixed-0"].executor.delay_s = 0.01
        client = await connected(rig)
        stream = client.submit(request(1, max_tokens=200))
        await anext(stream)
        rig.scheduler.stop("maintenance")
        outputs = [output async for output in stream]
        with pytest.raises(InstanceFailed, match="maintenance"):
            await client.status()
        client.close()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error == "maintenance"
    assert rig.ranks["mixed-0"].loop.stop_reason == "maintenance"


async def test_nobody_at_the_endpoint_is_an_error_within_the_limit():
    client = ZmqEngineClient(Endpoint(url="ipc://@blockferry-nobody", secret=ClusterSecret.make()))
    with pytest.raises(InstanceFailed, match="no answer"):
        await client.connect(timeout_s=0.1)


async def test_malformed_messages_of_a_client_do_not_disturb_the_scheduler():
    with running_loops(MIXED) as rig:
        context = zmq.asyncio.Context()
        odd = context.socket(zmq.DEALER)
        connect_dealer(odd, rig.endpoint, identity=b"odd", linger_ms=0)
        for frames in (
            [b""],
            [b"q", b"junk"],
            [b"q"],
            [b"?", b"x"],
            [b"a", b"\xff"],
            [b"p", b""],
            [b"q", b"\x92\x01\x80"],
        ):
            await odd.send_multipart(frames)
        client = await connected(rig)
        token_ids, _ = await finish(client)
        client.close()
        context.destroy(linger=0)
    assert token_ids == [7] * 5
