"""Puts a ledger together from its configuration: pools, index, one manager per group, and what connects them.

Decides nothing at run time.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from blockferry.engine.kv.announcer import Announcer
from blockferry.engine.kv.coordinator import Coordinator
from blockferry.engine.kv.events import EventLog
from blockferry.engine.kv.groups import SharedParts, hit_alignment, make_managers, scheduler_block_size
from blockferry.engine.kv.hit_search import CacheSizes, HitSearch, search_groups
from blockferry.engine.kv.ledger_log import LedgerLog
from blockferry.engine.kv.pools import make_pools
from blockferry.engine.kv.prefix_cacher import PrefixCacher
from blockferry.engine.kv.prefix_index import PrefixIndex
from blockferry.engine.kv.reach import SequenceLimits, SpecKind
from blockferry.engine.kv.spec import KVCacheConfig
from blockferry.engine.rows import RowTable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """How a ledger behaves, whatever its groups are."""

    enable_caching: bool = True
    watermark: float = 0.01  # fraction of num_blocks that waiting requests leave free while others run
    num_lookahead_tokens: int = 0  # slots for unverified drafts, of every decode step
    max_in_flight_tokens: int | None = None  # scheduled and not settled, per sequence; None: any number
    max_num_encoder_tokens: int = 0
    retention_interval: int | None = None  # see hit_rules.Retention
    num_hash_lookahead_tokens: int = 0  # tokens after a block that its hash covers too: a draft's layers read them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LedgerParts:
    """A ledger's parts; KVCacheManager owns them."""

    shared: SharedParts
    index: PrefixIndex
    coordinator: Coordinator
    search: HitSearch
    cacher: PrefixCacher
    announcer: Announcer | None  # of a ledger with observers
    replay_shift: int  # tokens before a prompt's end where a hit on all of it resumes, in states


def assemble(config: KVCacheConfig, rows: RowTable, options: LedgerOptions, events: EventLog | None) -> LedgerParts:
    """Make the parts. Raises ValueError for sizes that do not divide or options that contradict each other."""
    _check(config, options)
    groups, hash_block_size = config.groups, config.hash_block_size
    alignment = hit_alignment(groups, hash_block_size)
    has_states = any(group.spec.kind is SpecKind.MAMBA for group in groups)
    index = PrefixIndex(len(groups), num_expected=config.num_blocks)
    in_flight = options.max_in_flight_tokens
    shared = SharedParts(
        limits=SequenceLimits(
            max_model_len=rows.max_model_len,
            max_in_flight_tokens=rows.max_model_len if in_flight is None else in_flight,
            max_num_encoder_tokens=options.max_num_encoder_tokens,
        ),
        alignment=alignment,
        retention_interval=options.retention_interval,
        hash_block_size=hash_block_size,
        pools=make_pools(config, index, events),
        rows=rows,
        kept_lengths=np.zeros((rows.max_rows, 2), np.int32),
        kept_states=np.zeros((rows.max_rows, 2), np.int32),
        log=LedgerLog([n for n, group in enumerate(groups) if has_states and group.spec.kind is not SpecKind.MAMBA]),
    )
    managers = make_managers(groups, shared)
    sizes = CacheSizes(hash_block_size=hash_block_size, alignment=alignment)
    announcer = None
    if events is not None:
        announcer = Announcer(events, rows, groups=groups, hash_block_size=hash_block_size)
    return LedgerParts(
        shared=shared,
        index=index,
        coordinator=Coordinator(managers, shared.pools),
        search=HitSearch(search_groups(groups, managers), index, num_groups=len(groups), sizes=sizes),
        cacher=PrefixCacher(managers, index, sizes, max_rows=rows.max_rows, announcer=announcer),
        announcer=announcer,
        replay_shift=scheduler_block_size(groups) if any(group.is_draft for group in groups) else 1,
    )


def _check(config: KVCacheConfig, options: LedgerOptions) -> None:
    for group in config.groups:
        if group.spec.prefix_cacheable and group.spec.tokens_per_block % config.hash_block_size:
            raise ValueError(
                f"block_size={group.spec.tokens_per_block} is not a multiple of "
                f"hash_block_size={config.hash_block_size}; use their greatest common divisor"
            )
    if not 0.0 <= options.watermark < 1.0:
        raise ValueError(f"watermark={options.watermark} is not in [0, 1); it is a fraction of the pool, usually 0.01")
    interval, aligned = options.retention_interval, scheduler_block_size(config.groups)
    if interval is not None and (interval < 0 or interval % aligned):
        raise ValueError(
            f"retention_interval={interval} is not a multiple of {aligned}, the least common multiple of all "
            "block sizes; use 0 or a multiple of it"
        )
