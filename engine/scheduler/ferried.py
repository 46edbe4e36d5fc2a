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

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from blockferry.connectors.base import TransferPart
from blockferry.engine.config import Role
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
    """Raises ConfigError unless sequences of any instance that computes prompts can go to any that decodes."""
    everyone = list(instances)
    for instance in everyone:
        for number, group in enumerate(instance.kv.config.groups):
            _check_group(instance, number, group)
    kept = {instance.instance_id: _kept_layers(instance) for instance in everyone}
    for source, target in itertools.permutations(everyone, 2):
        if source.role is not Role.DECODE and target.role is not Role.PREFILL:
            _check_kept(kept, source.instance_id, target.instance_id)


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
    is_draft: bool

    def __str__(self) -> str:
        spec = self.spec
        reach = f" ({spec.reach})" if isinstance(spec, AttentionSpec) and spec.reach.storage != FullReach() else ""
        return f"{spec.kind}{reach}{' of a draft' if self.is_draft else ''}"

    def fills(self, target: _Kept) -> bool:
        """Whether it holds all that the target reads: the same, or every token of a layer that is local there."""
        here, there = self.spec, target.spec
        if self.is_draft != target.is_draft:
            return False
        if isinstance(here, AttentionSpec) and isinstance(there, AttentionSpec):
            reaches = (there.reach.storage, there.reach.kept_whole.storage)
            return here.content.is_latent == there.content.is_latent and here.reach.storage in reaches
        return here.kind is there.kind


def _kept_layers(instance: Instance) -> dict[int, _Kept]:
    return {
        layer_id: _Kept(spec, group.is_draft)
        for group in instance.kv.config.groups
        for layer_id, spec in zip(group.layer_ids, group.layer_specs, strict=True)
    }


def _check_kept(kept: Mapping[str, Mapping[int, _Kept]], source_id: str, target_id: str) -> None:
    source, target = kept[source_id], kept[target_id]
    for layer_id in sorted(source.keys() | target.keys()):
        here, there = source.get(layer_id), target.get(layer_id)
        if here is None or there is None or not here.fills(there):
            raise ConfigError(
                "instances",
                f"layer {layer_id} in the cache of {target_id} is {there or 'not cached'}, in that of {source_id} "
                f"{here or 'not cached'}; a sequence can go on only where no more is kept than where it comes from: "
                "serve one model, and use planner unified on both sides or on that of prefill",
            )
