"""A deployment without models: workers that check every plan and compute tokens as a function of cache content.

Each slot of a simulated pool holds a number that stands for keys and values: the chain hash of all tokens up to
its position. The next token is a function of the last slot's number, so a wrong, stale or missing block shows up
as a wrong token, or at once as a failed check.
"""

import collections
import dataclasses

import numpy as np

from blockferry.connectors.base import TransferCommand, TransferEvent, TransferMode, TransferState
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.engine.config import Role, SchedulerConfig
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.block_table import BlockTable
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import FinishReason, Request, SamplingParams
from blockferry.engine.rows import RowTable
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.outputs import Finished, Route, StepOutput
from blockferry.engine.wire import StepPlan, StepResult, pack, plan_from_bytes

VOCAB_SIZE = 23
UNWRITTEN = 0
GARBAGE = 7
_MASK = (1 << 61) - 1


def fold(state: int, token_id: int) -> int:
    """The number of the slot after `state` that holds token_id."""
    return ((state * 1_000_003 + int(token_id) + 1) * 2_654_435_761 + 12_345) & _MASK | 8


def chain(token_ids) -> list[int]:
    """Slot numbers of a sequence."""
    states, state = [], 1
    for token_id in token_ids:
        state = fold(state, token_id)
        states.append(state)
    return states


def next_token(state: int) -> int:
    """The token that follows a slot number."""
    return (state >> 13) % VOCAB_SIZE


def reference(request: Request, *, max_model_len: int) -> tuple[list[int], FinishReason, int | None]:
    """What any schedule must produce: output tokens, reason, stop token."""
    sampling = request.sampling
    tokens = request.prompt_token_ids.tolist()
    limit = min(len(tokens) + sampling.max_tokens, max_model_len)
    output: list[int] = []
    while len(tokens) < limit:
        token_id = next_token(chain(tokens)[-1])
        tokens.append(token_id)
        output.append(token_id)
        if token_id in sampling.stop_token_ids and len(output) >= sampling.min_tokens:
            return output, FinishReason.STOP, token_id
    return output, FinishReason.LENGTH, None


@dataclasses.dataclass(slots=True)
class SimRow:
    token_ids: list[int]
    num_computed: int = 0


class SimWorker:
    """One instance's worker. Executes plans in order and asserts that each makes sense."""

    def __init__(self, *, num_blocks: int, block_size: int, max_rows: int, max_model_len: int) -> None:
        self.block_size = block_size
        self.pool = np.zeros(num_blocks * block_size, np.int64)
        self.table = BlockTable(max_rows=max_rows, max_blocks=-(-max_model_len // block_size) + 1)
        self.rows: dict[int, SimRow] = {}
        self.last_step = -1
        self.num_computed_tokens = 0

    def execute(self, plan: StepPlan) -> StepResult:
        plan = plan_from_bytes(pack(plan))  # as the wire does
        assert plan.step_id == self.last_step + 1, "plans arrive in order"
        self.last_step = plan.step_id
        self._apply(plan)
        assert len(plan.rows), "an empty step"
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one plan"
        self._check_writes(plan)
        for row, start, count in self._spans(plan):
            self._write(row, start, count)
        sampled = []
        for (row, start, count), sample in zip(self._spans(plan), plan.sample.tolist()):
            last_state = self._read(row, start + count)
            if sample:
                assert start + count == len(self.rows[row].token_ids), "sampled before the last known token"
                sampled.append(next_token(last_state))
                self.rows[row].token_ids.append(sampled[-1])
            self.rows[row].num_computed = start + count
            self.num_computed_tokens += count
        return StepResult(step_id=plan.step_id, token_ids=np.array(sampled, np.int32))

    def slots(self, block_ids, first_token: int, num_tokens: int):
        """Slot numbers of num_tokens tokens, counted along block_ids from first_token on."""
        positions = np.arange(first_token, first_token + num_tokens)
        assert len(block_ids) * self.block_size >= first_token + num_tokens, "more tokens than blocks"
        return np.asarray(block_ids)[positions // self.block_size] * self.block_size + positions % self.block_size

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed_rows.tolist():
            self.rows.pop(row, None)
            self.table.clear(row)
        for new_row in plan.new_rows:
            assert new_row.row not in self.rows, "a row started twice"
            assert new_row.sampling.seed is not None
            self.rows[new_row.row] = SimRow(new_row.token_ids.tolist(), num_computed=-1)
        deltas = plan.deltas
        if len(deltas):
            assert (deltas.block_id > 0).all(), "the null block was handed out"
            self.table.set(deltas.row, deltas.column, deltas.block_id)

    def _spans(self, plan: StepPlan):
        return list(zip(plan.rows.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist()))

    def _check_writes(self, plan: StepPlan) -> None:
        written: dict[int, int] = {}
        held: dict[int, set[int]] = collections.defaultdict(set)
        for row, start, count in self._spans(plan):
            state = self.rows[row]
            assert count >= 1
            assert state.num_computed in (-1, start), "a position computed twice or skipped"
            assert start + count <= len(state.token_ids), "an unknown token is computed"
            assert start + count <= self.table.num_blocks[row] * self.block_size, "a slot without a block"
            for column in range(start // self.block_size, -(-(start + count) // self.block_size)):
                block_id = int(self.table.block_ids[row, column])
                assert written.setdefault(block_id, row) == row, "two rows write one block"
            for block_id in self.table.row(row).tolist():
                held[block_id].add(row)
        for block_id, row in written.items():
            others = held[block_id] - {row}
            for other in others:
                assert self._is_same_prefix(row, other, block_id), "a row writes a block that another one uses"

    def _is_same_prefix(self, row: int, other: int, block_id: int) -> bool:
        """True when both rows mean the same tokens by the block: a prefix hit within one step."""
        column = self.table.row(row).tolist().index(block_id)
        stop = (column + 1) * self.block_size
        return self.rows[row].token_ids[:stop] == self.rows[other].token_ids[:stop]

    def _write(self, row: int, start: int, count: int) -> None:
        states = chain(self.rows[row].token_ids[: start + count])
        self.pool[self.slots(self.table.row(row), start, count)] = states[start:]

    def _read(self, row: int, num_tokens: int) -> int:
        found = self.pool[self.slots(self.table.row(row), 0, num_tokens)].tolist()
        assert UNWRITTEN not in found, "a slot that nobody wrote is read"
        assert found == chain(self.rows[row].token_ids[:num_tokens]), "the cache holds other tokens' content"
        return found[-1]


@dataclasses.dataclass(slots=True)
class SimTransfer:
    """A command under way, once per executing rank."""

    command: TransferCommand
    ranks_left: list[int]
    issued_s: float

    def can_land(self, now_s: float) -> bool:
        """Ranks give up at their deadline: later no byte lands any more."""
        return now_s <= self.issued_s + self.command.deadline_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One simulated instance."""

    instance_id: str
    role: Role = Role.MIXED
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    num_steps_in_flight: int = 2
    max_queue_len: int = 1000
    policy: str = "fcfs"
    enable_caching: bool = True
    watermark: float = 0.01
    num_ranks: int = 1


class SimCluster:
    """CentralScheduler, its workers and a clock, advanced by hand."""

    def __init__(
        self,
        *shapes: Shape,
        max_model_len: int = 96,
        mode: TransferMode = TransferMode.PUSH,
        lease_s: float = 60.0,
        transfer_timeout_s: float = 30.0,
        load_failure_policy: str = "recompute",
    ) -> None:
        self.now_s = 1000.0
        self.max_model_len = max_model_len
        self.instances = {shape.instance_id: make_instance(shape, max_model_len) for shape in shapes}
        connector = PdScheduler(mode=mode, transfer_timeout_s=transfer_timeout_s)
        self.central = CentralScheduler(
            self.instances.values(),
            connector=connector,
            lease_s=lease_s,
            transfer_timeout_s=transfer_timeout_s,
            load_failure_policy=load_failure_policy,
            clock=lambda: self.now_s,
        )
        self.workers = {
            shape.instance_id: SimWorker(
                num_blocks=shape.num_blocks,
                block_size=shape.block_size,
                max_rows=shape.max_num_seqs,
                max_model_len=max_model_len,
            )
            for shape in shapes
        }
        self.plans = {shape.instance_id: collections.deque() for shape in shapes}
        self.results = {shape.instance_id: collections.deque() for shape in shapes}
        self.transfers: list[SimTransfer] = []
        self.failed: set[str] = set()
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = collections.defaultdict(list)
        self.logprobs: dict[int, list] = collections.defaultdict(list)
        self.finished: dict[int, Finished] = {}

    # verbs

    def add(self, handle: int, prompt, route: Route, *, priority: int = 0, **sampling) -> Request:
        request = Request(
            request_id=f"r{handle}",
            handle=handle,
            prompt_token_ids=np.asarray(prompt, np.int32),
            sampling=SamplingParams(**sampling),
            arrival_s=self.now_s,
            priority=priority,
        )
        self.central.add(request, route)
        self.requests[handle] = request
        return request

    def plan(self, instance_id: str) -> StepPlan | None:
        plan = self.central.plan(instance_id)
        if plan is not None:
            self.plans[instance_id].append(plan)
        return plan

    def execute(self, instance_id: str) -> bool:
        if not self.plans[instance_id]:
            return False
        self.results[instance_id].append(self.workers[instance_id].execute(self.plans[instance_id].popleft()))
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

    def fetch_transfers(self) -> None:
        for instance_id, command in self.central.take_transfers():
            assert instance_id == command.executing_instance_id
            self.transfers.append(SimTransfer(command, list(range(self.instances[instance_id].num_ranks)), self.now_s))

    def finish_transfer(
        self, index: int = 0, state: TransferState = TransferState.DONE, *, is_quiesced: bool = True
    ) -> None:
        """One rank of a transfer ends. Failed ones leave garbage behind."""
        transfer = self.transfers[index]
        rank = transfer.ranks_left.pop(0)
        if not transfer.ranks_left:
            del self.transfers[index]
        command = transfer.command
        if state is TransferState.DONE and not transfer.can_land(self.now_s):
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
            num_bytes=100 * command.num_tokens,
            num_runs=1,
            duration_s=0.01,
            reason="" if state is TransferState.DONE else "the simulator said so",
            is_quiesced=is_quiesced,
        )
        self.absorb(self.central.on_transfer(event))

    def obey_cancels(self) -> None:
        """Ranks give up what they were told to give up."""
        cancelled = {transfer_id for _, transfer_id in self.central.take_cancels()}
        for transfer in [one for one in self.transfers if one.command.transfer_id in cancelled]:
            while transfer.ranks_left:
                self.finish_transfer(self.transfers.index(transfer), TransferState.CANCELLED)

    def fail(self, instance_id: str) -> None:
        """An instance dies: its plans are lost and its ranks report nothing more."""
        self.failed.add(instance_id)
        self.plans[instance_id].clear()
        self.results[instance_id].clear()
        self.transfers = [one for one in self.transfers if one.command.executing_instance_id != instance_id]
        self.absorb(self.central.fail_instance(instance_id, "the simulator killed it"))

    def spoil(self, transfer: SimTransfer) -> None:
        """Bytes of an unfinished transfer land."""
        if not transfer.can_land(self.now_s):
            return
        command = transfer.command
        worker = self.workers[command.dst_instance_id]
        worker.pool[worker.slots(command.dst_block_ids, 0, command.num_tokens)] = GARBAGE

    def _move(self, command: TransferCommand) -> None:
        source, target = self.workers[command.src_instance_id], self.workers[command.dst_instance_id]
        source_slots = source.slots(command.src_block_ids, command.first_token, command.num_tokens)
        target_slots = target.slots(command.dst_block_ids, 0, command.num_tokens)
        target.pool[target_slots] = source.pool[source_slots]

    def step_all(self) -> bool:
        """Plan, execute and commit once everywhere, and finish all transfers. False when nothing moved."""
        has_moved = False
        self.tick(0.01)
        for instance_id in self.instances:
            has_moved |= self.plan(instance_id) is not None
            has_moved |= self.execute(instance_id)
            has_moved |= self.commit(instance_id)
        while self.transfers:
            self.finish_transfer()
            has_moved = True
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


def make_instance(shape: Shape, max_model_len: int) -> Instance:
    rows = RowTable(max_rows=shape.max_num_seqs, max_model_len=max_model_len)
    spec = AttentionSpec(block_size=shape.block_size, content=KVContent(num_kv_heads=1, head_dim=8, dtype_bytes=4))
    config = KVCacheConfig(
        num_blocks=shape.num_blocks,
        groups=(KVCacheGroup(layer_ids=(0,), spec=spec),),
        hash_block_size=shape.block_size,
    )
    kv = KVCacheManager(
        config, rows, options=LedgerOptions(enable_caching=shape.enable_caching, watermark=shape.watermark)
    )
    return Instance(
        shape.instance_id,
        shape.role,
        config=SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_queue_len=shape.max_queue_len,
            num_steps_in_flight=shape.num_steps_in_flight,
            policy=shape.policy,
        ),
        kv=kv,
        rows=rows,
        num_ranks=shape.num_ranks,
    )
