"""Pools of slabs on their own, with the few lines that a ledger's managers would have."""

from __future__ import annotations

from support.slab_serving import full, ints

from blockferry.engine.kv.events import EventLog
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.slab_pools import SlabPools
from blockferry.engine.kv.spec import KVCacheGroup, KVCacheSpec, SlabGeometry


class Ground:
    """Takes, caches and frees pages. Groups are of full attention unless said otherwise."""

    def __init__(
        self, slab: SlabGeometry, *, specs: list[KVCacheSpec] | None = None, events: EventLog | None = None
    ) -> None:
        specs = specs or [full(4) for _ in slab.pages_per_slab]
        groups = [KVCacheGroup(layer_ids=(layer,), spec=spec) for layer, spec in enumerate(specs)]
        self.index = PrefixIndex(len(groups), num_expected=64)
        self.pools = SlabPools(slab, groups, index=self.index, events=events)
        self.num_cached = 0

    def take(self, group: int, num_pages: int) -> list[int]:
        needs = [0] * len(self.pools.pools)
        needs[group] = num_pages
        assert self.pools.fits(needs)
        return self.take_granted(group, num_pages)

    def take_granted(self, group: int, num_pages: int) -> list[int]:
        return self.pools.pools[group].take(num_pages).tolist()

    def cache(self, group: int, *pages: int) -> None:
        for page in pages:
            self.num_cached += 1
            entries = self.index.obtain([self.num_cached.to_bytes(4)])
            self.pools.pools[group].cache(ints([group]), ints([page]), entries)

    def free(self, group: int, *pages: int) -> None:
        self.pools.pools[group].free(ints(list(pages)))

    def keep(self, group: int, *pages: int) -> None:
        """Cache and free."""
        self.cache(group, *pages)
        self.free(group, *pages)

    def cached(self, group: int) -> list[int]:
        pool = self.pools.pools[group]
        return [page for page in range(1, pool.num_blocks) if pool.has_hash(ints([page]))[0]]

    def owners(self) -> list[int]:
        return self.pools._table.owner[1 : self.pools._table.num_slabs + 1].tolist()
