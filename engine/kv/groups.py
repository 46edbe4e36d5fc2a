"""From specs to type managers: the one place that knows which class manages which cache type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from blockferry.engine.kv.chunked_local import ChunkRule
from blockferry.engine.kv.full_attention import FullRule
from blockferry.engine.kv.hit_rules import HitRule, Retention
from blockferry.engine.kv.ledger_log import LedgerLog
from blockferry.engine.kv.mamba import MambaManager, StateRule
from blockferry.engine.kv.pools import Pools
from blockferry.engine.kv.positional import PositionalManager
from blockferry.engine.kv.reach import (
    ChunkReach,
    EncoderReach,
    FullReach,
    NoReach,
    RetainedPromptReach,
    SequenceLimits,
    SpecKind,
    WindowReach,
    cdiv,
)
from blockferry.engine.kv.retained_prompt import RetainedPromptRule
from blockferry.engine.kv.single_take import SingleTakeManager
from blockferry.engine.kv.sliding_window import WindowRule
from blockferry.engine.kv.spec import (
    AttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaMode,
    MambaSpec,
    ScratchRingSpec,
    one_layer,
)
from blockferry.engine.kv.type_manager import Demand, GroupPlace, StackContext, TypeManager
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What all managers of a ledger are made from."""

    limits: SequenceLimits
    alignment: int  # of hits
    retention_interval: int | None
    hash_block_size: int
    pools: Pools
    rows: RowTable
    kept_lengths: Int32Array  # [rows, 2], see StackContext; of attention
    kept_states: Int32Array  # the same of states
    log: LedgerLog

    def context(self, places: Sequence[GroupPlace], *, is_draft: bool) -> StackContext:
        """What the manager of these groups is made from."""
        spec = places[0].spec
        return StackContext(
            groups=tuple(places),
            tokens_per_block=spec.tokens_per_block,
            is_draft=is_draft,
            limits=self.limits,
            retention=Retention(alignment=self.alignment, interval=self.retention_interval, has_draft=is_draft),
            hash_block_size=self.hash_block_size,
            pool=self.pools.pools[self.pools.pool_of(places[0].number)],
            rows=self.rows,
            kept_lengths=self.kept_states if spec.kind is SpecKind.MAMBA else self.kept_lengths,
            log=self.log,
        )


def make_managers(groups: Sequence[KVCacheGroup], parts: SharedParts) -> list[TypeManager]:
    """One manager for groups that share everything but their tables, in the order of their first groups."""
    together: dict[object, list[GroupPlace]] = {}
    for number, group in enumerate(groups):
        key = (_manager_key(one_layer(group.spec)), group.is_draft, parts.pools.pool_of(number))
        together.setdefault(key, []).append(GroupPlace(number=number, spec=group.spec))
    return [
        _make_manager(parts.context(places, is_draft=groups[places[0].number].is_draft)) for places in together.values()
    ]


def _manager_key(spec: KVCacheSpec) -> object:
    """Equal for specs whose groups one manager can keep."""
    if isinstance(spec, AttentionSpec) and not isinstance(spec.reach, EncoderReach | NoReach):
        return spec.tokens_per_block
    return spec


def _make_manager(context: StackContext) -> TypeManager:
    specs = [one_layer(group.spec) for group in context.groups]
    spec = specs[0]
    if isinstance(spec, ScratchRingSpec):
        return SingleTakeManager(context, _one_block)
    if isinstance(spec, MambaSpec):
        if spec.mode is MambaMode.ALIGN:
            return MambaManager(context, spec)
        extra = spec.block_size * spec.num_speculative_blocks
        return PositionalManager(context, [StateRule() for _ in specs], num_extra_tokens=extra)
    assert isinstance(spec, AttentionSpec), spec
    if isinstance(spec.reach, EncoderReach | NoReach):
        return SingleTakeManager(context, lambda demand: cdiv(demand.num_encoder, context.tokens_per_block))
    return PositionalManager(context, [hit_rule(one) for one in specs if isinstance(one, AttentionSpec)])


def hit_rule(spec: AttentionSpec) -> HitRule:
    """What a layer of attention finds and drops."""
    match spec.reach:
        case FullReach():
            return FullRule()
        case WindowReach() as reach:
            return WindowRule(reach=reach)
        case ChunkReach() as reach:
            return ChunkRule(reach=reach)
        case RetainedPromptReach() as reach:
            return RetainedPromptRule(reach=reach, full=FullRule())
        case _:
            raise AssertionError(spec)


def rule_of(spec: KVCacheSpec) -> HitRule | None:
    """What a group keeps in reach; None for one that takes its blocks once and keeps them."""
    spec = one_layer(spec)
    if isinstance(spec, MambaSpec):
        return StateRule()
    if isinstance(spec, AttentionSpec) and spec.prefix_cacheable:
        return hit_rule(spec)
    return None


def hit_alignment(groups: Sequence[KVCacheGroup], hash_block_size: int) -> int:
    """Tokens that every hit is a multiple of: the least common multiple of all blocks, or one hash block.

    The latter where states may be kept inside of blocks and every other type can resume there.
    """
    specs = [one_layer(group.spec) for group in groups if group.spec.prefix_cacheable]
    scheduler_block = math.lcm(*(spec.tokens_per_block for spec in specs)) if specs else hash_block_size
    is_context_parallel = any(isinstance(spec, AttentionSpec) and spec.context_parallel_size > 1 for spec in specs)
    has_states = any(
        isinstance(spec, MambaSpec)
        and (spec.block_size > hash_block_size or (is_context_parallel and spec.block_size >= hash_block_size))
        for spec in specs
    )
    can_all = all(
        isinstance(spec, MambaSpec)
        or spec.tokens_per_block == hash_block_size
        or (isinstance(spec, AttentionSpec) and isinstance(spec.reach, FullReach | RetainedPromptReach))
        for spec in specs
    )
    return hash_block_size if has_states and can_all else scheduler_block


def scheduler_block_size(groups: Sequence[KVCacheGroup]) -> int:
    """Least common multiple of what one block of each group stands for, in tokens."""
    return math.lcm(*(group.spec.tokens_per_block for group in groups))


def _one_block(demand: Demand) -> int:
    del demand
    return 1
