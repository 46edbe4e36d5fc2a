"""The only Ray actors: thin shells that put a scheduler, a rank, the HTTP server or a benchmark's end into a process.

Ray places them, names them and sees them die; steps and requests travel over ZeroMQ between them. Every actor
has a blocking run() whose end is the actor's end, so that whoever holds its reference sees it die.

Each actor imports what only it needs when it is made: torch and HTTP take seconds and hundreds of megabytes.

    name of an actor = DEPLOYMENT:scheduler | DEPLOYMENT:api | DEPLOYMENT:INSTANCE:RANK     namespace = blockferry
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import ray

from blockferry.cluster.interfaces import interface_of, ucx_devices
from blockferry.cluster.offload_settings import TierSettings
from blockferry.cluster.rank_watch import RankWatch
from blockferry.cluster.scheduler_host import (
    InstanceSettings,
    SchedulerSettings,
    WorkerPlace,
    build_loop,
    make_instance,
)
from blockferry.cluster.scheduler_loop import SchedulerLoop
from blockferry.cluster.sockets import Endpoint, Endpoints
from blockferry.cluster.worker_settings import WorkerSettings
from blockferry.engine.config import ApiConfig, HealthConfig, ModelConfig
from blockferry.engine.kv.instance_plan import InstancePlan

logger = logging.getLogger(__name__)


def scheduler_name(deployment: str) -> str:
    """Actor name of a deployment's scheduler."""
    return f"{deployment}:scheduler"


def api_name(deployment: str) -> str:
    """Actor name of a deployment's HTTP server."""
    return f"{deployment}:api"


def worker_name(deployment: str, instance_id: str, rank: int) -> str:
    """Actor name of one rank."""
    return f"{deployment}:{instance_id}:{rank}"


def worker_environment(num_threads: int) -> dict[str, str]:
    """Environment of a worker process: thread counts act when libraries load, before any of our code runs."""
    threads = str(num_threads)
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict.fromkeys(counts, threads) | {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an actor runs."""

    node_id: str
    address: str
    pid: int


def _address() -> str:
    util: Any = ray.util  # untyped
    return str(util.get_node_ip_address())


def _place() -> Place:
    context = ray.get_runtime_context()
    return Place(node_id=context.get_node_id(), address=_address(), pid=os.getpid())


def reachable(endpoints: Endpoints, *, node_id: str) -> Endpoint:
    """The endpoint to use from this process: the local one on the scheduler's own node."""
    is_same_node = ray.get_runtime_context().get_node_id() == node_id
    return endpoints.local if is_same_node or endpoints.remote is None else endpoints.remote


class WorkerActor:
    """One rank of an instance."""

    def __init__(self, settings: WorkerSettings) -> None:
        from blockferry.cluster.worker_host import WorkerHost

        _log_to_stderr()
        self._host = WorkerHost(settings)

    def place(self) -> Place:
        """Where this rank runs."""
        return _place()

    def rendezvous(self) -> str:
        """An address on which this rank can gather its instance's ranks."""
        address = _address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def check(self) -> None:
        """Hold the checkpoint against the model, before this rank waits for others."""
        self._host.check()

    def load(self, init_method: str) -> None:
        """Load weights."""
        interface = interface_of(_address())
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        self._host.load(init_method=init_method)

    def create_pool(self, plan: InstancePlan, tiers: TierSettings | None) -> bytes:
        """Make the pool and what is behind it; returns its endpoint for peers."""
        return self._host.create_pool(plan, tiers, net_devices=ucx_devices(_address()))

    def take_scales(self, own: bytes) -> None:
        """Take the scales in `own`, this rank's endpoint as its peers have it. Before connect() and run()."""
        self._host.take_scales(own)

    def connect(self, peers: Sequence[bytes]) -> None:
        """Connect to the pools of peer instances, all ranks of each."""
        self._host.connect(peers)

    def run(self, endpoints: Endpoints, scheduler_node_id: str) -> str:
        """Serve until the scheduler says stop; returns the reason."""
        return self._host.run(reachable(endpoints, node_id=scheduler_node_id))

    def disconnect(self, instance_id: str) -> None:
        """Drop the connections to an instance that has left."""
        self._host.disconnect(instance_id)

    def reset(self) -> None:
        """End run() and forget what its scheduler, which is lost, has told; see WorkerHost.reset()."""
        self._host.reset()

    def shutdown(self) -> None:
        """Stop and release everything."""
        self._host.stop()
        self._host.close()
        # the interpreter's last collection would go through all of torch, for 10 s on a busy machine
        gc.freeze()


class SchedulerActor:
    """The deployment's one scheduler, and the watch over its workers."""

    def __init__(self) -> None:
        """Only the process: what to schedule is known when the workers have loaded, and processes start slowly."""
        _log_to_stderr()
        self._settings: SchedulerSettings | None = None
        self._loop: SchedulerLoop | None = None
        self._workers: dict[str, list[Any]] = {}
        self._watch = RankWatch()
        self._members_lock = threading.Lock()  # of calls that change the settings

    def prepare(self, settings: SchedulerSettings, workers: dict[str, list[Any]]) -> Endpoints:
        """Make the ledgers and bind the sockets; returns where clients connect.

        Args:
            settings: what to schedule.
            workers: actor handles by instance_id, in rank order.
        """
        self._settings = settings
        self._workers = workers
        self._loop = build_loop(
            settings, bind_host=_address() if settings.has_remote_ranks else "", end_instance=self._watch.end
        )
        return self._loop.client_endpoints

    def place(self) -> Place:
        """Where the scheduler runs."""
        return _place()

    def run(self) -> str:
        """Start every worker's run(), schedule until stopped; returns the reason."""
        loop = self._ready_loop()
        for instance_id, ranks in self._workers.items():
            self._start_ranks(instance_id, ranks)
        self._watch.start(loop)
        try:
            return loop.run()
        finally:
            self._watch.close()

    def is_complete(self) -> bool:
        """Whether every rank has connected."""
        return self._ready_loop().is_complete

    def add_instance(self, settings: InstanceSettings, workers: Sequence[Any], places: Sequence[WorkerPlace]) -> None:
        """Take an instance in: its ledger is made, every rank's run() started. It serves once all have said hello.

        Args:
            settings: what to schedule there. Its id was never used before in this deployment.
            workers: actor handles in rank order, with pools that are connected to their peers' already.
            places: where they run, in rank order.
        """
        loop = self._ready_loop()
        with self._members_lock:
            assert self._settings is not None, "prepare() comes first"
            if any(place.address != _address() for place in places):
                loop.open_to_others(_address())
            loop.add_instance(make_instance(settings, max_model_len=self._settings.max_model_len))
            listed = {one["instance_id"] for one in loop.snapshot["instances"]}
            self._settings = self._settings.with_instance(settings, places, listed=listed)
        self._start_ranks(settings.instance_id, workers)

    def drain(self, instance_id: str, deadline_s: float) -> None:
        """Send no new requests to an instance; those still there in deadline_s seconds end as resumable.

        Hand-offs under way to or from it go on until then. Told again, the new deadline counts; of a failed instance
        nothing happens. Raises ValueError for one that is unknown.
        """
        self._ready_loop().drain(instance_id, deadline_s)

    def remove_instance(self, instance_id: str) -> None:
        """Forget an instance that is drained or has failed; its ranks are told to stop. A starting one is given up.

        A failed one stays listed until its processes have ended and no byte of theirs can land, and is not wanted any
        more from now on: add what replaces it before, or /health says that nothing is missing. Raises ValueError, with
        its state, for one that serves or drains.
        """
        self._ready_loop().remove_instance(instance_id)
        self._watch.forget(instance_id)

    def status(self) -> dict[str, Any]:
        """The last snapshot, at most a second old; empty before the scheduler runs."""
        if self._settings is None or self._loop is None or not self._loop.snapshot:
            return {}
        return self._settings.status(self._loop.snapshot)

    def shutdown(self, reason: str) -> None:
        """End run() soon."""
        if self._loop is not None:
            self._loop.stop(reason)

    def _start_ranks(self, instance_id: str, ranks: Sequence[Any]) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        endpoints = self._ready_loop().worker_endpoints
        runs = {worker.run.remote(endpoints, node_id): rank for rank, worker in enumerate(ranks)}
        self._watch.add(instance_id, ranks, runs)

    def _ready_loop(self) -> SchedulerLoop:
        assert self._loop is not None, "prepare() comes first"
        return self._loop


class ApiActor:
    """The HTTP server."""

    def __init__(self, model: ModelConfig, api: ApiConfig, health: HealthConfig) -> None:
        from blockferry.cluster.http_server import HttpServer

        _log_to_stderr()
        self._server = HttpServer(model, api, health)

    def place(self) -> Place:
        """Where the server runs."""
        return _place()

    def open(self) -> str:
        """Bind the port; returns the server's base URL."""
        return self._server.open()

    def run(self, endpoints: Endpoints, scheduler_node_id: str) -> None:
        """Serve until shutdown()."""
        self._server.run(reachable(endpoints, node_id=scheduler_node_id))

    def reattach(self, endpoints: Endpoints, scheduler_node_id: str) -> None:
        """Go on with another scheduler, open requests included. Raises InstanceFailed when it does not answer."""
        self._server.reconnect(reachable(endpoints, node_id=scheduler_node_id))

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the server answers within timeout_s."""
        return self._server.wait_ready(timeout_s)

    def shutdown(self) -> None:
        """End run() soon."""
        self._server.stop()


class TransferEndActor:
    """One rank's end of `bench transfer`."""

    def __init__(self) -> None:
        from blockferry.cluster.bench.transfer_end import EndServer

        _log_to_stderr()
        self._server = EndServer(_address())

    def answer(self, verb: str, arguments: Sequence[Any]) -> Any:
        """See EndServer.answer."""
        return self._server.answer(verb, arguments)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
