"""What of a prompt's cache travels in a hand-off: per cache group the blocks that the decode side took for it.

Reads the tables of both sides; takes and changes nothing. Knows block sizes and reach, never bytes.

    attention, columns of D   | null: out of reach | hit: D has them | taken for what comes |
                                                                     ^ first column        ^ prompt's end
    state                     | null                                      | running state   |

D's first column may start with a token that P let go of before its last chunk, where D's blocks are larger; then the
first one that P holds is the first to travel. What cross attention reads of the encoder's input travels whole. Scratch
rings are not ferried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from blockferry.connectors.base import TransferPart
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID
from blockferry.engine.kv.groups import rule_of
from blockferry.engine.kv.reach import FullReach, SpecKind
from blockferry.engine.kv.spec import AttentionSpec, KVCacheGroup, one_layer
from blockferry.engine.request import Int32Array
from blockferry.engine.scheduler.handoff import Handoff
from blockferry.engine.scheduler.instance import Instance


def ferried_parts(handoff: Handoff) -> tuple[TransferPart, ...]:
    """What must be moved so that the decode side can go on after the prompt; groups that need nothing are left out.

    Both sides must have their rows, and the prompt must be computed on the prefill side.
    """
    return tuple(_parts(handoff))


def _parts(handoff: Handoff) -> Iterator[TransferPart]:
    for number, group in enumerate(handoff.target.kv.config.groups):
        part: TransferPart | None = None
        if group.spec.kind is SpecKind.CROSS_ATTENTION:
            part = _encoder_part(handoff, number)
        elif group.spec.kind is SpecKind.MAMBA:
            part = _state_part(handoff, number)
        elif rule_of(group.spec) is not None:
            part = _attention_part(handoff, number)
        if part is not None:
            yield part


def _encoder_part(handoff: Handoff, group: int) -> TransferPart:
    """Keys and values of the encoder's whole input, which no hit ever spares."""
    return TransferPart(
        group=group,
        src_block_ids=handoff.source.kv.block_ids(handoff.source_row, group),
        dst_block_ids=handoff.target.kv.block_ids(handoff.target_row, group),
        num_tokens=handoff.ticket.num_encoder_tokens,
    )


def _state_part(handoff: Handoff, group: int) -> TransferPart:
    """The state after the prompt's last token, wherever either side keeps it."""
    src_block_ids = _prompt_blocks(handoff.source, handoff.source_row, group)[-1:]
    dst_block_ids = _prompt_blocks(handoff.target, handoff.target_row, group)[-1:]
    assert src_block_ids[0] != NULL_BLOCK_ID, (handoff.ticket.handle, group)
    assert dst_block_ids[0] != NULL_BLOCK_ID, (handoff.ticket.handle, group)
    return TransferPart(group=group, src_block_ids=src_block_ids, dst_block_ids=dst_block_ids, num_tokens=1)


def _attention_part(handoff: Handoff, group: int) -> TransferPart | None:
    num_tokens = handoff.ticket.num_prompt_tokens
    src_block_ids = _prompt_blocks(handoff.source, handoff.source_row, group)
    dst_block_ids = _prompt_blocks(handoff.target, handoff.target_row, group)
    src_size, dst_size = _tokens_per_block(handoff.source, group), _tokens_per_block(handoff.target, group)
    # a hit's whole blocks are shared; one that it ends inside of is the row's own copy, and travels whole
    dst_column = max(handoff.target_sequence.num_hit_tokens // dst_size, _first_held(dst_block_ids))
    first_token = max(dst_column * dst_size, _first_held(src_block_ids) * src_size)
    _check_reach(handoff, group, first_token, dst_column * dst_size)
    if first_token >= num_tokens:
        return None
    src_column, dst_column = first_token // src_size, first_token // dst_size
    return TransferPart(
        group=group,
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
    words = [[_describe(group) for group in instance.kv.config.groups] for instance in (one, other)]
    if len(words[0]) != len(words[1]):
        raise ConfigError(
            "instances",
            f"the cache of {other.instance_id} has {len(words[1])} groups, that of {one.instance_id} {len(words[0])}; "
            "sequences are handed over between equal groups: use one planner and one set of layers for all instances",
        )
    for number, (here, there) in enumerate(zip(*words, strict=True)):
        if here != there:
            raise ConfigError(
                "instances",
                f"group {number} of the cache of {other.instance_id} is {there}, that of {one.instance_id} is {here}; "
                "sequences are handed over between equal groups: use one planner and one set of layers for all "
                "instances",
            )


def _describe(group: KVCacheGroup) -> str:
    """What must be equal on both sides: layers, cache type and reach. Block and page sizes may differ."""
    spec = one_layer(group.spec)
    reach = ""
    if isinstance(spec, AttentionSpec) and spec.reach.storage != FullReach():
        reach = f" ({spec.reach})"
    draft = " of a draft" if group.is_draft else ""
    return f"{spec.kind}{reach} of layers {sorted(group.layer_ids)}{draft}"
