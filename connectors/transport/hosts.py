"""On how many hosts a rank's peers may be, and which ways UCX may take for that: none that leaves a host without need.

UCX's TCP listens on a port that anybody may connect with, and its protocol trusts whoever speaks it (docs/security.md).
So there is none where no peer can ever be on another host. Knows UCX's names of ways, and touches no UCX.
"""

from __future__ import annotations

import enum
import logging
import shutil
from pathlib import Path

from blockferry.connectors.base import TransportError

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
# Free in /dev/shm when UCX opens, or posix is not there; between 16 and 17 MiB libucp 1.21 crashes. It then keeps 4.2.
UCX_ROOM_BYTES = 20 * MIB
UCX_QUEUE_BYTES = 5 * MIB


class Hosts(enum.Enum):
    """Where all ranks are with which one may ever be connected."""

    ONE = "one"  # its own
    MANY = "many"  # any hosts of a cluster


def ucx_transports(hosts: Hosts, *, free_bytes: int | None = None) -> tuple[str, ...]:
    """UCX_TLS. `free_bytes`: in /dev/shm; None: ask the system.

    Raises TransportError where only shared memory would do and there is not enough for UCX's own queues.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free if free_bytes is None else free_bytes
    if free >= UCX_ROOM_BYTES:
        return ("posix", "self") if hosts is Hosts.ONE else ("posix", "tcp", "self")
    short = (
        f"{SHARED_MEMORY} has {free / MIB:.1f} MiB free, UCX needs {UCX_ROOM_BYTES // MIB} to share memory; "
        "enlarge it (containers: --shm-size) or lower cache.memory"
    )
    if hosts is Hosts.ONE:
        raise TransportError(f"starting UCX: {short}")
    logger.warning("%s; until then blocks travel over TCP within this host too", short)
    return ("tcp", "self")
