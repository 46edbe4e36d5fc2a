"""The KV ledger as the scheduler sees it: lookup, allocate, cache, free, for requests that have rows.

Owns the pool, the coordinator and the hashes of every row. Never reads or writes the RowTable's counters
beyond reading them; who schedules, sets them.

    lookup -> allocate(hit, ...) -> [allocate_decode -> cache_filled]* -> free
                     | delay_caching: cache_filled only after the bytes arrived and were checked
"""

from __future__ import annotations

import dataclasses

import numpy as np

from blockferry.engine.kv.audit import check_ledger
from blockferry.engine.kv.block_hash import ExtraKey, RequestHashes, append_plain, salt_key
from blockferry.engine.kv.block_pool import BlockPool
from blockferry.engine.kv.block_table import DeltaLog
from blockferry.engine.kv.coordinator import PrefixHit, UnitaryCoordinator
from blockferry.engine.kv.events import EventLog, KVEvent
from blockferry.engine.kv.full_attention import FullAttentionManager
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable
from blockferry.engine.wire import BlockDeltas


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocateOptions:
    """What an allocation is for, besides the tokens to compute.

    | already computed | hit | external | new | lookahead |
    """

    hit: PrefixHit | None = None  # from the lookup just before; first allocation of a row only
    num_external_tokens: int = 0  # after the hit: their KV comes from elsewhere
    num_lookahead_tokens: int = 0  # slots for unverified drafts; clipped at max_model_len
    delay_caching: bool = False  # bytes are still to arrive
    full_sequence_must_fit: bool = False  # refuse unless every known token of the row would fit now
    num_reserved_blocks: int = 0  # leave this many free
    apply_watermark: bool = False  # leave the watermark free: waiting request while others run


DEFAULT_OPTIONS = AllocateOptions()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStats:
    """Counters of a ledger, since it was made unless said otherwise."""

    num_blocks: int  # without the null block
    num_free_blocks: int  # now
    num_keys: int  # distinct (hash, group) in the prefix cache, now
    num_queried_tokens: int  # of sequences allocated with the answer of a lookup
    num_hit_tokens: int  # of those, found in the prefix cache
    num_evicted_blocks: int  # cached blocks reused for something else


class KVCacheManager:
    """The ledger of one instance's block pool. Called from the scheduler's one thread.

    A call that refuses (returns False) or raises changes nothing.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        rows: RowTable,
        *,
        enable_caching: bool = True,
        watermark: float = 0.01,
        num_lookahead_tokens: int = 0,
        events: EventLog | None = None,
    ) -> None:
        """Watermark is a fraction of num_blocks. Raises ValueError for sizes that do not divide."""
        for group in config.groups:
            if group.spec.block_size % config.hash_block_size:
                raise ValueError(
                    f"block_size={group.spec.block_size} is not a multiple of "
                    f"hash_block_size={config.hash_block_size}; use their greatest common divisor"
                )
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark={watermark} is not in [0, 1); it is a fraction of the pool, usually 0.01")
        self.config = config
        self.num_groups = len(config.groups)
        self.num_usable_blocks = config.num_blocks - 1
        self._enable_caching = enable_caching
        self._num_watermark_blocks = int(watermark * config.num_blocks)
        self._num_lookahead_tokens = num_lookahead_tokens
        self._rows = rows
        self._deltas = DeltaLog()
        self._pool = BlockPool(config.num_blocks, num_groups=self.num_groups, events=events)
        self._coordinator = UnitaryCoordinator(
            [
                FullAttentionManager(
                    group.spec,
                    group=index,
                    hash_block_size=config.hash_block_size,
                    pool=self._pool,
                    rows=rows,
                    deltas=self._deltas,
                )
                for index, group in enumerate(config.groups)
            ],
            self._pool,
        )
        self._no_hit = self._coordinator.no_hit
        self._hash_block_size = config.hash_block_size
        self._hashes: list[RequestHashes | None] = [None] * rows.max_rows
        self._digests: list[list[bytes]] = [[]] * rows.max_rows  # hashes.digests per row
        self._next_plain: Int32Array = np.zeros(rows.max_rows, np.int32)  # hashes.next_plain per row
        # each row's tokens as whole blocks of bytes, a view: what append_plain hashes
        num_whole = rows.max_model_len // self._hash_block_size * self._hash_block_size
        self._token_blocks = rows.token_ids[:, :num_whole].view(f"V{4 * self._hash_block_size}")
        self._popped: Int32Array = np.zeros(config.num_blocks, np.int32)  # owners that are no row any more
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, cached ones without owner included."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Held share of the pool, 0 to 1."""
        return 1.0 - self._pool.num_free / self.num_usable_blocks

    @property
    def max_tokens_that_fit(self) -> int:
        """Longest sequence that an otherwise empty pool and max_model_len allow."""
        low, high = 0, self._rows.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.can_ever_fit(middle) else (low, middle - 1)
        return low

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of num_tokens fits the pool when nothing else is in it."""
        return self._coordinator.num_blocks_at_most(num_tokens) <= self.num_usable_blocks

    def hash_prompt(
        self, token_ids: Int32Array, *, cache_salt: str = "", extra_keys: tuple[ExtraKey, ...] = ()
    ) -> RequestHashes:
        """Hashes of a sequence's full blocks; none when caching is off. The caller keeps them with the request."""
        hashes = RequestHashes(self._hash_block_size, extra_keys + salt_key(cache_salt))
        if self._enable_caching:
            hashes.extend(token_ids)
        return hashes

    def lookup(self, hashes: RequestHashes, num_tokens: int) -> PrefixHit:
        """Longest cached prefix of a sequence of num_tokens: at most num_tokens - 1, in whole blocks."""
        return self._coordinator.find_hit(hashes.digests, max(0, num_tokens - 1))

    def start_row(self, row: int, hashes: RequestHashes) -> None:
        """Begin accounting for a row that the caller has assigned; the row extends hashes from now on."""
        assert self._hashes[row] is None, row
        self._hashes[row] = hashes
        self._digests[row] = hashes.digests
        self._next_plain[row] = hashes.next_plain

    def allocate(self, row: int, num_new_tokens: int, options: AllocateOptions = DEFAULT_OPTIONS) -> bool:
        """Make room for num_new_tokens after those computed, hit and external; False when there is none.

        Starts at the RowTable's num_computed_tokens[row], which the caller advances afterwards. Blocks that
        known tokens fill are cached at once, as steps run in order, unless caching is delayed. Raises
        ValueError when there is nothing to make room for or the hit is out of date.
        """
        if num_new_tokens + options.num_external_tokens == 0:
            raise ValueError(f"row {row} asks for no token, new or external; ask for at least one")
        hit = options.hit or self._no_hit
        hashes = self._hashes[row]
        assert hashes is not None, row
        if not self._coordinator.is_current(hashes.digests, hit):
            raise ValueError(f"the hit of {hit.num_tokens} tokens for row {row} is out of date; look it up again")
        limit = self._rows.max_model_len
        num_computed = min(
            int(self._rows.num_computed_tokens[row]) + hit.num_tokens + options.num_external_tokens, limit
        )
        num_total = num_computed + num_new_tokens
        num_slots = min(num_total + options.num_lookahead_tokens, limit)
        if not self._has_room(row, num_slots, hit, options):
            return False
        if options.hit is not None:
            assert not self.num_blocks(row), (row, self.num_blocks(row))
            self._coordinator.adopt(row, hit)
            self._num_queried_tokens += int(self._rows.num_tokens[row])
            self._num_hit_tokens += hit.num_tokens
        if options.num_external_tokens:
            self._coordinator.grow(row, num_computed)
        self._coordinator.grow(row, num_slots)
        if not options.delay_caching:
            self._cache(row, hashes, min(num_total, int(self._rows.num_tokens[row])))
        return True

    def allocate_decode(self, rows: Int32Array) -> int:
        """Make room for one more token, and the lookahead, in each of rows [R] (no row twice) in order.

        Returns how many leading rows got it; the others are unchanged. Caches nothing: cache_filled does
        once the tokens are known. Cost: a handful of vector operations.
        """
        num_slots = self._rows.num_computed_tokens.take(rows) + np.int32(1 + self._num_lookahead_tokens)
        np.minimum(num_slots, self._rows.max_model_len, out=num_slots)
        return self._coordinator.grow_leading(rows, num_slots)

    def cache_filled(self, rows: Int32Array) -> None:
        """Cache what tokens both computed (or planned) and known have filled in each of rows [R].

        Called after tokens were appended, or when a load has completed and num_computed_tokens says so.
        Cost: a handful of vector operations, and about 1.5 us for each block that has filled.
        """
        if not self._enable_caching:
            return
        num_tokens = np.minimum(self._rows.num_computed_tokens.take(rows), self._rows.num_tokens.take(rows))
        due = self._coordinator.has_uncached(rows, num_tokens).nonzero()[0]
        if not len(due):
            return
        rows, num_tokens = rows[due], num_tokens[due]
        self._extend_hashes(rows, num_tokens // self._hash_block_size)
        self._coordinator.cache_in(rows, self._digests, num_tokens)

    def num_blocks(self, row: int, group: int = 0) -> int:
        """Blocks the row holds in a group."""
        return int(self._coordinator.managers[group].table.num_blocks[row])

    def block_ids(self, row: int, group: int = 0) -> Int32Array:
        """The row's blocks in a group, shape [num_blocks]; the caller's copy."""
        return self._coordinator.managers[group].table.row(row).copy()

    def free(self, row: int) -> None:
        """End a row: its blocks go back, the last one first. Hashed ones stay findable until reused."""
        self._coordinator.free(row)
        self._forget(row)

    def pop_blocks_for_free(self, row: int) -> Int32Array:
        """End a row but keep its blocks held; the caller gives exactly the returned ids to release() later."""
        block_ids = self._coordinator.drop(row)
        self._popped[block_ids] += 1
        self._forget(row)
        return block_ids

    def release(self, block_ids: Int32Array) -> None:
        """Give back the blocks of one pop_blocks_for_free, the last one first. Raises ValueError for others."""
        stray = block_ids[self._popped[block_ids] < 1]
        if len(stray):
            raise ValueError(f"blocks {stray.tolist()} are not popped; release what was popped, once")
        if len(np.unique(block_ids)) != len(block_ids):
            raise ValueError(f"blocks {block_ids.tolist()} repeat; release each popped row by a call of its own")
        self._popped[block_ids] -= 1
        self._pool.free(block_ids[::-1])

    def evict_blocks(self, block_ids: Int32Array) -> None:
        """Make blocks unfindable, as when their content turned out wrong; who holds them still does."""
        self._pool.drop_hashes(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, as after a change of weights; False while any block is held."""
        if self._pool.num_free != self.num_usable_blocks:
            return False
        self._pool.clear_hashes()
        return True

    def take_deltas(self) -> BlockDeltas:
        """Block table changes since the last take, in order, without those of rows freed since."""
        return self._deltas.take()

    def take_events(self) -> list[KVEvent]:
        """Events since the last take; none without an EventLog."""
        return [] if self._pool.events is None else self._pool.events.take()

    def stats(self) -> LedgerStats:
        """Counters for metrics and status."""
        return LedgerStats(
            num_blocks=self.num_usable_blocks,
            num_free_blocks=self._pool.num_free,
            num_keys=sum(len(prefix_map) for prefix_map in self._pool.prefix_maps),
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evicted_blocks=self._pool.num_evicted,
        )

    def check_integrity(self) -> None:
        """Prove that every block is exactly one of null, free or held. Raises LedgerCorrupted. Cost: O(pool)."""
        check_ledger(self._pool, self._coordinator.managers, self._popped)

    def _has_room(self, row: int, num_slots: int, hit: PrefixHit, options: AllocateOptions) -> bool:
        num_watermark = self._num_watermark_blocks if options.apply_watermark else 0
        num_free = self._pool.num_free
        if options.full_sequence_must_fit:
            whole = min(int(self._rows.num_tokens[row]), self._rows.max_model_len)
            if self._coordinator.num_free_needed(row, whole, hit) + num_watermark > num_free:
                return False
        needed = self._coordinator.num_free_needed(row, num_slots, hit)
        return needed + num_watermark <= num_free - options.num_reserved_blocks

    def _cache(self, row: int, hashes: RequestHashes, num_tokens: int) -> None:
        if not self._enable_caching:
            return
        if num_tokens // self._hash_block_size > len(hashes.digests):
            self._hash_row(row, num_tokens)
        self._coordinator.cache(row, hashes.digests, num_tokens)

    def _extend_hashes(self, rows: Int32Array, num_full: Int32Array) -> None:
        """Hash rows [R] up to num_full [R] hash blocks; the usual case is one plain block in each."""
        is_usual = num_full == self._next_plain.take(rows)
        if not is_usual.all():
            for row, stop in zip(rows[~is_usual].tolist(), num_full[~is_usual].tolist()):
                self._hash_row(row, stop * self._hash_block_size)
            rows, num_full = rows[is_usual], num_full[is_usual]
        chunks = self._token_blocks[rows, num_full - 1].tolist()
        append_plain([self._digests[row] for row in rows.tolist()], chunks)
        self._next_plain[rows] = num_full + 1

    def _hash_row(self, row: int, num_tokens: int) -> None:
        hashes = self._hashes[row]
        assert hashes is not None, row
        hashes.extend(self._rows.token_ids[row, :num_tokens])
        self._next_plain[row] = hashes.next_plain

    def _forget(self, row: int) -> None:
        self._deltas.forget(row)
        self._hashes[row] = None
        self._digests[row] = []
