"""A deployment without models: CentralScheduler and simulated workers, advanced by hand."""

import collections
import dataclasses

import numpy as np
from support.sim_cache import GARBAGE
from support.sim_chain import VOCAB_SIZE
from support.sim_drafts import NO_DRAFTS, SimDrafts
from support.sim_families import family_groups
from support.sim_tiers import SimTiers
from support.sim_worker import SimWorker, reference
from support.slab_serving import geometry

from blockferry.connectors.base import Overlap, TransferCommand, TransferEvent, TransferMode, TransferState
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.config import Role, SchedulerConfig
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.kv.tier_ledger import TierLedger
from blockferry.engine.kv.tier_policies import PolicyName, make_policy
from blockferry.engine.request import FinishReason, Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.handoff import HandoffOptions, LoadFailurePolicy
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.offload_seam import NO_TIERS
from blockferry.engine.scheduler.offloading import Offloading, OffloadOptions
from blockferry.engine.scheduler.outputs import Finished, Route, StepOutput
from blockferry.engine.wire import StepPlan

__all__ = ["VOCAB_SIZE", "Shape", "SimCluster", "SimTransfer", "TierShapes", "make_instance", "reference"]


@dataclasses.dataclass(slots=True)
class SimTransfer:
    """A command under way, once per executing rank. Its bytes may land until every rank has reported, however late."""

    command: TransferCommand
    ranks_left: list[int]
    issued_s: float
    watched: list[TransferEvent] = dataclasses.field(default_factory=list)  # reports that will come again

    @property
    def is_moving(self) -> bool:
        """Whether its bytes may land."""
        return bool(self.ranks_left) or any(event.is_watched for event in self.watched)

    def is_in_time(self, now_s: float) -> bool:
        """Whether it can still succeed."""
        return now_s <= self.issued_s + self.command.deadline_s


@dataclasses.dataclass(frozen=True, slots=True)
class Stray:
    """Bytes of a failed connection or an ended process: they may land until then."""

    command: TransferCommand
    until_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierShapes:
    """What an instance keeps outside of its pool."""

    units_per_block: tuple[int, ...] = (1,) * 8  # of the first groups as many as there are
    num_units: int = 100
    num_disk_units: int = 0
    policy: PolicyName = PolicyName.LRU
    options: OffloadOptions = dataclasses.field(default_factory=OffloadOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One simulated instance."""

    instance_id: str
    role: Role = Role.MIXED
    family: str = "full"  # see sim_families
    has_draft: bool = False
    pages_per_slab: tuple[int, ...] | None = None  # per group: its blocks are pages of slabs
    num_blocks: int = 64
    block_size: int = 4  # the hash block's size; see sim_families for the groups'
    retention_interval: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    num_steps_in_flight: int = 2
    max_queue_len: int = 1000
    policy: str = "fcfs"
    enable_caching: bool = True
    watermark: float = 0.01
    num_ranks: int = 1
    tiers: TierShapes | None = None
    drafts: SimDrafts | None = None  # None: one token per row and step


class SimCluster:
    """CentralScheduler, its workers and a clock, advanced by hand."""

    def __init__(
        self,
        *shapes: Shape,
        max_model_len: int = 96,
        mode: TransferMode = TransferMode.PUSH,
        lease_s: float = 60.0,
        transfer_timeout_s: float = 30.0,
        hold_s: float = 90.0,
        load_failure_policy: str = "recompute",
        overlap: Overlap = Overlap.NONE,
    ) -> None:
        self.now_s = 1000.0
        self.hold_s = hold_s
        self.max_model_len = max_model_len
        self.instances: dict[str, Instance] = {}
        connector = None
        if len(shapes) > 1:
            connector = PdScheduler(mode=mode, transfer_timeout_s=transfer_timeout_s)
        self.central = CentralScheduler(
            [],
            connector=connector,
            handoffs=HandoffOptions(
                overlap=overlap,
                lease_s=lease_s,
                transfer_timeout_s=transfer_timeout_s,
                hold_s=hold_s,
                load_failure_policy=LoadFailurePolicy(load_failure_policy),
            ),
            clock=lambda: self.now_s,
        )
        self.workers: dict[str, SimWorker] = {}
        self.plans: dict[str, collections.deque] = {}
        self.results: dict[str, collections.deque] = {}
        self.tiers: dict[str, SimTiers] = {}
        for shape in shapes:
            self.add_instance(shape)
        self.transfers: list[SimTransfer] = []
        self.strays: list[Stray] = []
        self.failed: set[str] = set()
        self.dying: set[str] = set()  # failed, and their processes live
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = collections.defaultdict(list)
        self.logprobs: dict[int, list] = collections.defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.overtakings: collections.Counter[int] = collections.Counter()  # by handle

    # instances

    def add_instance(self, shape: Shape) -> None:
        instance_id = shape.instance_id
        instance = make_instance(shape, self.max_model_len)
        self.central.add_instance(instance)
        self.instances[instance_id] = instance
        self.workers[instance_id] = SimWorker(
            kv_config(shape),
            max_rows=shape.max_num_seqs,
            max_model_len=self.max_model_len,
            drafts=shape.drafts or NO_DRAFTS,
        )
        self.plans[instance_id], self.results[instance_id] = collections.deque(), collections.deque()
        self.tiers[instance_id] = SimTiers(
            self.workers[instance_id].cache, instance_id=instance_id, num_ranks=shape.num_ranks
        )

    def remove_instance(self, instance_id: str) -> None:
        """Its processes end once it is forgotten."""
        self.central.remove_instance(instance_id)
        self.forget_removed()

    def forget_removed(self) -> None:
        for instance_id in self.central.take_removed():
            for transfer in self.transfers:
                command = transfer.command
                if instance_id in self.failed and command.dst_instance_id == instance_id:
                    continue  # nobody reads what lands there
                assert instance_id not in (command.src_instance_id, command.dst_instance_id), "left while bytes move"
            del self.instances[instance_id]
            self.failed.discard(instance_id)

    def state(self, instance_id: str) -> str:
        """Its state; empty once it is forgotten."""
        members = self.central.members
        return members.find(instance_id).state.value if instance_id in members else ""

    # verbs

    def add(self, handle: int, prompt, route: Route, *, priority: int = 0, given=(), **sampling) -> Request:
        """`given`: tokens of output that the request comes with."""
        request = dataclasses.replace(
            _request(handle, prompt, **sampling),
            arrival_s=self.now_s,
            priority=priority,
            output_token_ids=np.asarray(given, np.int32),
        )
        self._send(request, route)
        return request

    def resume(self, handle: int, route: Route, *, as_handle: int) -> None:
        """A request that ended as resumable is sent again, with its tokens so far."""
        assert self.finished[handle].is_resumable, handle
        given = np.asarray(self.tokens[handle], np.int32)
        self._send(dataclasses.replace(self.requests[handle], handle=as_handle, output_token_ids=given), route)

    def _send(self, request: Request, route: Route) -> None:
        self.central.add(request, route)
        self.requests[request.handle] = request
        self.tokens[request.handle] = request.output_token_ids.tolist()

    def drawn(self, prompt, *, priority: int = 0, **sampling) -> list[int]:
        """What a request's output may have been when it was cut, at most: it goes on after that, or is complete."""
        tokens, reason, _ = reference(_request(0, prompt, **sampling), max_model_len=self.max_model_len)
        return tokens[:-1] if reason is FinishReason.STOP else tokens

    def plan(self, instance_id: str) -> StepPlan | None:
        plan = self.central.plan(instance_id)
        self.fetch_copies()
        if plan is not None:
            self.plans[instance_id].append(plan)
            self._check_order(instance_id, plan)
        self.fetch_transfers()
        return plan

    def execute(self, instance_id: str) -> bool:
        if not self.plans[instance_id]:
            return False
        plan, worker = self.plans[instance_id].popleft(), self.workers[instance_id]
        self.tiers[instance_id].wait_stored(plan.wait_stored, worker.last_step)
        self.results[instance_id].append(worker.execute(plan))
        return True

    def commit(self, instance_id: str) -> bool:
        if not self.results[instance_id]:
            return False
        self.absorb(self.central.commit(instance_id, self.results[instance_id].popleft()))
        self.fetch_transfers()
        return True

    def abort(self, handle: int) -> None:
        self.absorb(self.central.abort(handle))

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.absorb(self.central.tick())
        self.forget_removed()

    def fetch_copies(self) -> None:
        for instance_id, command in self.central.take_copies():
            self.tiers[instance_id].start(command)

    def copy(self, instance_id: str, index: int = 0, *, fails: bool = False) -> bool:
        """One job that may run runs, if there is one; no rank has reported it yet."""
        tiers = self.tiers[instance_id]
        ready = tiers.may_run(self.workers[instance_id].last_step)
        if not ready:
            return False
        tiers.run(ready[index % len(ready)], fails=fails)
        return True

    def report_copy(self, instance_id: str, index: int = 0) -> bool:
        """One rank reports a job, if there is one to report."""
        event = self.tiers[instance_id].report(index)
        if event is None:
            return False
        self.absorb(self.central.on_copy(event))
        self.fetch_copies()
        return True

    def fetch_transfers(self) -> None:
        for instance_id, command in self.central.take_transfers():
            assert instance_id == command.executing_instance_id
            self.transfers.append(SimTransfer(command, list(range(self.instances[instance_id].num_ranks)), self.now_s))

    def can_finish(self, transfer: SimTransfer) -> bool:
        """Whether the source has computed what it moves."""
        command = transfer.command
        return command.after_step is None or self.workers[command.src_instance_id].last_step >= command.after_step

    def finish_transfer(
        self,
        index: int = 0,
        state: TransferState = TransferState.DONE,
        *,
        is_quiesced: bool = True,
        is_watched: bool = False,
        is_lost: bool = False,
    ) -> None:
        """One rank of a transfer ends. Failed ones leave garbage behind. The report may get lost."""
        transfer = self.transfers[index]
        rank = transfer.ranks_left.pop(0)
        command = transfer.command
        assert state is not TransferState.DONE or self.can_finish(transfer), "done before it was computed"
        if state is TransferState.DONE and not transfer.is_in_time(self.now_s):
            state = TransferState.FAILED
        if state is TransferState.DONE:
            self._move(command)  # every rank moves all of it
        else:
            self.spoil(transfer)
        event = TransferEvent(
            transfer_id=command.transfer_id,
            instance_id=command.executing_instance_id,
            rank=rank,
            state=state,
            num_bytes=sum(100 * part.num_tokens for part in command.parts),
            num_runs=1,
            duration_s=0.01,
            reason="" if state is TransferState.DONE else "the simulator said so",
            is_quiesced=is_quiesced,
            is_watched=is_watched,
        )
        if is_watched:
            transfer.watched.append(event)
        elif not is_quiesced:
            self.strays.append(Stray(command, self.now_s + self.hold_s))
        elif is_lost:
            transfer.watched.append(event)  # a cancel will ask for it
        self._forget_ended()
        if not is_lost:
            self.absorb(self.central.on_transfer(event))

    def finish_watched(self, index: int = 0, *, has_landed: bool = True) -> None:
        """What a network or a frozen peer held has landed, or its connection has failed."""
        transfer = self.transfers[index]
        event = transfer.watched.pop(0)
        if event.is_watched:
            self.spoil(transfer)
            event = dataclasses.replace(event, is_watched=False, is_quiesced=has_landed)
        if not event.is_quiesced:
            self.strays.append(Stray(transfer.command, self.now_s + self.hold_s))
        self._forget_ended()
        self.absorb(self.central.on_transfer(event))

    def _forget_ended(self) -> None:
        self.transfers = [one for one in self.transfers if one.ranks_left or one.watched]

    def obey_cancels(self) -> None:
        """Ranks give up what they were told to give up."""
        cancelled = {transfer_id for _, transfer_id in self.central.take_cancels()}
        for transfer in [one for one in self.transfers if one.command.transfer_id in cancelled]:
            while transfer.ranks_left:
                self.finish_transfer(self.transfers.index(transfer), TransferState.CANCELLED)
            while transfer.watched and not transfer.watched[0].is_watched:
                self.finish_watched(self.transfers.index(transfer))

    def fail(self, instance_id: str) -> None:
        """An instance is given up: its plans are lost. Its processes may go on moving bytes, until they are ended."""
        self.failed.add(instance_id)
        self.plans[instance_id].clear()
        self.results[instance_id].clear()
        self.dying.add(instance_id)
        self.tiers[instance_id].forget()
        self.absorb(self.central.fail_instance(instance_id, "the simulator killed it"))

    def end_processes(self, instance_id: str) -> None:
        """The last process of a failed instance ends; what it had posted may be on its way."""
        self.dying.discard(instance_id)
        for transfer in list(self.transfers):
            if transfer.command.executing_instance_id == instance_id:
                self.transfers.remove(transfer)
                self.strays.append(Stray(transfer.command, self.now_s + self.hold_s))
        self.central.instance_gone(instance_id)

    def spoil(self, transfer: SimTransfer | Stray) -> None:
        """Bytes of an unfinished transfer land."""
        cache = self.workers[transfer.command.dst_instance_id].cache
        for part in transfer.command.parts:
            cache.receive(part, GARBAGE)

    def spoil_with_strays(self) -> None:
        """Bytes that nobody knows of any more land."""
        self.strays = [stray for stray in self.strays if self.now_s < stray.until_s]
        for stray in self.strays:
            self.spoil(stray)

    def _move(self, command: TransferCommand) -> None:
        source = self.workers[command.src_instance_id].cache
        target = self.workers[command.dst_instance_id].cache
        for part in command.parts:
            target.receive(part, source.send(part))

    def step_all(self) -> bool:
        """Plan, execute and commit once everywhere, and finish all transfers. False when nothing moved."""
        has_moved = False
        self.tick(0.01)
        for instance_id in list(self.instances):
            has_moved |= self.plan(instance_id) is not None
            has_moved |= self.execute(instance_id)
            has_moved |= self.commit(instance_id)
            self.fetch_copies()
            while self.copy(instance_id) or self.report_copy(instance_id):
                has_moved = True
        for instance_id in list(self.dying):
            self.end_processes(instance_id)
        while finishable := [one for one in self.transfers if one.ranks_left and self.can_finish(one)]:
            self.finish_transfer(self.transfers.index(finishable[0]))
            has_moved = True
        while self.transfers and self.transfers[0].watched:
            self.finish_watched()
            has_moved = True
        self.spoil_with_strays()
        return has_moved

    def drain(self, *, max_steps: int = 5000) -> None:
        """Run until every request has ended and every transfer has quiesced."""
        for _ in range(max_steps):
            if not self.step_all():
                if not self.central.num_unfinished:
                    break
                self.tick(10.0)  # quiescing hand-offs may hold what the rest needs
        assert not self.central.num_unfinished, f"{self.central.num_unfinished} requests never end"
        self.tick(1e6)  # what never reported is presumed dead

    # checks

    def absorb(self, output: StepOutput) -> None:
        for handle, token_id in zip(output.handles.tolist(), output.token_ids.tolist()):
            assert handle not in self.finished, "a token after the end"
            self.tokens[handle].append(token_id)
        for handle, entry in output.logprobs:
            assert handle not in self.finished
            self.logprobs[handle].append(entry)
        for finished in output.finished:
            assert finished.handle not in self.finished, "finished twice"
            self.finished[finished.handle] = finished

    def _check_order(self, instance_id: str, plan: StepPlan) -> None:
        """A younger request comes in first only where the older one waits for a state, once per state of its own."""
        instance = self.instances[instance_id]
        sequences = [instance.batch.sequences[new_row.row] for new_row in plan.new_rows]
        newcomers = [sequence.ticket.rank for sequence in sequences if sequence is not None]
        if len(self.instances) > 1 or not newcomers or instance.tiers is not NO_TIERS:
            return  # decode instances have an order of their own, and rows are announced once they are loaded
        for sequence in instance.queue:
            if sequence.ticket.rank < max(newcomers):
                self.overtakings[sequence.ticket.handle] += 1
                assert self.overtakings[sequence.ticket.handle] <= len(sequence.token_ids), "a request starves"
                assert self.workers[instance_id].has_states, "a younger request came in first"

    def check(self) -> None:
        self.central.check_integrity()

    def check_output(self, handle: int) -> None:
        """A finished request's tokens are those of the reference, or a prefix when it was cut short."""
        request, finished = self.requests[handle], self.finished[handle]
        tokens, reason, stop_token_id = reference(request, max_model_len=self.max_model_len)
        assert finished.stats.num_output_tokens == len(self.tokens[handle])
        if finished.reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert self.tokens[handle] == tokens[: len(self.tokens[handle])]
            return
        assert self.tokens[handle] == tokens
        assert (finished.reason, finished.stop_token_id) == (reason, stop_token_id)

    def check_all_free(self) -> None:
        self.check()
        assert set(self.finished) == set(self.requests)
        for instance in self.instances.values():
            assert instance.kv.num_free_blocks == instance.kv.num_usable_blocks, instance.instance_id
            assert instance.batch.num_occupied == 0
            assert not len(instance.queue)
        for handle in self.requests:
            self.check_output(handle)


def _request(handle: int, prompt, **sampling) -> Request:
    return Request(
        request_id=f"r{handle}",
        handle=handle,
        prompt_token_ids=np.asarray(prompt, np.int32),
        sampling=SamplingParams(**sampling),
        arrival_s=0.0,
    )


def kv_config(shape: Shape) -> KVCacheConfig:
    """With slabs, num_blocks - 1 is how many pages of the first group there could be, the last slab not filled."""
    slab, num_blocks = None, shape.num_blocks
    if shape.pages_per_slab is not None:
        num_slabs, tail_pages = divmod(shape.num_blocks - 1, shape.pages_per_slab[0])
        slab = geometry(shape.pages_per_slab, num_slabs, tail_pages=tail_pages)
        num_blocks = 1 + max(slab.num_pages(group) for group in range(len(shape.pages_per_slab)))
    return KVCacheConfig(
        num_blocks=num_blocks,
        groups=family_groups(
            shape.family,
            shape.block_size,
            has_draft=shape.has_draft,
            num_drafts=0 if shape.drafts is None else shape.drafts.num_tokens,
        ),
        hash_block_size=shape.block_size,
        slab=slab,
    )


def make_instance(shape: Shape, max_model_len: int) -> Instance:
    rows = RowTable(max_rows=shape.max_num_seqs, max_model_len=max_model_len)
    options = LedgerOptions(
        enable_caching=shape.enable_caching,
        watermark=shape.watermark,
        max_in_flight_tokens=shape.max_num_batched_tokens,
        retention_interval=shape.retention_interval,
    )
    instance = Instance(
        shape.instance_id,
        shape.role,
        config=SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_queue_len=shape.max_queue_len,
            num_steps_in_flight=shape.num_steps_in_flight,
            policy=shape.policy,
            speculation=None if shape.drafts is None else shape.drafts.config,
        ),
        kv=KVCacheManager(kv_config(shape), rows, options=options),
        rows=rows,
        num_ranks=shape.num_ranks,
    )
    if shape.tiers is not None:
        give_tiers(instance, shape.tiers)
    return instance


def give_tiers(instance: Instance, tiers: TierShapes) -> None:
    units_per_block = tiers.units_per_block[: instance.kv.num_groups]
    memory, disk = (
        TierLedger(units_per_block=units_per_block, num_units=size, policy=make_policy(tiers.policy, capacity=size))
        if size
        else None
        for size in (tiers.num_units, tiers.num_disk_units)
    )
    assert memory is not None
    Offloading(instance, memory=memory, disk=disk, options=tiers.options)
