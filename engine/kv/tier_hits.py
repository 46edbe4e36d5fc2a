"""Rows that start with blocks of tiers: what is found, the pool's blocks they are loaded into, and their caching.

Acts on the pool through the ledger's own parts; moves no bytes. A row starts as with a hit of the pool alone, but that
some blocks of the hit are new and empty. Nothing may read or copy them before they have been loaded.

    find -> adopt --- bytes arrived ---> cache, then the row goes on as after any hit
                 |--- they did not ----> free the row: its new blocks have no hash, so nobody finds them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from blockferry.engine.kv.announcer import Announcer
from blockferry.engine.kv.block_hash import RequestHashes
from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.groups import hit_alignment
from blockferry.engine.kv.hit_search import CacheSizes, HitSearch, PrefixHit, search_groups
from blockferry.engine.kv.joint_search import JointIndex, pool_blocks
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.tier_ledger import TierLedger
from blockferry.engine.kv.type_manager import Demand, TailWish
from blockferry.engine.request import Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBlocks:
    """Blocks of one group that one tier fills: tier_blocks[n] goes into block_ids[n]."""

    tier: int
    group: int
    columns: Int32Array  # of the row
    tier_blocks: Int32Array
    block_ids: Int32Array
    digests: tuple[bytes, ...]


class TierHits:
    """The hits of one ledger's pool and tiers together. Called from the scheduler's one thread."""

    def __init__(self, kv: KVCacheManager, tiers: Sequence[TierLedger]) -> None:
        config, parts = kv.config, kv.parts
        self._kv = kv
        self._tiers = tuple(tiers)
        self._pools, self._coordinator, self._index = parts.shared.pools, parts.coordinator, parts.index
        self._rows = parts.shared.rows
        self._announcer = parts.announcer
        self._joint = JointIndex(parts.index, tiers)
        self._search = HitSearch(
            search_groups(config.groups, parts.coordinator.managers),
            self._joint,
            num_groups=len(config.groups),
            sizes=CacheSizes(
                hash_block_size=config.hash_block_size, alignment=hit_alignment(config.groups, config.hash_block_size)
            ),
        )

    def find(self, hashes: RequestHashes, num_tokens: int) -> PrefixHit:
        """The longest joint hit of a sequence of num_tokens: at most num_tokens - 1."""
        return self._search.find(hashes.digests, max(0, num_tokens - 1))

    def adopt(
        self, row: int, hit: PrefixHit, *, num_local_tokens: int, options: AllocateOptions
    ) -> tuple[LoadedBlocks, ...] | None:
        """Start a row, just begun, with a joint hit; what must be loaded. None: no room now, nothing has changed.

        num_local_tokens: of the hit of the pool alone, for the counters. The row's next tokens are allocated when the
        bytes are there.
        """
        local = dataclasses.replace(hit, block_ids=pool_blocks(hit.block_ids))
        is_stale = hit.num_drops != self._index.num_drops
        if is_stale or self._coordinator.is_deferred(local) or not self._has_room(row, hit, local, options):
            return None
        loaded = self._fill(hit, local)
        filled = list(local.block_ids)
        for part in loaded:
            filled[part.group][part.columns] = part.block_ids
        adopted = dataclasses.replace(local, block_ids=tuple(filled))
        self._coordinator.adopt(row, _demand(hit.num_tokens, options), adopted)
        for group, block_ids in enumerate(filled):  # the row is their owner now
            self._pool(group).free(block_ids)
        self._kv.note_hit(row, junction=hit.junction, num_hit_tokens=num_local_tokens)
        return loaded

    def cache(self, row: int, loaded: Sequence[LoadedBlocks], hashes: RequestHashes) -> None:
        """Let loaded blocks, which the row still holds, be found in the pool."""
        for part in loaded:
            entries = self._index.obtain(part.digests)
            self._pool(part.group).cache(np.array([part.group], np.int32), part.block_ids, entries)
            if self._announcer is not None:
                self._announce(self._announcer, row, part, hashes.digests)

    def _announce(self, announcer: Announcer, row: int, part: LoadedBlocks, chain: Sequence[bytes]) -> None:
        """Block by block, each under the length that its hash is of."""
        manager = next(one for one in self._coordinator.managers if part.group in one.groups)
        layer = manager.groups.index(part.group)
        for column, digest in zip(part.columns.tolist(), part.digests, strict=True):
            num_tokens = (chain.index(digest) + 1) * self._kv.config.hash_block_size
            wish = TailWish(layers=[layer], column=column, num_tokens=num_tokens)
            announcer.announce_tail(manager, layer, row, wish, chain)

    def _fill(self, hit: PrefixHit, local: PrefixHit) -> tuple[LoadedBlocks, ...]:
        """Give blocks of the pool an owner, all of them before any new one is taken; then take those to be loaded."""
        for group, block_ids in enumerate(local.block_ids):
            self._pool(group).touch(block_ids)
        loaded = []
        for group, blocks in enumerate(hit.block_ids):
            for number, tier in enumerate(self._tiers):
                columns = np.flatnonzero(self._joint.in_tier(blocks, number)).astype(np.int32)
                tier_blocks = self._joint.tier_blocks(blocks[columns])
                if len(tier_blocks):
                    loaded.append(
                        LoadedBlocks(
                            tier=number,
                            group=group,
                            columns=columns,
                            tier_blocks=tier_blocks,
                            block_ids=self._pool(group).take(len(tier_blocks)),
                            digests=tuple(tier.digests_of(tier_blocks)),
                        )
                    )
        return tuple(loaded)

    def _has_room(self, row: int, hit: PrefixHit, local: PrefixHit, options: AllocateOptions) -> bool:
        """Whether the hit's blocks fit now, and with them, beside the watermark, the whole sequence."""
        num_tokens = int(self._rows.num_tokens[row])
        demand = _demand(hit.num_tokens, options)
        whole = dataclasses.replace(demand, num_main=num_tokens, num_slots=num_tokens, is_admission=True)
        num_watermark = self._kv.num_watermark_blocks if options.apply_watermark else 0
        return all(
            self._pools.fits(self._needs(row, one, hit, local), hits=local.block_ids, num_reserved=num_reserved)
            for one, num_reserved in ((whole, num_watermark), (demand, num_watermark + options.num_reserved_blocks))
        )

    def _needs(self, row: int, demand: Demand, hit: PrefixHit, local: PrefixHit) -> list[int]:
        needs = self._coordinator.needs(row, demand, local)
        for group, blocks in enumerate(hit.block_ids):
            needs[self._pools.pool_of(group)] += int(np.count_nonzero(blocks < 0))
        return needs

    def _pool(self, group: int) -> BlockPool:
        return self._pools.pools[self._pools.pool_of(group)]


def _demand(num_tokens: int, options: AllocateOptions) -> Demand:
    return Demand(
        num_local=num_tokens,
        num_total=num_tokens,
        num_main=num_tokens,
        num_slots=num_tokens,
        num_encoder=options.num_encoder_tokens,
    )
