"""One rank assembled: the engine's worker, the connector's worker half and the loop that feeds both.

Owns their order of construction and closing. Runs in any process, with or without Ray.

    check -> load -> create_pool -> take_scales -> connect -> run (until stopped) -> close
                                                                ^-- reset, for another scheduler
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np

from blockferry.cluster.offload_host import Executor, GatedExecutor, RankPool, open_offload
from blockferry.cluster.offload_settings import TierSettings
from blockferry.cluster.sockets import Endpoint
from blockferry.cluster.worker_loop import WorkerLoop
from blockferry.cluster.worker_settings import WorkerSettings
from blockferry.connectors.base import ByteArray, RankIdentity, TransferEvent
from blockferry.connectors.handshake import decode_endpoint
from blockferry.connectors.offload_base import CopyEvent
from blockferry.connectors.offload_worker import OffloadWorker
from blockferry.connectors.pd_transfers import TransferLimits
from blockferry.connectors.pd_worker import PdWorker, PdWorkerOptions
from blockferry.connectors.transport import open_ucx
from blockferry.engine.errors import BlockferryError
from blockferry.engine.kv.instance_plan import InstancePlan
from blockferry.engine.worker.pool_memory import Allocate
from blockferry.engine.worker.worker import Worker, check_checkpoint

RESET_TIMEOUT_S = 30.0  # of each wait: for the step that is being computed, and for transfers under way


class WorkerBusy(BlockferryError):
    """A rank did not let go of what it did; only the end of its process ends it."""


class WorkerHost:
    """One rank of one instance. One call at a time, but stop(), connect(), disconnect() and reset() beside run()."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._worker: Worker | None = None
        self._ferry: PdWorker | None = None
        self._offload: OffloadWorker | None = None
        self._open_tiers: Callable[[], OffloadWorker] | None = None  # anew, where there are tiers
        self._loop: WorkerLoop | None = None
        self._is_at_rest = threading.Event()  # run() is not under way
        self._is_at_rest.set()

    def check(self) -> None:
        """Whether load() could succeed, as far as this rank can tell without the others. Raises ModelLoadError."""
        check_checkpoint(self._settings.spec)

    def load(self, *, init_method: str) -> None:
        """Load this rank's weights, joined to its instance's other ranks."""
        spec = dataclasses.replace(self._settings.spec, init_method=init_method)
        self._worker = Worker(spec)
        self._worker.load()

    def create_pool(self, plan: InstancePlan, tiers: TierSettings | None = None, *, net_devices: str = "") -> bytes:
        """Make the pool, and tiers behind it, and compute once in it; returns what peers need to reach it.

        Empty where nothing is ferried. net_devices: UCX's NET_DEVICES unless `connector.ucx_options` name them.
        """
        worker, spec = self._need_worker(), self._settings.spec
        own = RankIdentity(
            instance_id=self._settings.instance_id,
            rank=spec.rank,
            tp_rank=spec.tp_rank,
            pp_rank=spec.pp_rank,
            model_fingerprint=worker.fingerprint(),
        )
        allocate: Allocate = _zeroed
        connector = self._settings.connector
        if connector is not None:
            self._ferry = PdWorker(
                open_ucx(connector.ucx_options, hosts=self._settings.hosts, net_device=net_devices),
                own,
                self._on_transfer_event,
                PdWorkerOptions(limits=TransferLimits(are_checked=connector.checksums)),
                progress=worker.progress,
            )
            allocate = self._ferry.allocate
        pools: list[ByteArray] = []

        def remember(num_bytes: int) -> ByteArray:
            pools.append(allocate(num_bytes))
            return pools[-1]

        worker.init_cache(plan, remember)
        worker.warm_up()
        if tiers is not None:
            pool, deployment = RankPool(memory=pools[-1], layouts=worker.layouts()), self._settings.deployment
            self._open_tiers = lambda: open_offload(tiers, own, pool, self._on_copy_event, deployment=deployment)
            self._offload = self._open_tiers()
        return b"" if self._ferry is None else self._ferry.endpoint(worker.layouts())

    def take_scales(self, own: bytes) -> None:
        """Take the scales that all ranks agreed upon, in this rank's endpoint. Before connect() and run()."""
        if self._ferry is not None:
            layouts = decode_endpoint(own).layouts
            self._need_worker().take_scales(layouts)
            self._ferry.restate(layouts)

    def connect(self, peers: Sequence[bytes]) -> None:
        """Connect to instances that this one ferries blocks to or from, given as the endpoints of all their ranks.

        Also while run() is under way.
        """
        if self._ferry is not None:
            self._ferry.connect(peers)

    def run(self, endpoint: Endpoint) -> str:
        """Serve the scheduler at `endpoint` on this thread until it says stop; returns its reason."""
        worker = self._need_worker()
        assert self._is_at_rest.is_set(), "run() is under way"
        self._is_at_rest.clear()
        try:
            executor: Executor = worker if self._offload is None else GatedExecutor(worker, self._offload)
            # steps, jobs and reports are numbered for one scheduler
            self._loop = WorkerLoop(instance_id=self._settings.instance_id, rank=worker.spec.rank, executor=executor)
            self._loop.run(endpoint, self._ferry, self._offload)
            return self._loop.stop_reason
        finally:
            self._is_at_rest.set()

    def disconnect(self, instance_id: str) -> None:
        """Drop the connections to an instance that has left. Unknown: no-op."""
        if self._ferry is not None:
            self._ferry.disconnect(instance_id)

    def reset(self) -> None:
        """End run(), which has lost its scheduler, and forget all that it was told: run() may be called again.

        No byte moves any more when it returns, and nothing is cached. Raises WorkerBusy or TransportError when a step
        or a transfer does not end; nothing but the end of the process helps then.
        """
        self.stop()
        if not self._is_at_rest.wait(RESET_TIMEOUT_S):
            raise WorkerBusy(
                f"{self._settings.instance_id} rank {self._settings.spec.rank} computes a step that has not ended "
                f"within {RESET_TIMEOUT_S:g} s; restart the instance"
            )
        if self._ferry is not None:
            self._ferry.reset(timeout_s=RESET_TIMEOUT_S)
        if self._offload is not None and self._open_tiers is not None:
            self._offload.close()
            self._offload = self._open_tiers()
        self._need_worker().reset()

    def stop(self) -> None:
        """End run() soon. Any thread."""
        if self._loop is not None:
            self._loop.stop()

    def close(self) -> None:
        """Release connections, the pool and the process group; run() must have ended. Idempotent."""
        if self._offload is not None:
            self._offload.remove()
            self._offload = None
        if self._ferry is not None:
            self._ferry.close()
            self._ferry = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # connectors begin before the loop, but report nothing before it runs

    def _on_transfer_event(self, event: TransferEvent) -> None:
        assert self._loop is not None, event
        self._loop.on_transfer_event(event)

    def _on_copy_event(self, event: CopyEvent) -> None:
        assert self._loop is not None, event
        self._loop.on_copy_event(event)

    def _need_worker(self) -> Worker:
        assert self._worker is not None, "load() comes first"
        return self._worker


def _zeroed(num_bytes: int) -> ByteArray:
    # calloc: pages that no block has touched take no memory
    return np.zeros(num_bytes, np.uint8)
