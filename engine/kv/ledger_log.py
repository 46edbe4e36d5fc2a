"""What the workers must hear of the ledger's last decisions: table changes, blocks to copy and to clear.

Owns the changes not taken yet; shared by all groups of a ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.request import Int32Array
from blockferry.engine.wire import NO_DELTAS, BlockDeltas

_NOTHING_TO_CLEAR: NDArray[np.int32] = np.empty((0, 2), np.int32)


class BlockCopy(NamedTuple):
    """One block to copy before anything is computed; both ends are held until the copy is taken."""

    group: int
    source: int
    target: int


class LedgerLog:
    """Changes since the last take. Arrays given to it are kept, not copied."""

    def __init__(self, zeroed_groups: Sequence[int] = ()) -> None:
        """New blocks of zeroed_groups are logged as to be cleared."""
        self._pending: list[_Change] = []
        self.copies: list[BlockCopy] = []  # not taken yet, in order
        self._zero: dict[int, list[Int32Array]] = {group: [] for group in zeroed_groups}

    @property
    def has_zeroed_groups(self) -> bool:
        """Whether add_new() logs anything at all."""
        return bool(self._zero)

    @property
    def has_orders(self) -> bool:
        """Whether there are blocks to copy or to clear, not taken yet."""
        return bool(self.copies) or any(self._zero.values())

    def add(self, groups: Int32Array, rows: Int32Array, columns: Int32Array, block_ids: Int32Array) -> None:
        """Log entries as they are written: block_ids [C], or [G, C] for groups [G] that change alike."""
        if block_ids.size:
            self._pending.append(_Change(groups, rows, columns, block_ids.reshape(len(groups), -1)))

    def add_new(self, group: int, block_ids: Int32Array) -> None:
        """Log blocks that still hold what was in them before."""
        fresh = self._zero.get(group)
        if fresh is not None:
            fresh.append(block_ids)

    def add_copy(self, group: int, source: int, target: int) -> None:
        """Log a copy of one block."""
        self.copies.append(BlockCopy(group, source, target))

    def forget(self, row: int) -> None:
        """Drop what is pending for a row that was freed, so that its next owner starts clean."""
        self._pending = [change.without(row) for change in self._pending]

    def take(self) -> BlockDeltas:
        """Table changes since the last take, in order."""
        pending, self._pending = self._pending, []
        if not pending:
            return NO_DELTAS
        if len(pending) == 1:
            return pending[0].as_deltas()
        changes = [change.as_deltas() for change in pending]
        return BlockDeltas(
            group=np.concatenate([change.group for change in changes]),
            row=np.concatenate([change.row for change in changes]),
            column=np.concatenate([change.column for change in changes]),
            block_id=np.concatenate([change.block_id for change in changes]),
        )

    def take_copies(self) -> list[BlockCopy]:
        """Copies since the last take, in order."""
        copies, self.copies = self.copies, []
        return copies

    def take_zero(self) -> NDArray[np.int32]:
        """Blocks to clear since the last take, as (group, block) pairs [n, 2], group after group."""
        if not self._zero:
            return _NOTHING_TO_CLEAR
        pairs = []
        for group, fresh in self._zero.items():
            if fresh:
                block_ids = np.concatenate(fresh)
                pairs.append(np.stack([np.full(len(block_ids), group, np.int32), block_ids], axis=1))
                fresh.clear()
        return np.concatenate(pairs) if pairs else _NOTHING_TO_CLEAR


class _Change(NamedTuple):
    """One write; a NamedTuple because one is made per decode step and a frozen dataclass costs three times as much."""

    groups: Int32Array  # [G]
    rows: Int32Array  # [C]
    columns: Int32Array  # [C]
    block_ids: Int32Array  # [G, C]

    def as_deltas(self) -> BlockDeltas:
        """The same as flat arrays, group after group."""
        num_groups, num_entries = self.block_ids.shape
        if num_groups == 1:
            groups = self.groups.repeat(num_entries)
            return BlockDeltas(group=groups, row=self.rows, column=self.columns, block_id=self.block_ids[0])
        return BlockDeltas(
            group=np.repeat(self.groups, num_entries),
            row=np.tile(self.rows, num_groups),
            column=np.tile(self.columns, num_groups),
            block_id=self.block_ids.ravel(),
        )

    def without(self, row: int) -> _Change:
        keep = self.rows != row
        return _Change(self.groups, self.rows[keep], self.columns[keep], self.block_ids[:, keep])
