"""Where blocks lie in memory: in one pool whose blocks serve any group, or in slabs of which each group has some."""

from __future__ import annotations

from blockferry.engine.kv.spec import KVCacheConfig

_STRIDE = 1_000_000  # more than any group has pages


class Places:
    """Names of pieces of memory: two blocks with one name are the same bytes."""

    def __init__(self, config: KVCacheConfig) -> None:
        self._slab = config.slab
        self._num_blocks = config.num_blocks

    @property
    def has_slabs(self) -> bool:
        """Whether every group numbers its own pages."""
        return self._slab is not None

    def of(self, group: int, block_id: int) -> int:
        """The name of a block, 0 for the null block."""
        return block_id if self._slab is None or not block_id else group * _STRIDE + block_id

    def slab_of(self, group: int, block_id: int) -> int | None:
        """The slab that a page is part of, whose other pages must be the same group's."""
        if self._slab is None:
            return None
        number = (block_id - 1) // self._slab.pages_per_slab[group]
        return number if number < self._slab.num_slabs else None

    def num_pages(self, group: int) -> int:
        """Highest block id of a group."""
        return self._num_blocks - 1 if self._slab is None else self._slab.num_pages(group)
