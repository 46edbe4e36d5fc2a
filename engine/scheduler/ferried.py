"""What of a prompt's cache travels in a hand-off: per cache group the blocks that the decode side took for it.

Reads the tables of both sides; takes and changes nothing. Knows block sizes and reach, never bytes. Sides that are
planned for other shapes may group the same layers otherwise: a group of D is filled from all groups of P that its
layers are in.

    attention, columns of D   | null: out of reach | hit: D has them | taken for what comes |
                                                                     ^ first column        ^ prompt's end
    state                     | null                                      | running state   |

D's first column may start with a token that P let go of before its last chunk, where D's blocks are larger; then the
first one that P holds is the first to travel. What cross attention reads of the encoder's input travels whole. Scratch
rings are not ferried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from blockferry.connectors.base import TransferPart
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID
from blockferry.engine.kv.groups import rule_of
from blockferry.engine.kv.reach import FullReach, SpecKind
from blockferry.engine.kv.spec import AttentionSpec, KVCacheGroup, LayerSpec, one_layer
from blockferry.engine.request import Int32Array
from blockferry.engine.scheduler.handoff import Handoff
from blockferry.engine.scheduler.instance import Instance


def ferried_parts(handoff: Handoff) -> tuple[TransferPart, ...]:
    """What must be moved so that the decode side can go on after the prompt; groups that need nothing are left out.

    Both sides must have their rows, and the prompt must be computed on the prefill side.
    """
    return tuple(_parts(handoff))


class _Groups(NamedTuple):
    """A group of each side that have layers in common."""

    src: int
    dst: int


def _parts(handoff: Handoff) -> Iterator[TransferPart]:
    sources, targets = handoff.source.kv.config.groups, handoff.target.kv.config.groups
    source_of = {layer_id: number for number, group in enumerate(sources) for layer_id in group.layer_ids}
    for number, group in enumerate(targets):
        for source in sorted({source_of[layer_id] for layer_id in group.layer_ids}):
            part = _part(handoff, _Groups(source, number), group)
            if part is not None:
                yield part


def _part(handoff: Handoff, groups: _Groups, target: KVCacheGroup) -> TransferPart | None:
    if target.spec.kind is SpecKind.CROSS_ATTENTION:
        return _encoder_part(handoff, groups)
    if target.spec.kind is SpecKind.MAMBA:
        return _state_part(handoff, groups)
    return None if rule_of(target.spec) is None else _attention_part(handoff, groups)


def _encoder_part(handoff: Handoff, groups: _Groups) -> TransferPart:
    """Keys and values of the encoder's whole input, which no hit ever spares."""
    return TransferPart(
        src_group=groups.src,
        dst_group=groups.dst,
        src_block_ids=handoff.source.kv.block_ids(handoff.source_row, groups.src),
        dst_block_ids=handoff.target.kv.block_ids(handoff.target_row, groups.dst),
        num_tokens=handoff.ticket.num_encoder_tokens,
    )


def _state_part(handoff: Handoff, groups: _Groups) -> TransferPart:
    """The state after the prompt's last token, wherever either side keeps it."""
    src_block_ids = _prompt_blocks(handoff.source, handoff.source_row, groups.src)[-1:]
    dst_block_ids = _prompt_blocks(handoff.target, handoff.target_row, groups.dst)[-1:]
    assert src_block_ids[0] != NULL_BLOCK_ID, (handoff.ticket.handle, groups)
    assert dst_block_ids[0] != NULL_BLOCK_ID, (handoff.ticket.handle, groups)
    return TransferPart(
        src_group=groups.src,
        dst_group=groups.dst,
        src_block_ids=src_block_ids,
        dst_block_ids=dst_block_ids,
        num_tokens=1,
    )


def _attention_part(handoff: Handoff, groups: _Groups) -> TransferPart | None:
    num_tokens = handoff.ticket.num_prompt_tokens
    src_block_ids = _prompt_blocks(handoff.source, handoff.source_row, groups.src)
    dst_block_ids = _prompt_blocks(handoff.target, handoff.target_row, groups.dst)
    src_size, dst_size = _tokens_per_block(handoff.source, groups.src), _tokens_per_block(handoff.target, groups.dst)
    # a hit's whole blocks are shared; one that it ends inside of is the row's own copy, and travels whole
    dst_column = max(handoff.target_sequence.num_hit_tokens // dst_size, _first_held(dst_block_ids))
    first_token = max(dst_column * dst_size, _first_held(src_block_ids) * src_size)
    _check_reach(handoff, groups.src, first_token, dst_column * dst_size)
    if first_token >= num_tokens:
        return None
    src_column, dst_column = first_token // src_size, first_token // dst_size
    return TransferPart(
        src_group=groups.src,
        dst_group=groups.dst,
        src_block_ids=src_block_ids[src_column:],
        dst_block_ids=dst_block_ids[dst_column:],
        num_tokens=num_tokens - first_token,
        first_token=first_token % src_size,
        dst_first_token=first_token % dst_size,
    )


def _check_reach(handoff: Handoff, group: int, first_token: int, first_wanted: int) -> None:
    """The source must hold every token that the next one reads and that the target lacks."""
    rule = rule_of(handoff.source.kv.config.groups[group].spec)
    assert rule is not None, group
    first_read = int(rule.num_skipped(handoff.ticket.num_prompt_tokens))
    assert first_token <= max(first_wanted, first_read), (handoff.ticket.handle, group, first_token, first_wanted)


def _prompt_blocks(instance: Instance, row: int, group: int) -> Int32Array:
    """The row's blocks up to the prompt's end, in a group; null ones 0."""
    num_prompt_tokens = int(instance.rows.num_prompt_tokens[row])
    return instance.kv.block_ids(row, group)[: instance.kv.config.groups[group].spec.num_blocks_for(num_prompt_tokens)]


def _first_held(block_ids: Int32Array) -> int:
    """The column from which on there are no nulls."""
    nulls = np.flatnonzero(block_ids == NULL_BLOCK_ID)
    return int(nulls[-1]) + 1 if len(nulls) else 0


def _tokens_per_block(instance: Instance, group: int) -> int:
    return instance.kv.config.groups[group].spec.tokens_per_block


def check_ferriable(instances: Iterable[Instance]) -> None:
    """Raises ConfigError unless sequences of any of the instances can be handed over to any other."""
    first: Instance | None = None
    for instance in instances:
        for number, group in enumerate(instance.kv.config.groups):
            _check_group(instance, number, group)
        first = first or instance
        _check_alike(first, instance)


def _check_group(instance: Instance, number: int, group: KVCacheGroup) -> None:
    spec = one_layer(group.spec)
    if isinstance(spec, AttentionSpec) and spec.context_parallel_size > 1:
        raise ConfigError(
            "instances",
            f"{instance.instance_id} is to hand sequences over, but group {number} of its cache is {spec.kind}, "
            "whose blocks several ranks share; use role mixed",
        )


def _check_alike(one: Instance, other: Instance) -> None:
    words = [_describe_layers(instance) for instance in (one, other)]
    for layer_id in sorted(words[0].keys() | words[1].keys()):
        here, there = (described.get(layer_id, "not cached") for described in words)
        if here != there:
            raise ConfigError(
                "instances",
                f"layer {layer_id} in the cache of {other.instance_id} is {there}, in that of {one.instance_id} "
                f"{here}; sequences are handed over between equal layers: let all planners keep local layers alike "
                "(unified keeps them whole), and serve one model",
            )


def _describe_layers(instance: Instance) -> dict[int, str]:
    """By layer id what must be equal on both sides: cache type and reach. Groups, block and page sizes may differ."""
    return {
        layer_id: _describe(spec) + (" of a draft" if group.is_draft else "")
        for group in instance.kv.config.groups
        for layer_id, spec in zip(group.layer_ids, group.layer_specs, strict=True)
    }


def _describe(spec: LayerSpec) -> str:
    if isinstance(spec, AttentionSpec) and spec.reach.storage != FullReach():
        return f"{spec.kind} ({spec.reach})"
    return str(spec.kind)
