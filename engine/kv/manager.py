"""The KV ledger as the scheduler sees it: lookup, allocate, cache, free, for requests that have rows.

Owns the pools, the coordinator and the hashes of every row. Never writes the RowTable; who schedules, does.

    start_step -> lookup -> allocate(hit, ...) -> [allocate_decode -> cache_filled]* -> free
                               | delay_caching: cache_prefix only after the bytes arrived and were checked
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from blockferry.engine.kv.assembly import LedgerOptions, assemble
from blockferry.engine.kv.audit import BlockReport, check_ledger, report_block
from blockferry.engine.kv.block_hash import ExtraKey, RequestHashes, append_plain, salt_key
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID
from blockferry.engine.kv.events import AllBlocksCleared, EventLog, KVEvent
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.reach import SpecKind
from blockferry.engine.kv.room import Room
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.kv.type_manager import DecodeDemand, Demand
from blockferry.engine.request import BoolArray, Int32Array
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
    num_in_flight_tokens: int = 0  # of those computed: not settled, so that what they read must stay
    num_encoder_tokens: int = 0  # of the encoder's input; first allocation of a row only
    delay_caching: bool = False  # bytes are still to arrive
    full_sequence_must_fit: bool = False  # refuse unless every known token of the row would fit now
    num_reserved_blocks: int = 0  # leave this many free
    apply_watermark: bool = False  # leave the watermark free: waiting request while others run


DEFAULT_OPTIONS = AllocateOptions()
_NO_COPIES: NDArray[np.int32] = np.empty((0, 3), np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStats:
    """Counters of a ledger, since it was made unless said otherwise."""

    num_blocks: int  # without the null block
    num_free_blocks: int  # now
    num_keys: int  # distinct (hash, group) in the prefix cache, now
    num_queried_tokens: int  # of sequences allocated with the answer of a lookup
    num_hit_tokens: int  # of those, found in the prefix cache
    num_evicted_blocks: int  # cached blocks reused for something else


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HashRule:
    """How a ledger hashes: two with equal rules give a sequence equal digests."""

    block_size: int
    num_lookahead_tokens: int
    is_caching: bool  # False: nothing is hashed


class KVCacheManager:
    """The ledger of one instance's block pool. Called from the scheduler's one thread.

    A call that refuses (returns False) or raises takes nothing and gives nothing; blocks that a row no longer reads
    may go back all the same.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        rows: RowTable,
        *,
        options: LedgerOptions | None = None,
        events: EventLog | None = None,
    ) -> None:
        """Raises ValueError for sizes that do not divide or options that contradict each other."""
        options = options or LedgerOptions()
        self.parts = parts = assemble(config, rows, options, events)
        self.config = config
        self.num_groups = len(config.groups)
        self._options = options
        self._rows = rows
        self._events = events
        self._log, self._index, self._pools = parts.shared.log, parts.index, parts.shared.pools
        self._coordinator, self._search, self._cacher = parts.coordinator, parts.search, parts.cacher
        self._kept_lengths, self._kept_states = parts.shared.kept_lengths, parts.shared.kept_states
        self._replay_shift = parts.replay_shift
        self.room = Room(config, self._coordinator, rows)
        self.num_usable_blocks = self._pools.num_usable
        has_encoder = any(group.spec.kind is SpecKind.CROSS_ATTENTION for group in config.groups)
        self.max_num_encoder_tokens = options.max_num_encoder_tokens if has_encoder else None  # None: no encoder
        self.num_watermark_blocks = int(options.watermark * config.num_blocks)
        self._no_hit = self._search.no_hit
        self._hash_block_size = config.hash_block_size
        self._hashes: list[RequestHashes | None] = [None] * rows.max_rows
        self._digests: list[list[bytes]] = [[]] * rows.max_rows  # hashes.digests per row
        self._next_plain: Int32Array = np.zeros(rows.max_rows, np.int32)  # hashes.next_plain per row
        # each row's tokens as whole blocks of bytes, a view: what append_plain hashes
        num_whole = rows.max_model_len // self._hash_block_size * self._hash_block_size
        self._token_blocks = rows.token_ids[:, :num_whole].view(f"V{4 * self._hash_block_size}")
        # owners that are no row any more, per pool
        self._popped: list[Int32Array] = [np.zeros(pool.num_blocks, np.int32) for pool in self._pools.pools]
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, cached ones without owner included."""
        return self._pools.num_free

    @property
    def usage(self) -> float:
        """Held share of the pool, 0 to 1."""
        return 1.0 - self._pools.num_free / self.num_usable_blocks

    @property
    def is_caching(self) -> bool:
        """Whether anything is ever found in the prefix cache."""
        return self._options.enable_caching

    @property
    def hash_rule(self) -> HashRule:
        """What the hashes of a sequence depend on here besides the sequence."""
        return HashRule(
            block_size=self._hash_block_size,
            num_lookahead_tokens=self._options.num_hash_lookahead_tokens,
            is_caching=self._options.enable_caching,
        )

    def hash_prompt(
        self, token_ids: Int32Array, *, cache_salt: str = "", extra_keys: tuple[ExtraKey, ...] = ()
    ) -> RequestHashes:
        """Hashes of a sequence's full blocks; none when caching is off. The caller keeps them with the request."""
        hashes = RequestHashes(
            self._hash_block_size,
            extra_keys + salt_key(cache_salt),
            num_lookahead_tokens=self._options.num_hash_lookahead_tokens,
        )
        if self._options.enable_caching:
            hashes.extend(token_ids)
        return hashes

    def start_step(self) -> None:
        """A new step is being put together; what the last one computes may be used in it."""
        self._coordinator.start_step()

    def lookup(self, hashes: RequestHashes, num_tokens: int) -> PrefixHit:
        """Longest cached prefix of a sequence of num_tokens: at most num_tokens - 1."""
        return self._search.find(hashes.digests, max(0, num_tokens - 1))

    def is_deferred(self, hit: PrefixHit) -> bool:
        """Whether a hit ends in what this very step computes: allocate refuses it until the next one."""
        return self._coordinator.is_deferred(hit)

    def start_row(self, row: int, hashes: RequestHashes) -> None:
        """Begin accounting for a row that the caller has assigned; the row extends hashes from now on."""
        assert self._hashes[row] is None, row
        self._hashes[row] = hashes
        self._digests[row] = hashes.digests
        self._next_plain[row] = hashes.next_plain
        self._cacher.start_row(row)
        num_prompt_tokens = int(self._rows.num_prompt_tokens[row])
        self._kept_lengths[row] = max(0, num_prompt_tokens - 1), 0
        self._kept_states[row] = max(0, num_prompt_tokens - self._replay_shift), 0

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
        num_computed = int(self._rows.num_computed_tokens[row])
        self._coordinator.skip(row, num_computed - options.num_in_flight_tokens)
        demand = self._demand(num_computed + hit.num_tokens, num_new_tokens, options)
        if not self._has_room(row, demand, hit, options):
            return False
        if hit.num_tokens and not self._is_current(row, hit):
            raise ValueError(f"the hit of {hit.num_tokens} tokens for row {row} is out of date; look it up again")
        if options.hit is not None or demand.num_total > demand.num_local:
            self._adopt(row, demand, hit)
        self._coordinator.grow(row, demand)
        if not options.delay_caching:
            self._cache(row, min(demand.num_main, int(self._rows.num_tokens[row])))
        return True

    def allocate_decode(self, rows: Int32Array, num_lookahead: Int32Array | None = None) -> int:
        """Make room for one more token, and the lookahead, in each of rows [R] (no row twice) in order.

        num_lookahead: of each row, [R]; None: as the options say. Returns how many leading rows got it; the others
        are unchanged. Caches nothing: cache_filled does once the tokens are known. Cost: a handful of vector
        operations per group.
        """
        rows = rows.astype(np.intp, copy=False)  # the type that indexing converts to, once for all of it
        num_computed = self._rows.num_computed_tokens[rows]
        self._coordinator.skip_in(rows, num_computed)
        return self._coordinator.grow_leading(self._decode_demand(rows, num_computed, num_lookahead))

    def has_slots(self, rows: Int32Array, num_lookahead: Int32Array) -> BoolArray:
        """Which of rows [R] hold room for one more token and num_lookahead [R] already."""
        rows = rows.astype(np.intp, copy=False)
        demand = self._decode_demand(rows, self._rows.num_computed_tokens[rows], num_lookahead)
        return ~self._coordinator.lacks_blocks(demand)

    def cache_filled(self, rows: Int32Array) -> None:
        """Cache what tokens both computed (or planned) and known have filled in each of rows [R].

        Called after tokens were appended. Cost: a handful of vector operations per group, and about 1.5 us for each
        block that has filled.
        """
        if not self._options.enable_caching:
            return
        rows = rows.astype(np.intp, copy=False)
        num_tokens = self._rows.num_computed_tokens[rows]
        due = self._cacher.is_due(rows, num_tokens)
        if not len(due):
            return
        rows, num_tokens = rows.take(due), num_tokens.take(due)
        num_known = self._rows.num_tokens.take(rows)
        if self._options.num_hash_lookahead_tokens:
            num_known -= np.int32(self._options.num_hash_lookahead_tokens)
        if np.count_nonzero(num_tokens > num_known):  # steps in flight: planned further than is known
            num_tokens = np.minimum(num_tokens, num_known)
            due = self._cacher.is_due(rows, num_tokens)
            rows, num_tokens = rows[due], num_tokens[due]
        if len(rows):
            self._extend_hashes(rows, num_tokens // self._hash_block_size)
            self._cacher.cache_in(rows, num_tokens, self._digests)

    def cache_prefix(self, row: int) -> None:
        """Cache what computed and known tokens of one row have filled: a load has completed, drafts were accepted."""
        num_tokens = min(int(self._rows.num_computed_tokens[row]), int(self._rows.num_tokens[row]))
        self._cache(row, num_tokens)

    def num_blocks(self, row: int, group: int = 0) -> int:
        """Columns of the row's table in a group, null ones included."""
        return self._coordinator.num_blocks(row, group)

    def block_ids(self, row: int, group: int = 0) -> Int32Array:
        """The row's blocks in a group, shape [num_blocks], null ones 0; the caller's copy."""
        return self._coordinator.block_ids(row, group)

    def free(self, row: int) -> None:
        """End a row: its blocks go back, the last one first. Hashed ones stay findable until reused."""
        self._coordinator.free(row)
        self._forget(row)

    def pop_blocks_for_free(self, row: int) -> tuple[Int32Array, ...]:
        """End a row but keep its blocks held, per group; the caller gives exactly these to release() later."""
        held = tuple(block_ids[block_ids != NULL_BLOCK_ID] for block_ids in self._coordinator.drop(row))
        for group, block_ids in enumerate(held):
            self._popped[self._pools.pool_of(group)][block_ids] += 1
        self._forget(row)
        return held

    def release(self, popped: tuple[Int32Array, ...]) -> None:
        """Give back the blocks of one pop_blocks_for_free, the last one first. Raises ValueError for others."""
        for group, block_ids in enumerate(popped):
            counts = self._popped[self._pools.pool_of(group)]
            stray = block_ids[counts[block_ids] < 1]
            if len(stray):
                raise ValueError(f"blocks {stray.tolist()} are not popped; release what was popped, once")
            if len(np.unique(block_ids)) != len(block_ids):
                raise ValueError(f"blocks {block_ids.tolist()} repeat; release each popped row by a call of its own")
        for number, pool in enumerate(self._pools.pools):
            mine = [block_ids for group, block_ids in enumerate(popped) if self._pools.pool_of(group) == number]
            block_ids = np.concatenate(mine)
            self._popped[number][block_ids] -= 1
            pool.free(block_ids[::-1])

    def evict_blocks(self, block_ids: Int32Array, group: int = 0) -> None:
        """Make blocks unfindable, as when their content turned out wrong; who holds them still does."""
        self._pools.pools[self._pools.pool_of(group)].drop_hashes(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, as after a change of weights; False while any block is held."""
        if self._pools.num_free != self.num_usable_blocks:
            return False
        self._pools.clear_hashes()
        if self._events is not None:
            self._events.add(AllBlocksCleared())
        return True

    # what workers and observers must hear

    def take_deltas(self) -> BlockDeltas:
        """Block table changes since the last take, in order, without those of rows freed since."""
        return self._log.take()

    @property
    def has_orders(self) -> bool:
        """Whether the next step must copy or clear blocks."""
        return self._log.has_orders

    def take_copies(self) -> NDArray[np.int32]:
        """Blocks to copy before anything of the step is computed, [n, 3]: group, source, target; in order.

        Their extra owners are given back: steps run in order, so whoever gets the blocks next writes after the copy.
        """
        copies = self._log.take_copies()
        if not copies:
            return _NO_COPIES
        for copy in copies:
            pool = self._pools.pools[self._pools.pool_of(copy.group)]
            pool.free(np.array([copy.source, copy.target], np.int32))
        return np.array(copies, np.int32).reshape(-1, 3)

    def take_zero(self) -> NDArray[np.int32]:
        """New blocks to clear before anything of the step is computed, [n, 2]: group, block; none without states."""
        return self._log.take_zero()

    def take_events(self) -> list[KVEvent]:
        """Events since the last take; none without an EventLog."""
        return [] if self._events is None else self._events.take()

    def stats(self) -> LedgerStats:
        """Counters for metrics and status."""
        return LedgerStats(
            num_blocks=self.num_usable_blocks,
            num_free_blocks=self._pools.num_free,
            num_keys=self._index.num_keys,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evicted_blocks=sum(pool.num_evicted for pool in self._pools.pools),
        )

    def report_block(self, block_id: int, group: int = 0) -> BlockReport:
        """Who holds a block and why, and what it can be found under."""
        return report_block(block_id, group, self._coordinator, self._popped, self._log)

    def check_integrity(self) -> None:
        """Prove that every block is exactly one of null, free or held. Raises LedgerCorrupted. Cost: O(pool)."""
        check_ledger(self._coordinator, self._index, self._popped, self._log)

    # steps of the above

    def _decode_demand(
        self, rows: Int32Array, num_computed: Int32Array, num_lookahead: Int32Array | None
    ) -> DecodeDemand:
        num_main = num_slots = num_computed + np.int32(1)
        if num_lookahead is None and self._options.num_lookahead_tokens:
            num_lookahead = np.array(self._options.num_lookahead_tokens, np.int32)
        if num_lookahead is not None:
            num_slots = num_main + num_lookahead
            np.minimum(num_slots, self._rows.max_model_len, out=num_slots)
        return DecodeDemand(rows=rows, num_main=num_main, num_slots=num_slots)

    def _demand(self, num_local: int, num_new_tokens: int, options: AllocateOptions) -> Demand:
        limit = self._rows.max_model_len
        num_total = min(num_local + options.num_external_tokens, limit)
        num_main = num_total + num_new_tokens
        return Demand(
            num_local=num_local,
            num_total=num_total,
            num_main=min(num_main, limit),
            num_slots=min(num_main + options.num_lookahead_tokens, limit),
            num_encoder=options.num_encoder_tokens,
        )

    def _has_room(self, row: int, demand: Demand, hit: PrefixHit, options: AllocateOptions) -> bool:
        num_watermark = self.num_watermark_blocks if options.apply_watermark else 0
        if self._coordinator.is_deferred(hit):
            return False
        if options.full_sequence_must_fit:
            whole = min(int(self._rows.num_tokens[row]), self._rows.max_model_len)
            admission = dataclasses.replace(demand, num_main=whole, num_slots=whole, is_admission=True)
            if not self._coordinator.fits(row, admission, hit, num_reserved=num_watermark):
                return False
        num_reserved = num_watermark + options.num_reserved_blocks
        return self._coordinator.fits(row, demand, hit, num_reserved=num_reserved)

    def _adopt(self, row: int, demand: Demand, hit: PrefixHit) -> None:
        assert not self.num_blocks(row), (row, self.num_blocks(row))
        self._coordinator.adopt(row, demand, hit)
        self.note_hit(row, junction=hit.junction, num_hit_tokens=hit.num_tokens)

    def note_hit(self, row: int, *, junction: int, num_hit_tokens: int) -> None:
        """Count a lookup whose answer a row starts with, and keep what it found others to share."""
        self._kept_lengths[row, 1] = self._kept_states[row, 1] = junction
        self._num_queried_tokens += int(self._rows.num_tokens[row])
        self._num_hit_tokens += num_hit_tokens

    def _is_current(self, row: int, hit: PrefixHit) -> bool:
        """Whether a hit's blocks still carry the row's hashes; looked up again only if a hash went meanwhile."""
        if hit.num_drops == self._index.num_drops:
            return True
        again = self._search.find(self._digests[row], hit.num_tokens)
        return again.num_tokens == hit.num_tokens and all(
            np.array_equal(mine, found) for mine, found in zip(hit.block_ids, again.block_ids, strict=True)
        )

    def _cache(self, row: int, num_tokens: int) -> None:
        if not self._options.enable_caching:
            return
        num_lookahead = self._options.num_hash_lookahead_tokens
        num_hashable = max(0, min(num_tokens, int(self._rows.num_tokens[row]) - num_lookahead))
        if num_hashable // self._hash_block_size > len(self._digests[row]):
            self._hash_row(row, num_hashable + num_lookahead)
        if num_hashable == num_tokens:
            self._cacher.cache_row(row, num_tokens, self._digests)
        else:  # a running state is of all tokens that were computed, so it is not of the last one hashed
            self._cacher.cache_in(np.array([row], np.int32), np.array([num_hashable], np.int32), self._digests)

    def _extend_hashes(self, rows: Int32Array, num_full: Int32Array) -> None:
        """Hash rows [R] up to num_full [R] hash blocks; the usual case is one plain block in each."""
        is_usual = num_full == self._next_plain.take(rows)
        if np.count_nonzero(is_usual) < len(rows):  # cheaper than all()
            for row, stop in zip(rows[~is_usual].tolist(), num_full[~is_usual].tolist()):
                self._hash_row(row, stop * self._hash_block_size + self._options.num_hash_lookahead_tokens)
            rows, num_full = rows[is_usual], num_full[is_usual]
        chunks = self._token_blocks[rows, num_full - np.int32(1)].tolist()
        append_plain([self._digests[row] for row in rows.tolist()], chunks)
        self._next_plain[rows] = num_full + np.int32(1)

    def _hash_row(self, row: int, num_tokens: int) -> None:
        hashes = self._hashes[row]
        assert hashes is not None, row
        hashes.extend(self._rows.token_ids[row, :num_tokens])
        self._next_plain[row] = hashes.next_plain

    def _forget(self, row: int) -> None:
        self._log.forget(row)
        self._hashes[row] = None
        self._digests[row] = []
