"""What a transfer exchanges with one peer: batches posted, landed and compared, within a rank's budget of bytes.

Used by the transfer thread only, through pd_transfers, which owns the parts and decides what a failure means.
"""

from __future__ import annotations

import collections
import dataclasses

from blockferry.connectors.base import Checksum, CorruptedBytes, Flush, Peer, TransferMode
from blockferry.connectors.pd_links import Batches, Link


class Budget:
    """Bytes that are posted and have not landed, of all transfers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_bytes = 0
        self._of_link: collections.Counter[Link] = collections.Counter()

    def has_room(self, link: Link, num_bytes: int) -> bool:
        """Whether so many bytes may be posted towards a peer."""
        towards = self._of_link[link]
        fits_link = towards == 0 or towards + num_bytes <= self._limit // 2
        return self._num_bytes == 0 or (fits_link and self._num_bytes + num_bytes <= self._limit)

    def add(self, link: Link, num_bytes: int) -> None:
        """Count bytes as posted, or as landed where num_bytes is negative."""
        self._num_bytes += num_bytes
        self._of_link[link] += num_bytes
        if not self._of_link[link]:
            del self._of_link[link]


@dataclasses.dataclass(slots=True, kw_only=True)
class Posted:
    """A batch on its way."""

    batch: int
    flush: Flush
    num_bytes: int
    has_landed: bool = False
    checksum: Checksum | None = None  # of the far end's bytes, once they have landed
    far_sum: int | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Part:
    """One peer's share of a transfer."""

    link: Link
    peer: Peer
    batches: Batches
    budget: Budget
    are_checked: bool
    num_posted: int = 0  # batches
    is_posting: bool = False  # or was when it failed: some of a batch may be on its way without a flush
    flushes: collections.deque[Posted] = dataclasses.field(default_factory=collections.deque)

    @property
    def is_done(self) -> bool:
        """Whether all of it has landed."""
        return self.num_posted == len(self.batches) and not self.flushes

    def reap(self) -> bool:
        """Forget batches that have landed; True when there was one. Raises TransportError, CorruptedBytes."""
        has_moved = False
        while self.flushes and self._has_landed(self.flushes[0]):
            posted = self.flushes.popleft()
            self.budget.add(self.link, -posted.num_bytes)
            has_moved = True
            if self.are_checked:
                self._compare(posted)
        return has_moved

    def post(self, mode: TransferMode) -> int:
        """Post the next batch; returns its bytes. Raises TransportError."""
        self.is_posting = True
        num_bytes = self.batches.post(self.peer, mode, self.num_posted)
        self.flushes.append(Posted(batch=self.num_posted, flush=self.peer.flush(), num_bytes=num_bytes))
        self.is_posting = False
        self.num_posted += 1
        self.budget.add(self.link, num_bytes)
        return num_bytes

    def _has_landed(self, posted: Posted) -> bool:
        """Whether all of a batch is there, and where it is checked also its far end's checksum here."""
        posted.has_landed = posted.has_landed or posted.flush.poll()
        if not posted.has_landed or not self.are_checked:
            return posted.has_landed
        if posted.checksum is None:
            runs = self.batches.runs_of(posted.batch)
            posted.checksum = self.peer.checksum(self.batches.remote_offsets[runs], self.batches.lengths[runs])
        posted.far_sum = posted.checksum.poll()
        return posted.far_sum is not None

    def _compare(self, posted: Posted) -> None:
        runs = self.batches.runs_of(posted.batch)
        offsets, lengths = self.batches.local_offsets[runs], self.batches.lengths[runs]
        if self.link.own_checksum(offsets, lengths) != posted.far_sum:
            raise CorruptedBytes(
                f"corrupted: batch {posted.batch + 1} of {len(self.batches)} has another checksum there than here; "
                f"{posted.num_bytes} bytes in {len(lengths)} runs between offsets {int(offsets.min())} and "
                f"{int((offsets + lengths).max())} of this rank's pool"
            )

    def write_off(self) -> None:
        """What is posted and lands will be of use to nobody: it takes no room, and is not checked."""
        self.are_checked = False
        for posted in self.flushes:
            self.budget.add(self.link, -posted.num_bytes)
            posted.num_bytes = 0

    def forget(self) -> None:
        """Wait for nothing any more."""
        while self.flushes:
            self.budget.add(self.link, -self.flushes.popleft().num_bytes)
