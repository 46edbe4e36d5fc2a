"""What of a prompt's cache travels in a hand-off: per cache group the blocks that the decode side took for it.

Of a resumed request, the output that it came with is treated as the prompt's end.

Reads the tables of both sides; takes and changes nothing. Knows block sizes and reach, never bytes. Sides that are
planned for other shapes may group the same layers otherwise: a group of D is filled from all groups of P that its
layers are in. A prompt travels whole or in pieces, one after the other, that end where blocks of both sides end in
every group.

    attention, columns of D   | null: out of reach | hit: D has them | taken for what comes |
                                                                     ^ first column        ^ prompt's end
    state                     | null                                      | running state   |

D's first column may start with tokens that no later one reads, where D's blocks are larger; P lets go of them on its
way, so the first one to travel is in the P block of the first token that is read. The state and what cross attention
reads of the encoder's input travel whole, with the last piece. Scratch rings are not ferried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from blockferry.connectors.base import TransferPart
from blockferry.engine.config import Role
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.block_pool import NULL_BLOCK_ID
from blockferry.engine.kv.groups import rule_of
from blockferry.engine.kv.reach import FullReach, SpecKind, cdiv
from blockferry.engine.kv.spec import AttentionSpec, KVCacheGroup, LayerSpec, one_layer
from blockferry.engine.request import Int32Array
from blockferry.engine.scheduler.handoff import Handoff
from blockferry.engine.scheduler.instance import Instance


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of a prompt."""

    start: int
    stop: int


def piece_of(handoff: Handoff, num_computed: int) -> Piece:
    """The piece that may travel next when num_computed tokens of the prompt are computed; empty: none yet."""
    if num_computed >= handoff.ticket.num_given_tokens:
        return Piece(handoff.num_sent, handoff.ticket.num_given_tokens)
    step = _piece_multiple(handoff)
    return Piece(handoff.num_sent, max(handoff.num_sent, num_computed // step * step))


def ferried_parts(handoff: Handoff, piece: Piece) -> tuple[TransferPart, ...]:
    """What of a piece must be moved so that the decode side can go on after the prompt.

    Groups that need nothing are left out. Both sides must have their rows, and the prefill side blocks for the piece.
    """
    return tuple(_parts(handoff, piece))


class _Groups(NamedTuple):
    """A group of each side that have layers in common."""

    src: int
    dst: int


def _parts(handoff: Handoff, piece: Piece) -> Iterator[TransferPart]:
    sources, targets = handoff.source.kv.config.groups, handoff.target.kv.config.groups
    source_of = {layer_id: number for number, group in enumerate(sources) for layer_id in group.layer_ids}
    for number, group in enumerate(targets):
        for source in sorted({source_of[layer_id] for layer_id in group.layer_ids}):
            yield from _parts_of(handoff, _Groups(source, number), piece)


def _parts_of(handoff: Handoff, groups: _Groups, piece: Piece) -> Iterator[TransferPart]:
    target, is_last = handoff.target.kv.config.groups[groups.dst], piece.stop == handoff.ticket.num_given_tokens
    if target.spec.kind is SpecKind.CROSS_ATTENTION:
        if is_last:
            yield _encoder_part(handoff, groups)
    elif target.spec.kind is SpecKind.MAMBA:
        if is_last:
            yield _state_part(handoff, groups)
    elif rule_of(target.spec) is not None:
        for wanted in _wanted(handoff, groups):
            tokens = Piece(max(piece.start, wanted.start), min(piece.stop, wanted.stop))
            if tokens.start < tokens.stop:
                yield _attention_part(handoff, groups, tokens)


def part_bytes(handoff: Handoff, part: TransferPart) -> float:
    """What a part weighs, by the specs of the decode side; on the wire it may be sent by several ranks."""
    group = handoff.target.kv.config.groups[part.dst_group]
    shared = set(handoff.source.kv.config.groups[part.src_group].layer_ids)
    return part.num_tokens * sum(
        _token_bytes(spec)
        for layer_id, spec in zip(group.layer_ids, group.layer_specs, strict=True)
        if layer_id in shared
    )


def whole_bytes(handoff: Handoff) -> float:
    """What all of a prompt's cache weighs: every token of every layer that attends, and the states after the last."""
    total = 0.0
    for group in handoff.target.kv.config.groups:
        num_tokens = handoff.ticket.num_given_tokens
        if group.spec.kind is SpecKind.CROSS_ATTENTION:
            num_tokens = handoff.ticket.num_encoder_tokens
        elif group.spec.kind is SpecKind.MAMBA:
            num_tokens = 1
        elif rule_of(group.spec) is None:
            num_tokens = 0
        total += num_tokens * sum(_token_bytes(spec) for spec in group.layer_specs)
    return total


def _token_bytes(spec: LayerSpec) -> float:
    """Of one token; of a recurrent layer, of its state."""
    num_tokens = 1 if spec.kind is SpecKind.MAMBA else spec.tokens_per_block
    return spec.unpadded_page_size_bytes / num_tokens


def _piece_multiple(handoff: Handoff) -> int:
    """Tokens after which a block ends on both sides, in every group whose tokens travel."""
    sizes = [
        _tokens_per_block(instance, number)
        for instance in (handoff.source, handoff.target)
        for number, group in enumerate(instance.kv.config.groups)
        if group.spec.kind is not SpecKind.MAMBA and rule_of(group.spec) is not None
    ]
    return math.lcm(*sizes)


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
    src_block_ids = _given_blocks(handoff, handoff.source, groups.src)[-1:]
    dst_block_ids = _given_blocks(handoff, handoff.target, groups.dst)[-1:]
    assert src_block_ids[0] != NULL_BLOCK_ID, (handoff.ticket.handle, groups)
    assert dst_block_ids[0] != NULL_BLOCK_ID, (handoff.ticket.handle, groups)
    return TransferPart(
        src_group=groups.src,
        dst_group=groups.dst,
        src_block_ids=src_block_ids,
        dst_block_ids=dst_block_ids,
        num_tokens=1,
    )


def _attention_part(handoff: Handoff, groups: _Groups, tokens: Piece) -> TransferPart:
    src_size, dst_size = _tokens_per_block(handoff.source, groups.src), _tokens_per_block(handoff.target, groups.dst)
    src_columns = slice(tokens.start // src_size, cdiv(tokens.stop, src_size))
    dst_columns = slice(tokens.start // dst_size, cdiv(tokens.stop, dst_size))
    src_block_ids = handoff.source.kv.block_ids(handoff.source_row, groups.src)[src_columns]
    dst_block_ids = handoff.target.kv.block_ids(handoff.target_row, groups.dst)[dst_columns]
    assert NULL_BLOCK_ID not in src_block_ids, (handoff.ticket.handle, groups, tokens, src_block_ids)
    assert NULL_BLOCK_ID not in dst_block_ids, (handoff.ticket.handle, groups, tokens, dst_block_ids)
    return TransferPart(
        src_group=groups.src,
        dst_group=groups.dst,
        src_block_ids=src_block_ids,
        dst_block_ids=dst_block_ids,
        num_tokens=tokens.stop - tokens.start,
        first_token=tokens.start % src_size,
        dst_first_token=tokens.start % dst_size,
    )


def _wanted(handoff: Handoff, groups: _Groups) -> Iterator[Piece]:
    """What the decode side lacks and a later token reads, or begins shortly before; at most two pieces.

    They are two where all of the prompt is kept, and a window of the output that a resumed request came with.
    """
    src_size, dst_size = _tokens_per_block(handoff.source, groups.src), _tokens_per_block(handoff.target, groups.dst)
    source_rule = rule_of(handoff.source.kv.config.groups[groups.src].spec)
    target_rule = rule_of(handoff.target.kv.config.groups[groups.dst].spec)
    assert source_rule is not None, groups
    assert target_rule is not None, groups
    num_given, num_prompt_tokens = handoff.ticket.num_given_tokens, handoff.ticket.num_prompt_tokens
    # a hit's whole blocks are shared; one that it ends inside of is the row's own copy, and travels whole
    start = handoff.target_sequence.num_hit_tokens // dst_size * dst_size
    first_read = max(0, int(source_rule.num_skipped(num_given))) // src_size * src_size
    first_read = max(first_read, _first_held(_given_blocks(handoff, handoff.target, groups.dst)) * dst_size)
    is_prompt_kept = target_rule.first_skippable(num_prompt_tokens, dst_size) > 0
    if is_prompt_kept and first_read > num_prompt_tokens:
        yield Piece(start, num_prompt_tokens)
    if not is_prompt_kept or first_read > num_prompt_tokens:
        start = max(start, first_read)
    yield Piece(start, num_given)


def _given_blocks(handoff: Handoff, instance: Instance, group: int) -> Int32Array:
    """The blocks of a side, in a group, of the tokens that were given; null ones 0."""
    row = handoff.source_row if instance is handoff.source else handoff.target_row
    spec = instance.kv.config.groups[group].spec
    return instance.kv.block_ids(row, group)[: spec.num_blocks_for(handoff.ticket.num_given_tokens)]


def _first_held(block_ids: Int32Array) -> int:
    """The column from which on there are no nulls."""
    nulls = np.flatnonzero(block_ids == NULL_BLOCK_ID)
    return int(nulls[-1]) + 1 if len(nulls) else 0


def _tokens_per_block(instance: Instance, group: int) -> int:
    return instance.kv.config.groups[group].spec.tokens_per_block


def check_ferriable(newcomer: Instance, others: Iterable[Instance]) -> None:
    """Raises ConfigError unless sequences of any instance that computes prompts can go to any that decodes.

    The others are checked against each other already.
    """
    for number, group in enumerate(newcomer.kv.config.groups):
        _check_group(newcomer, number, group)
    for other in others:
        for source, target in ((other, newcomer), (newcomer, other)):
            if source.role is not Role.DECODE and target.role is not Role.PREFILL:
                _check_kept(source, target)


def _check_group(instance: Instance, number: int, group: KVCacheGroup) -> None:
    spec = one_layer(group.spec)
    if isinstance(spec, AttentionSpec) and spec.context_parallel_size > 1:
        raise ConfigError(
            "instances",
            f"{instance.instance_id} is to hand sequences over, but group {number} of its cache is {spec.kind}, "
            "whose blocks several ranks share; use role mixed",
        )


class _Kept(NamedTuple):
    """How an instance keeps one layer. Groups, block and page sizes may differ between two."""

    spec: LayerSpec

    def __str__(self) -> str:
        spec = self.spec
        reach = f" ({spec.reach})" if isinstance(spec, AttentionSpec) and spec.reach.storage != FullReach() else ""
        return f"{spec.kind}{reach}"

    def fills(self, target: _Kept) -> bool:
        """Whether it holds all that the target reads: the same, or every token of a layer that is local there."""
        here, there = self.spec, target.spec
        if isinstance(here, AttentionSpec) and isinstance(there, AttentionSpec):
            reaches = (there.reach.storage, there.reach.kept_whole.storage)
            return here.content.is_latent == there.content.is_latent and here.reach.storage in reaches
        return here.kind is there.kind


def _kept_layers(instance: Instance) -> dict[int, _Kept]:
    return {
        layer_id: _Kept(spec)
        for group in instance.kv.config.groups
        for layer_id, spec in zip(group.layer_ids, group.layer_specs, strict=True)
    }


def _check_kept(source_instance: Instance, target_instance: Instance) -> None:
    source_id, target_id = source_instance.instance_id, target_instance.instance_id
    source, target = _kept_layers(source_instance), _kept_layers(target_instance)
    for layer_id in sorted(source.keys() | target.keys()):
        here, there = source.get(layer_id), target.get(layer_id)
        if here is None or there is None or not here.fills(there):
            raise ConfigError(
                "instances",
                f"layer {layer_id} in the cache of {target_id} is {there or 'not cached'}, in that of {source_id} "
                f"{here or 'not cached'}; a sequence can go on only where no more is kept than where it comes from: "
                "serve one model, and use planner unified on both sides or on that of prefill",
            )
