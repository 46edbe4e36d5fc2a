"""Where the bytes of a rank's tiers lie: named shared memory, and a file on a local disk.

Owns both and their checks of what was read; which unit holds what, the scheduler's ledgers know. Units are numbered
from 0. Bytes in memory survive the process; its successor opens the same file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from typing import NamedTuple

import numpy as np

from blockferry.connectors.base import ByteArray
from blockferry.connectors.offload_base import OffloadError
from blockferry.connectors.offload_files import HEADER_BYTES, TierFile

_RECORD = struct.Struct("<IIII28s")  # checksum of the rest, bytes, group, number within the block, digest
_RECORD_BYTES = 64
_ALIGNMENT = 4096


class TierMemory:
    """A memory tier's bytes on one rank. Close it; remove() when nobody is to find it again."""

    def __init__(self, file: TierFile) -> None:
        """Takes over the file."""
        self._file = file
        self._map = mmap.mmap(file.descriptor, 0)
        whole: ByteArray = np.frombuffer(self._map, np.uint8)
        self.view: ByteArray = whole[HEADER_BYTES:]  # [bytes of the tier]
        self.is_found = file.is_found
        self._is_open = True

    def close(self) -> None:
        """Let go of the memory; the file stays. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self.view = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # somebody still holds a view: unmapped when it goes
            self._map.close()
        os.close(self._file.descriptor)

    def remove(self) -> None:
        """Remove the file; what is open stays usable."""
        self._file.path.unlink(missing_ok=True)


class RecordName(NamedTuple):
    """What a unit on disk is known by."""

    group: int
    digest: bytes
    number: int  # of the unit within its block


class TierDisk:
    """A disk tier's bytes on one rank: one checked record per unit. Used by one thread."""

    def __init__(self, file: TierFile, *, unit_bytes: int) -> None:
        """Takes over the file, made for num_bytes()."""
        self._file = file
        self._stride = _record_stride(unit_bytes)
        self._is_open = True

    @staticmethod
    def num_bytes(num_units: int, unit_bytes: int) -> int:
        """Bytes of a file for so many units."""
        return num_units * _record_stride(unit_bytes)

    def write(self, unit: int, content: ByteArray, name: RecordName) -> None:
        """Put a unit's content, contiguous, under a name. Raises OffloadError."""
        rest = _RECORD.pack(0, len(content), name.group, name.number, name.digest)[4:]
        checksum = zlib.crc32(content.data, zlib.crc32(rest))
        record = (struct.pack("<I", checksum) + rest).ljust(_RECORD_BYTES, b"\0")
        try:
            num_written = os.pwritev(self._file.descriptor, [record, content.data], self._offset(unit))
        except OSError as error:
            raise OffloadError(f"{self._file.path} cannot be written: {error.strerror}; see to its disk") from None
        if num_written != _RECORD_BYTES + len(content):
            raise OffloadError(f"{self._file.path} took {num_written} of {_RECORD_BYTES + len(content)} bytes")

    def read(self, unit: int, content: ByteArray, name: RecordName) -> None:
        """Fill content with a unit's. Raises OffloadError unless it is, bit by bit, what was written under the name."""
        record = bytearray(_RECORD_BYTES)
        try:
            num_read = os.preadv(self._file.descriptor, [record, content.data], self._offset(unit))
        except OSError as error:
            raise OffloadError(f"{self._file.path} cannot be read: {error.strerror}; see to its disk") from None
        wanted = _RECORD.pack(0, len(content), name.group, name.number, name.digest)[4:]
        if num_read != _RECORD_BYTES + len(content) or record[4 : 4 + len(wanted)] != wanted:
            raise OffloadError(f"unit {unit} of {self._file.path} holds another block than was asked for")
        if zlib.crc32(content.data, zlib.crc32(wanted)) != struct.unpack_from("<I", record)[0]:
            raise OffloadError(f"unit {unit} of {self._file.path} is damaged: its checksum does not fit")

    def close(self) -> None:
        """Close the file; it stays. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._file.descriptor)

    def remove(self) -> None:
        """Remove the file."""
        self._file.path.unlink(missing_ok=True)

    def _offset(self, unit: int) -> int:
        return HEADER_BYTES + unit * self._stride


def _record_stride(unit_bytes: int) -> int:
    return -(-(_RECORD_BYTES + unit_bytes) // _ALIGNMENT) * _ALIGNMENT
