"""Requests over real sockets whose instance or scheduler ends: they go on elsewhere, or end with one error."""

import asyncio
import contextlib

import pytest
from support.loops import Fault, Rig, SchedulerCrash, request, running_loops, until

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.scheduler_loop import LoopTiming
from blockferry.engine.config import Role
from blockferry.engine.errors import InstanceFailed
from blockferry.engine.request import FinishReason

TWO_MIXED = {"mixed-0": Role.MIXED, "mixed-1": Role.MIXED}
PREFILLS = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL}
DECODES = {"decode-0": Role.DECODE, "decode-1": Role.DECODE}
NUM_OUTPUT = 40
WHOLE = list(range(20, 20 + NUM_OUTPUT))  # every token is its position


def slowed(rig: Rig) -> Rig:
    for rank in rig.ranks.values():
        rank.executor.delay_s, rank.executor.says_positions = 0.01, True
    return rig


@contextlib.asynccontextmanager
async def connected(rig: Rig, *, resume_timeout_s: float = 10.0):
    client = ZmqEngineClient(rig.endpoint, resume_timeout_s=resume_timeout_s)
    await client.connect()
    yield client
    client.close()


async def read(client: ZmqEngineClient, *, at: int = NUM_OUTPUT + 1, do=lambda: None):
    """A request's tokens and last output; when `at` tokens have come, something happens."""
    token_ids, has_happened = [], False
    async for output in client.submit(request(client.next_handle(), max_tokens=NUM_OUTPUT)):
        token_ids += output.token_ids
        if len(token_ids) >= at and not has_happened:
            has_happened = True
            do()
    return token_ids, output


async def busy_instance(client: ZmqEngineClient, role: str) -> str:
    status = await client.status()
    return next(one["instance_id"] for one in status["instances"] if one["num_running"] and one["role"] == role)


def fail_busy(rig: Rig, client: ZmqEngineClient, role: str) -> asyncio.Task:
    async def fail() -> None:
        rig.scheduler.report_failure(await busy_instance(client, role), "its process has died")

    return asyncio.ensure_future(fail())


@pytest.mark.parametrize(
    ("roles", "role"),
    [(TWO_MIXED, "mixed"), (PREFILLS | DECODES, "decode")],
    ids=["mixed", "decode"],
)
async def test_request_whose_instance_fails_goes_on_at_another_one(roles, role):
    with running_loops(roles) as rig:
        async with connected(slowed(rig)) as client:
            token_ids, last = await read(client, at=5, do=lambda: fail_busy(rig, client, role))
            await until(lambda: has_ended(client))
    assert token_ids == WHOLE
    assert (last.finish_reason, last.stats.num_resumes) == (FinishReason.LENGTH, 1)
    assert (last.stats.num_prompt_tokens, last.stats.num_output_tokens) == (20, NUM_OUTPUT)


@pytest.mark.parametrize("position", [20, 21, 40, 59])  # at 20 where the prompt is computed
async def test_request_goes_on_wherever_its_instance_fails(position):
    fault = Fault(position)
    with running_loops(PREFILLS | DECODES) as rig:
        for rank in rig.ranks.values():
            rank.executor.says_positions, rank.executor.fault = True, fault
        async with connected(rig) as client:
            token_ids, last = await read(client)
    assert (token_ids, last.stats.num_resumes) == (WHOLE, 1)


async def has_ended(client: ZmqEngineClient) -> bool:
    return (await client.status())["num_unfinished"] == 0


async def test_many_streams_survive_one_instance_exactly():
    with running_loops(TWO_MIXED) as rig:
        async with connected(slowed(rig)) as client:
            streams = [asyncio.ensure_future(read(client)) for _ in range(49)]
            hit = await read(client, at=5, do=lambda: rig.scheduler.report_failure("mixed-0", "its process has died"))
            answers = [hit, *await asyncio.gather(*streams)]
    assert all(token_ids == WHOLE for token_ids, _ in answers)
    assert sum(last.stats.num_resumes for _, last in answers) > 0


async def test_request_that_nobody_can_take_over_ends_with_one_error():
    with running_loops({"mixed-0": Role.MIXED}) as rig:
        async with connected(slowed(rig), resume_timeout_s=0.3) as client:
            token_ids, last = await read(
                client, at=5, do=lambda: rig.scheduler.report_failure("mixed-0", "its process has died")
            )
            with pytest.raises(InstanceFailed, match=r"within 0.3 s"):
                await read(client)
    assert token_ids == WHOLE[: len(token_ids)]
    assert last.finish_reason is FinishReason.ERROR
    assert "mixed-0 failed: its process has died; nobody could take it over within 0.3 s" in last.error


@pytest.mark.parametrize("is_noticed", [True, False], ids=["lost", "replaced"])
async def test_requests_go_on_with_a_new_scheduler(is_noticed):
    def crash(_instance_id: str) -> None:
        raise SchedulerCrash

    with running_loops({"mixed-0": Role.MIXED}, end_instance=crash) as old, running_loops(TWO_MIXED) as new:
        slowed(new)
        async with connected(slowed(old)) as client:
            cut = asyncio.Event()
            streams = [asyncio.ensure_future(read(client, at=5, do=cut.set)) for _ in range(8)]
            await cut.wait()
            if is_noticed:
                old.scheduler.report_failure("mixed-0", "and the scheduler with it")

                async def is_lost() -> bool:
                    return bool(client.lost_reason)

                await until(is_lost)
                with pytest.raises(InstanceFailed, match="SchedulerCrash"):
                    await client.status()
            late = asyncio.ensure_future(read(client))
            await client.reconnect(new.endpoint)
            answers = await asyncio.gather(*streams, late)
            assert client.lost_reason == ""
            await until(lambda: has_ended(client))
    assert all(token_ids == WHOLE for token_ids, _ in answers)
    assert [last.stats.num_resumes for _, last in answers[:8]] == [1] * 8


async def test_seed_is_the_same_on_every_instance(monkeypatch):
    seeds = []
    with running_loops(TWO_MIXED) as rig:
        for rank in slowed(rig).ranks.values():
            execute = rank.executor.execute

            def noting(plan, execute=execute):
                seeds.extend(new_row.sampling.seed for new_row in plan.new_rows)
                return execute(plan)

            monkeypatch.setattr(rank.executor, "execute", noting)
        async with connected(rig) as client:
            await read(client, at=5, do=lambda: fail_busy(rig, client, "mixed"))
    assert len(seeds) == 2
    assert len(set(seeds)) == 1


@pytest.mark.parametrize("how", ["abort", "leave"])
async def test_request_that_waits_to_be_resumed_can_be_given_up(how):
    with running_loops({"mixed-0": Role.MIXED}, LoopTiming(beat_s=0.05)) as rig:
        async with connected(slowed(rig)) as client:
            stream = client.submit(request(1, max_tokens=NUM_OUTPUT))
            await anext(stream)
            rig.scheduler.report_failure("mixed-0", "its process has died")
            rest = asyncio.ensure_future(collect(stream))

            async def is_failed() -> bool:
                return not (await client.status())["is_serving"]

            await until(is_failed)
            if how == "abort":
                await client.abort(1)
                assert (await rest)[-1].finish_reason is FinishReason.ABORT
            else:
                rest.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await rest
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert (await client.status())["num_unfinished"] == 0


async def collect(stream):
    return [output async for output in stream]


async def test_closed_client_ends_what_waits():
    with running_loops({"mixed-0": Role.MIXED}) as rig:
        async with connected(slowed(rig)) as client:
            stream = client.submit(request(1, max_tokens=NUM_OUTPUT))
            await anext(stream)
            rig.scheduler.report_failure("mixed-0", "its process has died")
            rest = asyncio.ensure_future(collect(stream))
            await asyncio.sleep(0.1)
            client.close()
            last = (await rest)[-1]
    assert (last.finish_reason, last.error) == (
        FinishReason.ERROR,
        "instance mixed-0 failed: its process has died; the client was closed",
    )
