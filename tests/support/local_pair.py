"""A prefill and a decode instance in one process: real scheduler, ledgers, workers and connector, over loopback."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.local_engine import EngineOptions, make_instance, make_request

from blockferry.connectors.base import RankIdentity, TransferEvent, TransferMode
from blockferry.connectors.pd_scheduler import PdScheduler
from blockferry.connectors.pd_worker import PdWorker
from blockferry.connectors.transport.loopback import LoopbackFabric, LoopbackTransport
from blockferry.engine.config import Role
from blockferry.engine.kv.manager import KVCacheManager
from blockferry.engine.scheduler.central import CentralScheduler
from blockferry.engine.scheduler.outputs import Route, StepOutput
from blockferry.engine.wire import pack, plan_from_bytes
from blockferry.engine.worker.worker import Worker

PREFILL, DECODE = "p0", "d0"
TIMEOUT_S = 60.0


class LocalPair:
    """generate() may be called again: both prefix caches stay warm. Close it."""

    def __init__(self, path: Path, options: EngineOptions, *, mode: TransferMode = TransferMode.PUSH) -> None:
        fabric = LoopbackFabric()
        self._events: queue.Queue[TransferEvent] = queue.Queue()
        self.workers = {PREFILL: Worker(options.worker_spec(path)), DECODE: Worker(options.worker_spec(path))}
        self._ferries: dict[str, PdWorker] = {}
        plan = options.plan(path)
        endpoints = {}
        for instance_id, worker in self.workers.items():
            identity = RankIdentity(
                instance_id=instance_id, rank=0, tp_rank=0, pp_rank=0, model_fingerprint=worker.fingerprint()
            )
            ferry = PdWorker(LoopbackTransport(fabric), identity, self._events.put)
            self._ferries[instance_id] = ferry
            worker.load()
            worker.init_cache(plan, lambda num_bytes, ferry=ferry: _spoil(ferry.allocate(num_bytes)))
            endpoints[instance_id] = ferry.endpoint(worker.layouts())
        mover, other = (PREFILL, DECODE) if mode is TransferMode.PUSH else (DECODE, PREFILL)
        self._ferries[mover].connect([endpoints[other]])
        roles = {PREFILL: Role.PREFILL, DECODE: Role.DECODE}
        instances = {one: make_instance(one, role, plan, options) for one, role in roles.items()}
        self.ledgers: dict[str, KVCacheManager] = {one: instance.kv for one, instance in instances.items()}
        self.central = CentralScheduler(
            instances.values(), connector=PdScheduler(mode=mode, transfer_timeout_s=TIMEOUT_S)
        )
        self.num_ferried_bytes = 0
        self._next_handle = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_output: int,
        *,
        encoder_inputs: Sequence[Sequence[int] | None] | None = None,
    ) -> list[list[int]]:
        """Greedy continuations of prompts that arrive together; audits all ledgers after every step.

        Of an encoder-decoder, prompts are the decoder's.
        """
        outputs: dict[int, list[int]] = {}
        for prompt, encoder_input in zip(prompts, encoder_inputs or [None] * len(prompts), strict=True):
            self._next_handle += 1
            outputs[self._next_handle] = []
            request = make_request(self._next_handle, prompt, num_output, encoder_input=encoder_input)
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
        """End the transfer threads."""
        for ferry in self._ferries.values():
            ferry.close()

    def _pass(self) -> list[StepOutput]:
        """Every instance one step, every transfer that is due begun, every event taken."""
        outputs = []
        for instance_id, worker in self.workers.items():
            plan = self.central.plan(instance_id)
            if plan is not None:
                result = worker.execute(plan_from_bytes(pack(plan)))
                assert result is not None
                outputs.append(self.central.commit(instance_id, result))
            for mover, command in self.central.take_transfers():
                self._ferries[mover].start(command)
            for mover, transfer_id in self.central.take_cancels():
                self._ferries[mover].cancel(transfer_id)
        while not self._events.empty():
            event = self._events.get()
            self.num_ferried_bytes += event.num_bytes
            outputs.append(self.central.on_transfer(event))
        outputs.append(self.central.tick())
        self.central.check_integrity()
        return outputs

    def _settle(self) -> None:
        """Steps that only free rows."""
        for _ in range(4):
            self._pass()


def _spoil(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """NaN in every float type, so that reading an unwritten slot shows."""
    memory[:] = 0xFF
    return memory
