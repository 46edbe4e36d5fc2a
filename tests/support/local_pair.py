"""A prefill and a decode instance in one process: real scheduler, ledgers, workers and connector, over loopback.

The two may be of different shapes, ranks included.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.local_engine import EngineOptions, make_instance, make_request
from support.thread_ranks import ThreadRanks

from blockferry.connectors.base import (
    EventSink,
    Overlap,
    RankIdentity,
    TransferCommand,
    TransferEvent,
    TransferMode,
    Transport,
)
from blockferry.connectors.handshake import decode_endpoint, with_common_scales
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.connectors.pd_worker import PdWorker, PdWorkerOptions
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport
from blockferry.engine.config import Role
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.request import Request
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.handoff import HandoffOptions
from blockferry.engine.scheduler.outputs import Route, StepOutput
from blockferry.engine.wire import pack, plan_from_bytes
from blockferry.engine.worker.proposers import make_proposer
from blockferry.engine.worker.worker import MakeProposer, Worker

PREFILL, DECODE = "p0", "d0"
TIMEOUT_S = 60.0
DEFAULTS = PdWorkerOptions()


class LocalInstance:
    """One side: its scheduler's part, and its ranks, each with a pool, a thread for the model and one for transfers."""

    def __init__(
        self,
        instance_id: str,
        role: Role,
        path: Path,
        options: EngineOptions,
        on_event: EventSink,
        transport: Callable[[], Transport],
        connector: PdWorkerOptions,
        *,
        make_proposer: MakeProposer,
    ) -> None:
        plan = options.plan(path)
        self.scheduled = make_instance(instance_id, role, plan, options)
        self.ranks = ThreadRanks(path, options, make_proposer=make_proposer)
        self._ferries: dict[Worker, PdWorker] = {}
        for worker in self.ranks.workers:
            identity = RankIdentity(
                instance_id=instance_id,
                rank=worker.spec.rank,
                tp_rank=worker.spec.tp_rank,
                pp_rank=worker.spec.pp_rank,
                model_fingerprint=worker.fingerprint(),
            )
            self._ferries[worker] = PdWorker(transport(), identity, on_event, connector, progress=worker.progress)
        self.ranks.each(
            lambda worker: worker.init_cache(plan, lambda size: _spoil(self._ferries[worker].allocate(size)))
        )
        self.endpoints = [ferry.endpoint(worker.layouts()) for worker, ferry in self._ferries.items()]

    def agree(self, endpoints: Sequence[bytes]) -> None:
        """Take the scales of these, one a rank."""
        self.endpoints = list(endpoints)
        for (worker, ferry), endpoint in zip(self._ferries.items(), endpoints, strict=True):
            layouts = decode_endpoint(endpoint).layouts
            worker.take_scales(layouts)
            ferry.restate(layouts)

    def connect(self, other: LocalInstance) -> None:
        for ferry in self._ferries.values():
            ferry.connect(other.endpoints)

    def start(self, command: TransferCommand) -> None:
        for ferry in self._ferries.values():
            ferry.start(command)

    def cancel(self, transfer_id: int) -> None:
        for ferry in self._ferries.values():
            ferry.cancel(transfer_id)

    def close(self) -> None:
        for ferry in self._ferries.values():
            ferry.close()
        self.ranks.close()


class LocalPair:
    """generate() may be called again: both prefix caches stay warm. Close it."""

    def __init__(
        self,
        path: Path,
        options: EngineOptions,
        decode_options: EngineOptions | None = None,
        *,
        mode: TransferMode = TransferMode.PUSH,
        overlap: Overlap = Overlap.NONE,
        transport: Callable[[LoopbackFabric], Transport] = LoopbackTransport,
        connector: PdWorkerOptions = DEFAULTS,
        make_proposer: MakeProposer = make_proposer,
    ) -> None:
        """decode_options: None for two sides alike."""
        fabric = LoopbackFabric()
        self._events: queue.Queue[TransferEvent] = queue.Queue()
        shapes = {PREFILL: (Role.PREFILL, options), DECODE: (Role.DECODE, decode_options or options)}
        self._sides = {
            instance_id: LocalInstance(
                instance_id,
                role,
                path,
                own,
                self._events.put,
                lambda: transport(fabric),
                connector,
                make_proposer=make_proposer,
            )
            for instance_id, (role, own) in shapes.items()
        }
        agreed = iter(with_common_scales([one for side in self._sides.values() for one in side.endpoints]))
        for side in self._sides.values():
            side.agree(list(itertools.islice(agreed, len(side.endpoints))))
        mover, other = (PREFILL, DECODE) if mode is TransferMode.PUSH else (DECODE, PREFILL)
        self._sides[mover].connect(self._sides[other])
        instances = [side.scheduled for side in self._sides.values()]
        self.instances = {one.instance_id: one for one in instances}
        self.ledgers: dict[str, KVCacheManager] = {one.instance_id: one.kv for one in instances}
        self.central = CentralScheduler(
            instances,
            connector=PdScheduler(mode=mode, transfer_timeout_s=TIMEOUT_S),
            handoffs=HandoffOptions(overlap=overlap, transfer_timeout_s=TIMEOUT_S),
        )
        self.num_ferried_bytes = 0
        self.failures: list[str] = []  # of transfers
        self._next_handle = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_output: int,
        *,
        encoder_inputs: Sequence[Sequence[int] | None] | None = None,
    ) -> list[list[int]]:
        """Greedy continuations of prompts that arrive together. Of an encoder-decoder, prompts are the decoder's."""
        inputs = encoder_inputs or [None] * len(prompts)
        requests = [
            make_request(self.next_handle(), prompt, num_output, encoder_input=one)
            for prompt, one in zip(prompts, inputs, strict=True)
        ]
        return self.run(requests)

    def next_handle(self) -> int:
        """A handle that no other request has."""
        self._next_handle += 1
        return self._next_handle

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """What is drawn for requests that arrive together; audits all ledgers after every step."""
        outputs: dict[int, list[int]] = {}
        for request in requests:
            outputs[request.handle] = []
            self.central.add(request, Route(prefill=PREFILL, decode=DECODE))
        pending, deadline_s = set(outputs), time.monotonic() + TIMEOUT_S
        while pending:
            assert time.monotonic() < deadline_s, f"{len(pending)} requests are stuck"
            for output in self._pass():
                for handle, token_id in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
                    outputs[handle].append(token_id)
                for finished in output.finished:
                    assert not finished.message, finished
                    pending.discard(finished.handle)
        self._settle()
        return list(outputs.values())

    def close(self) -> None:
        """End all threads."""
        for side in self._sides.values():
            side.close()

    def _pass(self) -> list[StepOutput]:
        """Every instance one step, every transfer that is due begun, every event taken."""
        outputs = []
        for instance_id, side in self._sides.items():
            plan = self.central.plan(instance_id)
            self._start_transfers()
            if plan is not None:
                result = side.ranks.execute(plan_from_bytes(pack(plan)))
                outputs.append(self.central.commit(instance_id, result))
            self._start_transfers()
        while not self._events.empty():
            event = self._events.get()
            self.num_ferried_bytes += event.num_bytes
            self.failures += [event.reason] if event.reason else []
            outputs.append(self.central.on_transfer(event))
        outputs.append(self.central.tick())
        self.central.check_integrity()
        return outputs

    def _start_transfers(self) -> None:
        for mover, command in self.central.take_transfers():
            self._sides[mover].start(command)
        for mover, transfer_id in self.central.take_cancels():
            self._sides[mover].cancel(transfer_id)

    def _settle(self) -> None:
        """Steps that only free rows."""
        for _ in range(4):
            self._pass()


def _spoil(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """NaN in every float type, so that reading an unwritten slot shows."""
    memory[:] = 0xFF
    return memory
