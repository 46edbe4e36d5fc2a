"""From specs to type managers: the one place that knows which class manages which cache type."""

from __future__ import annotations

import math
from collections.abc import Sequence

from blockferry.engine.kv.chunked_local import ChunkRule
from blockferry.engine.kv.full_attention import FullRule
from blockferry.engine.kv.hit_rules import HitRule
from blockferry.engine.kv.mamba import MambaManager, StateRule
from blockferry.engine.kv.positional import PositionalManager
from blockferry.engine.kv.reach import (
    ChunkReach,
    EncoderReach,
    FullReach,
    NoReach,
    RetainedPromptReach,
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
    UniformTypeSpec,
)
from blockferry.engine.kv.type_manager import Demand, GroupContext, TypeManager


def make_manager(context: GroupContext) -> TypeManager:
    """The manager of a group."""
    spec = one_layer(context.spec)
    if isinstance(spec, ScratchRingSpec):
        return SingleTakeManager(context, _one_block)
    if isinstance(spec, MambaSpec):
        if spec.mode is MambaMode.ALIGN:
            return MambaManager(context, spec)
        extra = spec.block_size * spec.num_speculative_blocks
        return PositionalManager(context, StateRule(), num_extra_tokens=extra)
    assert isinstance(spec, AttentionSpec), spec
    if isinstance(spec.reach, EncoderReach | NoReach):
        tokens_per_block = spec.tokens_per_block
        return SingleTakeManager(context, lambda demand: cdiv(demand.num_encoder, tokens_per_block))
    return PositionalManager(context, hit_rule(spec))


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


def one_layer(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that says how all layers of a group behave."""
    return spec.layer_specs[0] if isinstance(spec, UniformTypeSpec) else spec


def window_of(spec: KVCacheSpec) -> int | None:
    """Tokens of a sliding window; None where the type has none."""
    spec = one_layer(spec)
    if isinstance(spec, AttentionSpec) and isinstance(spec.reach, WindowReach):
        return spec.reach.window
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
