"""The ranks of every instance as the scheduler loop reaches them: which connections stand, and sends to all.

Owns who has said hello on the workers' socket, and hears signs of life for the HealthBoard. A rank has a connection
for its steps and one for control, and can be sent work once both stand. Decides nothing about instances.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import zmq

from blockferry.cluster import messages
from blockferry.cluster.health import HealthBoard
from blockferry.cluster.messages import Channel, Frames, Tag, WorkerId
from blockferry.cluster.sockets import send

logger = logging.getLogger(__name__)


class Ranks:
    """All ranks of a deployment. Owned by the scheduler loop's thread."""

    def __init__(self, socket: zmq.Socket[bytes], health: HealthBoard) -> None:
        """`socket`: bound, a ROUTER; whoever made it closes it."""
        self._socket = socket
        self._health = health
        self._num_ranks: dict[str, int] = {}  # by instance_id
        self._present: set[bytes] = set()  # identities that have said hello

    def add(self, instance_id: str, *, num_ranks: int) -> None:
        """Listen to the ranks of an instance."""
        self._num_ranks[instance_id] = num_ranks
        self._health.add(instance_id, num_ranks=num_ranks)

    def remove(self, instance_id: str, reason: str) -> None:
        """Tell the ranks of an instance to stop, and hear nothing of them any more."""
        self._stop(instance_id, reason)
        self._present.difference_update(worker.to_bytes() for worker in self._workers_of(instance_id))
        del self._num_ranks[instance_id]
        self._health.remove(instance_id)

    def find(self, identity: bytes) -> WorkerId | None:
        """Who sends a message; None for a stranger, and for a rank of an instance that is unknown or has left."""
        try:
            worker = WorkerId.from_bytes(identity)
        except ValueError:
            logger.warning("dropped a message of %r, which is no worker", identity)
            return None
        return worker if worker.instance_id in self._num_ranks else None

    def hear(self, worker: WorkerId, tag: Tag, *, now_s: float) -> None:
        """Note what a message says of its rank's connections."""
        if tag is Tag.HELLO:
            self._present.add(worker.to_bytes())
        other = Channel.STEPS if worker.channel is Channel.CONTROL else Channel.CONTROL
        is_sign = tag is Tag.HELLO or worker.channel is Channel.CONTROL  # steps go on where cancels do not
        if is_sign and dataclasses.replace(worker, channel=other).to_bytes() in self._present:
            # both connections stand, so that the rank can be sent work
            self._health.beat(worker.instance_id, worker.rank, now_s=now_s)

    def send(self, instance_id: str, channel: Channel, frames: Frames) -> str:
        """Send to every rank of an instance; says what is wrong when one cannot be reached, else nothing."""
        for rank in range(self._num_ranks[instance_id]):
            worker = WorkerId(instance_id=instance_id, rank=rank, channel=channel)
            if not send(self._socket, worker.to_bytes(), frames):
                return f"rank {rank} has lost its connection"
        return ""

    def stop_all(self, reason: str) -> None:
        """Tell every rank to stop."""
        for instance_id in self._num_ranks:
            self._stop(instance_id, reason)

    def _stop(self, instance_id: str, reason: str) -> None:
        for worker in self._workers_of(instance_id):
            send(self._socket, worker.to_bytes(), messages.encode(Tag.STOP, reason))

    def _workers_of(self, instance_id: str) -> Iterator[WorkerId]:
        for rank in range(self._num_ranks[instance_id]):
            for channel in Channel:
                yield WorkerId(instance_id=instance_id, rank=rank, channel=channel)
