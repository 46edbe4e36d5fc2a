"""Files of tiers: created with a deployment, found again by a restarted worker, removed with it or after its death.

Owns their header and their names, not what lies behind it. A file belongs to an owner, the process whose end means
that nobody will ask for the file any more; it is written down with its start time, so that another process of the same
number is not taken for it.

    | header, one page: magic, what the content is, owner | content ... |
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import struct
from pathlib import Path

from blockferry.connectors.offload_base import OffloadError

logger = logging.getLogger(__name__)

PREFIX = "blockferry-tier-"
HEADER_BYTES = 4096
_MAGIC = b"blockferry tier 1"
_HEADER = struct.Struct("<32s32sQQQ")  # magic, fingerprint, content bytes, owner's pid and start time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileOwner:
    """A process of this machine."""

    pid: int
    started: int  # clock ticks after boot

    @classmethod
    def of(cls, pid: int) -> FileOwner:
        """Raises OffloadError when there is no such process."""
        started = _start_of(pid)
        if started is None:
            raise OffloadError(f"process {pid}, which is to own files of tiers, does not run; name one that does")
        return cls(pid=pid, started=started)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return _start_of(self.pid) == self.started


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierFile:
    """An open file. Whoever opened it closes the descriptor."""

    path: Path
    descriptor: int
    is_found: bool  # it was there already, with this content


def open_tier_file(path: Path, num_bytes: int, *, fingerprint: bytes, owner: FileOwner) -> TierFile:
    """Find the file of this content and owner, or make it anew with num_bytes of content behind its header.

    The space is taken at once. fingerprint: 32 bytes that change with what the content means. Raises OffloadError when
    there is no room.
    """
    header = _HEADER.pack(_MAGIC, fingerprint, num_bytes, owner.pid, owner.started)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OffloadError(f"{path} cannot be opened: {error.strerror}; choose another folder") from None
    if os.pread(descriptor, len(header), 0) == header and os.fstat(descriptor).st_size == HEADER_BYTES + num_bytes:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return TierFile(path=path, descriptor=descriptor, is_found=True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, HEADER_BYTES + num_bytes)
        os.pwrite(descriptor, header, 0)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BlockingIOError:
        os.close(descriptor)
        raise OffloadError(f"{path} is in use by another deployment of this name; change `name`") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise OffloadError(
            f"{path} cannot have {num_bytes / 2**30:.2f} GiB: {error.strerror}; lower the tier's gib"
        ) from None
    return TierFile(path=path, descriptor=descriptor, is_found=False)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove files of tiers whose owner has died and that nobody uses; those that are not ours stay. Returns them."""
    removed = []
    for path in folder.glob(f"{PREFIX}*"):
        try:
            if _is_left_over(path):
                path.unlink()
                removed.append(path)
        except OSError as error:  # somebody else's, or gone meanwhile
            logger.debug("left %s: %s", path, error)
    return removed


def remove_unused(folder: Path, prefix: str) -> None:
    """Remove files that begin with prefix and that nobody uses, whether their owner lives or not."""
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            if not _is_used(path):
                path.unlink()


def _is_used(path: Path) -> bool:
    with path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_left_over(path: Path) -> bool:
    with path.open("rb") as stream:
        data = stream.read(_HEADER.size)
        if len(data) < _HEADER.size:
            return False  # somebody makes it just now
        magic, _, _, pid, started = _HEADER.unpack(data)
    is_ours = magic.rstrip(b"\0") == _MAGIC
    return is_ours and not FileOwner(pid=pid, started=started).is_alive and not _is_used(path)


def _start_of(pid: int) -> int | None:
    """When a process started; None when it has ended, also where its parent has not noticed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
