"""The books that a naive accountant keeps of a ledger, compared with what the ledger says after every call."""

from __future__ import annotations

import collections
import dataclasses

from support.kv_accounts import Account, Ask, export_length
from support.kv_families import MAX_MODEL_LEN, Family
from support.kv_places import Places

from blockferry.engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from blockferry.engine.kv.groups import one_layer
from blockferry.engine.kv.hit_search import PrefixHit
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import SequenceLimits
from blockferry.engine.kv.spec import MambaMode, MambaSpec
from blockferry.engine.request import Int32Array

Popped = tuple[Int32Array, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a call will do: it may succeed, it must succeed, and the accounts if it does."""

    may: bool
    must: bool
    accounts: list[Account]


class Books:
    """Accounts of every row, owners of every block."""

    def __init__(self, kv: KVCacheManager, family: Family) -> None:
        self.kv = kv
        self.family = family
        self.specs = [one_layer(group.spec) for group in family.groups]
        self.limits = SequenceLimits(
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=family.options.max_in_flight_tokens or MAX_MODEL_LEN,
            max_num_encoder_tokens=family.options.max_num_encoder_tokens,
        )
        self.places = Places(family.config)
        self.num_watermark = int(family.options.watermark * family.num_blocks)
        self.accounts: dict[int, list[Account]] = {}
        self.popped: list[Popped] = []
        self.evicted: set[int] = set()
        self.carriers: collections.Counter[tuple[int, bytes]] = collections.Counter()
        self.zero_due: set[tuple[int, int]] = set()
        self.has_states = any(isinstance(spec, MambaSpec) for spec in self.specs)
        self.state_blocks = [
            spec.block_size for spec in self.specs if isinstance(spec, MambaSpec) and spec.mode is MambaMode.ALIGN
        ]
        self.may_copy = any(block > family.hash_block_size for block in self.state_blocks)

    # what a call will do

    def open_row(self, row: int, *, num_prompt_tokens: int) -> None:
        """A row begins."""
        self.accounts[row] = [
            Account(
                spec,
                num_prompt_tokens=num_prompt_tokens,
                limits=self.limits,
                export_length=export_length(spec, num_prompt_tokens, self.family.hash_block_size),
            )
            for spec in self.specs
        ]

    def ask(self, num_computed: int, num_hit: int, num_new: int, options: AllocateOptions) -> Ask:
        """The tokens of one allocation."""
        total = num_computed + num_hit + options.num_external_tokens
        return Ask(
            num_hit=num_computed + num_hit,
            num_total=total,
            num_main=min(total + num_new, MAX_MODEL_LEN),
            num_slots=min(total + num_new + options.num_lookahead_tokens, MAX_MODEL_LEN),
            num_encoder=options.num_encoder_tokens,
        )

    def first(self, row: int, ask: Ask, hit: PrefixHit, options: AllocateOptions, *, num_tokens: int) -> Forecast:
        """Of a row's first allocation."""
        held, accounts = self.held(), [account.copy() for account in self.accounts[row]]
        num_new, num_whole, hit_places = 0, 0, set()
        for group, (account, block_ids) in enumerate(zip(accounts, hit.block_ids, strict=True)):
            num_whole += account.num_for_whole(num_tokens, ask, [bool(block_id) for block_id in block_ids])
            account.adopt([bool(block_id) for block_id in block_ids], ask)
            kept = {
                self.places.of(group, int(block_id))
                for block_id, is_held in zip(block_ids, account.held, strict=False)
                if is_held
            }
            account.grow(ask)
            num_copied = int(bool(kept) and ask.num_hit % account.block != 0)
            num_new += account.num_held - len(kept) + num_copied
            num_whole += num_copied
            hit_places |= kept
        num_idle = len(hit_places - held)
        free = self.kv.num_free_blocks - (self.num_watermark if options.apply_watermark else 0)
        fits = num_new + num_idle <= free - options.num_reserved_blocks
        fits = fits and (not options.full_sequence_must_fit or num_whole + num_idle <= free)
        return self.forecast(accounts, may=fits, must=fits)

    def forecast(self, accounts: list[Account], *, may: bool, must: bool) -> Forecast:
        """Of slabs nothing is said: what fits them depends on where blocks lie."""
        is_known = not self.places.has_slabs
        return Forecast(may=may or not is_known, must=must and is_known, accounts=accounts)

    def further(self, row: int, ask: Ask, options: AllocateOptions) -> Forecast:
        """Of a later allocation; the accounts have skipped what is out of reach already."""
        accounts = [account.copy() for account in self.accounts[row]]
        before = sum(account.num_held for account in accounts)
        for account in accounts:
            account.grow(ask)
        num_new = sum(account.num_held for account in accounts) - before
        free = self.kv.num_free_blocks
        free -= options.num_reserved_blocks + (self.num_watermark if options.apply_watermark else 0)
        num_copies = sum(ask.num_total % block != 0 for block in self.state_blocks) if self.may_copy else 0
        return self.forecast(accounts, may=num_new <= free, must=num_new + num_copies <= free)

    def skip(self, row: int, num_computed: int) -> None:
        """Before every allocation, even a refused one."""
        for account in self.accounts[row]:
            account.skip(num_computed)

    # what is true after every call

    def held(self) -> set[int]:
        """Places of blocks with an owner that is a row, or was one."""
        tables = [[block_ids.tolist() for block_ids in popped] for popped in self.popped]
        tables += [self.tables(row) for row in self.accounts]
        return {
            self.places.of(group, block_id)
            for table in tables
            for group, block_ids in enumerate(table)
            for block_id in block_ids
            if block_id
        }

    def note_new(self, row: int, before: list[list[int]], hit: PrefixHit | None = None) -> None:
        """Remember which blocks have to be cleared: new ones of attention, where there are states."""
        for group, spec in enumerate(self.specs):
            if self.has_states and not isinstance(spec, MambaSpec):
                known = {0} | set(before[group]) | (set(hit.block_ids[group].tolist()) if hit else set())
                self.zero_due |= {(group, block_id) for block_id in self.tables(row)[group] if block_id not in known}

    def tables(self, row: int) -> list[list[int]]:
        """A row's blocks, per group."""
        return [self.kv.block_ids(row, group).tolist() for group in range(len(self.specs))]

    def check(self) -> None:
        """Everything, against what the ledger says."""
        self.kv.check_integrity()
        owners: dict[tuple[int, int], list[tuple[int, int]]] = collections.defaultdict(list)
        for row, accounts in self.accounts.items():
            for group, (account, table) in enumerate(zip(accounts, self.tables(row), strict=True)):
                assert [block_id != 0 for block_id in table] == account.held, (row, group, table, account.held)
                for column, block_id in enumerate(table):
                    if block_id:
                        owners[group, block_id].append((row, column))
        held = self.held()
        assert len({self.places.of(*block) for block in owners}) == len(owners), "two groups hold one block"
        num_held = self.kv.num_usable_blocks - self.kv.num_free_blocks
        if not self.places.has_slabs:
            assert num_held == len(held) or (self.may_copy and num_held > len(held)), (num_held, held)
        self.evicted &= held
        for (group, block_id), uses in owners.items():
            if len(uses) > 1:
                assert len({column for _, column in uses}) == 1, (group, block_id, uses)
                is_evicted = self.places.of(group, block_id) in self.evicted
                assert is_evicted or self.kv.report_block(block_id, group).hashes, (group, block_id, uses)
        if self.family.has_events:
            self.check_events()

    def check_events(self) -> None:
        """Whoever heard every event knows what can be found."""
        for event in self.kv.take_events():
            match event:
                case BlockStored():
                    for digest in event.block_hashes:
                        self.carriers[event.group, digest] += 1
                case BlockRemoved():
                    for digest in event.block_hashes:
                        self.carriers[event.group, digest] -= 1
                        assert self.carriers[event.group, digest] >= 0, event
                case AllBlocksCleared():
                    self.carriers.clear()
        assert sum(count > 0 for count in self.carriers.values()) == self.kv.stats().num_keys
