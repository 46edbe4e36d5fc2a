"""A scheduler loop and worker loops in threads of one process, over real ZeroMQ, without Ray and without a model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from blockferry.cluster.engine_client import ZmqEngineClient
from blockferry.cluster.scheduler_host import InstanceSettings, SchedulerSettings, build_loop, make_instance
from blockferry.cluster.scheduler_loop import LoopTiming, SchedulerLoop
from blockferry.cluster.sockets import Endpoint
from blockferry.cluster.worker_loop import WorkerLoop, WorkerTiming
from blockferry.connectors.base import TransferCommand, TransferEvent, TransferState
from blockferry.engine.config import CacheConfig, ConnectorConfig, Role, SchedulerConfig, SpeculationConfig
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Request, SamplingParams, TokenLogprobs
from blockferry.engine.wire import RowLogprobs, StepPlan, StepResult

BLOCK_SIZE = 16
NUM_BLOCKS = 65
MAX_MODEL_LEN = 256


class SchedulerCrash(Exception):
    """What a test's callback may raise to end the scheduler as a bug would."""


class Fault:
    """Lets the first worker fail that is to draw a token of a position. Shared by workers; nobody else fails."""

    def __init__(self, position: int) -> None:
        self._positions = {position}
        self._lock = threading.Lock()

    def strikes(self, positions: np.ndarray) -> bool:
        with self._lock:
            hit = self._positions.intersection(positions.tolist())
            self._positions -= hit
            return bool(hit)


class EchoExecutor:
    """A worker whose next token is always 7, or its position; it may be told to fail or to be slow.

    Tokens that are positions come with log probabilities, whether they were asked for or not. Where the plan asks for
    proposals, they are the tokens to come, but for positions that divide by 5.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.error = ""
        self.says_positions = False
        self.fault: Fault | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self.delay_s)
        if self.error:
            raise RuntimeError(self.error)
        firsts = (plan.num_computed + plan.num_scheduled)[plan.sample]
        counts = np.ones(len(firsts), np.int32)
        if len(plan.num_drafts):
            firsts -= plan.num_drafts[plan.sample]
            counts += _num_accepted(plan, self._token)
        positions = np.concatenate([first + np.arange(count) for first, count in zip(firsts, counts)] or [firsts])
        if self.fault is not None and self.fault.strikes(positions):
            raise RuntimeError("told to fail")
        rows = plan.rows[plan.sample].tolist()
        nexts = (firsts + counts)[:, None] + np.arange(plan.num_proposals, dtype=np.int32)
        return StepResult(
            step_id=plan.step_id,
            token_ids=self._token(positions.astype(np.int32)),
            num_tokens=counts if len(plan.num_drafts) else counts[:0],
            proposals=np.where(nexts % 5, self._token(nexts), 1).astype(np.int32),
            logprobs=tuple(map(_logprobs, rows, firsts.tolist(), counts.tolist())) if self.says_positions else (),
        )

    def _token(self, positions: np.ndarray) -> np.ndarray:
        return positions if self.says_positions else np.full_like(positions, 7)


def _num_accepted(plan: StepPlan, token_at: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Of every sampling row's drafts."""
    drafts = np.split(plan.draft_token_ids, np.cumsum(plan.num_drafts)[:-1])
    stops = plan.num_computed + plan.num_scheduled
    held = [
        int(np.cumprod(token_at(np.arange(stop - len(draft), stop, dtype=np.int32)) == draft).sum())
        for stop, draft in zip(stops.tolist(), drafts)
    ]
    return np.array(held, np.int32)[plan.sample]


def _logprobs(row: int, position: int, count: int) -> RowLogprobs:
    entries = tuple(
        TokenLogprobs(token_ids=np.array([place], np.int32), logprobs=np.array([-place / 100], np.float32), rank=1)
        for place in range(position, position + count)
    )
    return RowLogprobs(row=row, first_position=position, is_prompt=False, entries=entries)


class InstantFerry:
    """A connector whose transfers are done at once, or fail when told to."""

    def __init__(self, instance_id: str, report: Callable[[TransferEvent], None]) -> None:
        self._instance_id = instance_id
        self._report = report
        self.state = TransferState.DONE
        self.commands: list[TransferCommand] = []
        self.stuck_for_s = 0.0

    def start(self, command: TransferCommand) -> None:
        self.commands.append(command)
        self._report(
            TransferEvent(
                transfer_id=command.transfer_id,
                instance_id=self._instance_id,
                rank=0,
                state=self.state,
                num_bytes=sum(1000 * len(part.src_block_ids) for part in command.parts),
                num_runs=1,
                duration_s=0.001,
                reason="told to fail" if self.state is TransferState.FAILED else "",
            )
        )

    def cancel(self, transfer_id: int) -> None:
        """Nothing is ever under way."""

    @property
    def stuck_s(self) -> float:
        return self.stuck_for_s


@dataclasses.dataclass(kw_only=True)
class Rank:
    """One worker of the rig."""

    loop: WorkerLoop
    executor: EchoExecutor
    ferry: InstantFerry
    thread: threading.Thread


@dataclasses.dataclass(kw_only=True)
class Rig:
    """Everything that runs."""

    scheduler: SchedulerLoop
    ranks: dict[str, Rank]

    @property
    def endpoint(self) -> Endpoint:
        return self.scheduler.client_endpoints.local

    def join(self, name: str, role: Role) -> None:
        """An instance is added to what runs, and its rank started."""
        self.scheduler.add_instance(make_instance(instance_settings(name, role), max_model_len=MAX_MODEL_LEN))
        self.ranks[name] = _rank(name, self.scheduler)


@contextlib.contextmanager
def running_loops(
    roles: dict[str, Role],
    timing: LoopTiming | None = None,
    *,
    bind_host: str = "127.0.0.1",
    end_instance: Callable[[str], None] = lambda _instance_id: None,
    **options: object,
) -> Iterator[Rig]:
    """Instances by name; everything has connected on entry and has ended afterwards."""
    is_ferrying = Role.MIXED not in roles.values()
    settings = SchedulerSettings(
        deployment="rig",
        model="echo",
        max_model_len=MAX_MODEL_LEN,
        instances=tuple(instance_settings(name, role, **options) for name, role in roles.items()),
        connector=ConnectorConfig() if is_ferrying else None,
        has_remote_ranks=False,
        timing=timing or LoopTiming(),
    )
    scheduler = build_loop(settings, bind_host=bind_host, end_instance=end_instance)
    scheduler_thread = threading.Thread(target=_run, args=(scheduler,), name="scheduler")
    scheduler_thread.start()
    ranks = {name: _rank(name, scheduler) for name in roles}
    try:
        deadline_s = time.monotonic() + 10
        while not scheduler.is_complete:
            assert time.monotonic() < deadline_s, "workers did not connect"
            time.sleep(0.005)
        yield Rig(scheduler=scheduler, ranks=ranks)
    finally:
        scheduler.stop("the rig is taken down")
        scheduler_thread.join(10)
        for rank in ranks.values():
            rank.loop.stop()
            rank.thread.join(10)
        assert not scheduler_thread.is_alive()
        assert not any(rank.thread.is_alive() for rank in ranks.values())


def _run(scheduler: SchedulerLoop) -> None:
    with contextlib.suppress(SchedulerCrash):
        scheduler.run()


def _rank(name: str, scheduler: SchedulerLoop) -> Rank:
    executor = EchoExecutor()
    loop = WorkerLoop(instance_id=name, rank=0, executor=executor, timing=WorkerTiming(beat_s=0.1, stop_poll_s=0.02))
    ferry = InstantFerry(name, loop.on_transfer_event)
    endpoint = scheduler.worker_endpoints.remote or scheduler.worker_endpoints.local
    thread = threading.Thread(target=loop.run, args=(endpoint, ferry), name=name)
    thread.start()
    return Rank(loop=loop, executor=executor, ferry=ferry, thread=thread)


def instance_settings(
    name: str,
    role: Role,
    *,
    max_queue_len: int = 4096,
    max_num_seqs: int = 64,
    speculation: SpeculationConfig | None = None,
) -> InstanceSettings:
    spec = AttentionSpec(block_size=BLOCK_SIZE, content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=4))
    kv = KVCacheConfig(
        num_blocks=NUM_BLOCKS, groups=(KVCacheGroup(layer_ids=(0,), spec=spec),), hash_block_size=BLOCK_SIZE
    )
    return InstanceSettings(
        instance_id=name,
        role=role,
        num_ranks=1,
        kv=kv,
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_queue_len=max_queue_len, max_num_seqs=max_num_seqs, speculation=speculation),
    )


def request(handle: int, *, num_prompt_tokens: int = 20, max_tokens: int = 5) -> Request:
    return Request(
        request_id=f"r{handle}",
        handle=handle,
        prompt_token_ids=np.arange(num_prompt_tokens, dtype=np.int32),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_s=0.0,
    )


async def finish(client: ZmqEngineClient, **shape: int):
    outputs = [one async for one in client.submit(request(client.next_handle(), **shape))]
    return [token_id for one in outputs for token_id in one.token_ids], outputs[-1]


async def connected(rig: Rig) -> ZmqEngineClient:
    client = ZmqEngineClient(rig.endpoint, resume_timeout_s=0.0)  # what is lost ends at once
    await client.connect()
    return client


async def until(condition, *, limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        await asyncio.sleep(0.01)
