"""This process's connection to Ray: a private local cluster, or one that already runs.

Owns the local cluster's processes and temporary folder, and leaves neither behind. Knows nothing of
deployments.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import ray

from blockferry.engine.errors import BlockferryError

logger = logging.getLogger(__name__)

NAMESPACE = "blockferry"
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; nothing large travels through it
STOP_TIMEOUT_S = 10.0
_AUTH_MODE = "RAY_AUTH_MODE"


class RaySessionError(BlockferryError):
    """Ray could not be started or reached."""


@dataclasses.dataclass(slots=True, kw_only=True)
class RaySession:
    """A connection to Ray; close() ends it. Owned by the one thread that made it."""

    address: str  # of the GCS: what another shell connects to
    is_local: bool
    auth_mode: str = ""  # RAY_AUTH_MODE that others need to connect; "": Ray's own choice
    _temp_dir: Path | None = None
    _before: frozenset[int] = frozenset()

    def close(self) -> None:
        """Disconnect; a local cluster's processes and files are gone afterwards. Idempotent."""
        ours = [] if not self.is_local else [one for one in _descendants() if one.pid not in self._before]
        ray.shutdown()
        _reap(ours)
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None


def start_local(resources: Mapping[str, float]) -> RaySession:
    """Start a Ray cluster of this machine alone, offering at least `resources`.

    CPUs are counted, not pinned: a deployment that asks for more than the machine has shares the cores.
    Other resources are the ones asked for.
    Raises RaySessionError.
    """
    before = frozenset(one.pid for one in _descendants())
    temp_dir = Path(tempfile.mkdtemp(prefix="blockferry-", dir="/tmp"))  # short: Unix socket paths end at 107
    session = RaySession(address="", is_local=True, _temp_dir=temp_dir, _before=before)
    custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    _prepare(auth_mode="token")  # Ray's default for local clusters, chosen aloud so that it prints nothing
    try:
        context = _init(
            address="local",
            num_cpus=local_cpus(resources.get("CPU", 0.0), num_cores=os.cpu_count() or 1),
            resources=custom or None,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=str(temp_dir),
        )
    except BaseException as error:
        session.close()
        if isinstance(error, Exception):
            raise RaySessionError(f"cannot start a local Ray cluster: {_first_line(error)}") from error
        raise
    session.address = context.address_info["gcs_address"]
    session.auth_mode = os.environ.get(_AUTH_MODE, "")
    return session


def local_cpus(wanted: float, *, num_cores: int) -> int:
    """What a cluster of one machine counts: room for what is wanted, and for as much again to scale and to replace."""
    whole = math.ceil(wanted)
    return max(num_cores, whole) + whole


def connect(address: str, *, auth_mode: str = "") -> RaySession:
    """Connect to a running cluster, "auto" for the one of this machine. Raises RaySessionError.

    auth_mode is what RaySession.auth_mode says where the cluster was started; RAY_AUTH_MODE in the environment wins.
    """
    _prepare(auth_mode=auth_mode)
    try:
        context: Any = ray.init(address=address, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise RaySessionError(
            f"no Ray cluster at {address!r}: {_first_line(error)}; start one with `ray up` or `ray start`, "
            "or leave out --address for a local one"
        ) from None
    mode = os.environ.get(_AUTH_MODE, "")
    return RaySession(address=context.address_info["gcs_address"], is_local=False, auth_mode=mode)


def _init(**options: Any) -> Any:
    """ray.init() that leaves signals to this process: Ray's handler would exit amid its own start and abort."""
    utils: Any = ray._private.utils
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _handler: None
    try:
        return ray.init(
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            **options,
        )
    finally:
        utils.set_sigterm_handler = set_handler


def _prepare(*, auth_mode: str) -> None:
    """Settings that Ray takes from the environment only; what the user has set stays."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if auth_mode and _AUTH_MODE not in os.environ:
        os.environ[_AUTH_MODE] = auth_mode
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")  # Ray read the environment when it was imported


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _descendants() -> list[Any]:
    found: list[Any] = psutil.Process().children(recursive=True)
    return found


def _reap(processes: list[Any]) -> None:
    """Wait until the processes are gone; what outlives the limit is killed."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    _, alive = psutil.wait_procs(processes, timeout=max(0.0, deadline_s - time.monotonic()))
    for process in alive:
        logger.warning("killing %d (%s), which outlived Ray's shutdown", process.pid, process.name())
        process.kill()
    psutil.wait_procs(alive, timeout=2.0)
