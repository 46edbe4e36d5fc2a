"""The decision ladder that forms groups: which layers of a model share a block table.

    nothing to cache (an encoder, no attention)        no group
    all layers need the same blocks of a sequence      one group, whatever their page sizes
    blocks outermost, pages of several sizes           groups packed side by side in a block (plan_packed.py)
    pages can be made one size                         groups of equally many layers (split_by_pattern)
    local layers kept whole share blocks               one group, no block ever freed early
    else                                               UnplannableLayers

Decides only; sizes and addresses are planning.py's and plan_layout.py's. The ladder is vLLM's
(vllm/v1/core/kv_cache_planning.py), described in the seeds.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

from blockferry.engine.errors import UnplannableLayers
from blockferry.engine.kv.plan import PlanRequest
from blockferry.engine.kv.plan_layout import is_block_outermost
from blockferry.engine.kv.plan_packed import pack_layers
from blockferry.engine.kv.reach import FullReach, SpecKind, cdiv
from blockferry.engine.kv.spec import AttentionSpec, KVCacheGroup, KVCacheSpec, LayerSpec, UniformTypeSpec

logger = logging.getLogger(__name__)

Layers = dict[int, LayerSpec]
"""Specs by layer number, in ascending order."""

_FULL_KINDS = {SpecKind.FULL_ATTENTION, SpecKind.MLA}


def uniform_groups(request: PlanRequest) -> tuple[KVCacheGroup, ...]:
    """Groups of a plan that frees the blocks of local layers early. Raises UnplannableLayers."""
    layers = cached_layers(request)
    if not layers:
        return ()
    if can_share_table(layers.values()):
        return _make_groups(request, layers, [list(layers)])
    if is_block_outermost(request.layout) and _num_page_sizes(layers) > 1:
        return _make_groups(request, layers, pack_layers(layers))
    page_size = max(spec.page_size_bytes for spec in layers.values())
    resized = {layer_id: spec.with_page_size(page_size) for layer_id, spec in layers.items()}
    unified = {layer_id: spec for layer_id, spec in resized.items() if spec is not None}
    if len(unified) == len(layers):
        return _make_groups(request, unified, split_by_pattern(unified))
    refusing = next(layer_id for layer_id, spec in resized.items() if spec is None)
    whole = keep_whole(layers)
    if not can_share_table(whole.values()):
        raise UnplannableLayers(
            refusing,
            f"its pages of {layers[refusing].page_size_bytes} bytes can be neither grown nor padded to the"
            f" {page_size} bytes of the largest; use layout BLHNC, which packs pages of any size side by side, or the"
            " slab planner",
        )
    logger.warning(
        "pages of %d bytes (layer %d) cannot be made %d bytes: all layers store every token, local ones too",
        layers[refusing].page_size_bytes,
        refusing,
        page_size,
    )
    return _make_groups(request, whole, [list(whole)])


def unified_groups(request: PlanRequest) -> tuple[KVCacheGroup, ...]:
    """At most one group: local layers are kept whole beside full ones. Raises UnplannableLayers where they cannot."""
    layers = cached_layers(request)
    if not layers:
        return ()
    if not can_share_table(layers.values()):
        layers = keep_whole(layers)
        _check_one_table(layers)
        _check_one_window(layers)
    return _make_groups(request, layers, [list(layers)])


def cached_layers(request: PlanRequest) -> Layers:
    """Layers that have a cache: all but an encoder's own attention."""
    return {layer_id: spec for layer_id, spec in enumerate(request.layers) if spec.kind is not SpecKind.ENCODER_ONLY}


def can_share_table(specs: Iterable[LayerSpec]) -> bool:
    """Whether all of them need the same blocks of any sequence."""
    return len({spec.table_key for spec in specs}) <= 1


def keep_whole(layers: Layers) -> Layers:
    """Local layers as full attention, in blocks of the full layers' size; unchanged where no layer is full."""
    full_block_sizes = {spec.block_size for spec in layers.values() if spec.kind in _FULL_KINDS}
    if not full_block_sizes:
        return layers
    common = full_block_sizes.pop() if len(full_block_sizes) == 1 else None
    return {layer_id: spec.kept_whole(common or spec.block_size) for layer_id, spec in layers.items()}


def split_by_pattern(layers: Layers) -> list[list[int]]:
    """Layer numbers of groups of about equally many layers, for pages of one size.

    A model repeats a pattern of layers (10 full and 20 sliding ones are 10 times 1 + 2); a group takes one layer of
    each repeat. So a group is as large as the rarest spec is frequent, or as the most frequent one where that is less
    than 1.5 times as frequent. Layers go to the groups of their spec in turn, so that each pipeline stage has some of
    each group.
    """
    buckets: dict[LayerSpec, list[int]] = {}
    for layer_id, spec in layers.items():
        buckets.setdefault(spec.storage, []).append(layer_id)
    counts = [len(layer_ids) for layer_ids in buckets.values()]
    group_size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[list[int]] = []
    for layer_ids in buckets.values():
        num_groups = cdiv(len(layer_ids), group_size)
        groups += [layer_ids[i::num_groups] for i in range(num_groups)]
    return groups


def group_spec(specs: Sequence[LayerSpec]) -> KVCacheSpec:
    """The spec of a group of these layers: theirs if they are stored alike, else all of them in a row."""
    named_local = {spec for spec in specs if spec != spec.storage}
    if len({spec.storage for spec in specs}) == 1 and len(named_local) <= 1:
        return next(iter(named_local), specs[0])
    return UniformTypeSpec(layer_specs=tuple(specs))


def project_group(group: KVCacheGroup, layer_ids: frozenset[int]) -> KVCacheGroup:
    """The part of a group on a rank that holds these layers; with no layer, but still a group, where it holds none."""
    specs = dict(zip(group.layer_ids, group.layer_specs, strict=True))
    held = tuple(layer_id for layer_id in group.layer_ids if layer_id in layer_ids)
    spec = group_spec([specs[layer_id] for layer_id in held]) if held else group.spec
    return dataclasses.replace(group, layer_ids=held, spec=spec)


def _make_groups(request: PlanRequest, layers: Layers, groups: list[list[int]]) -> tuple[KVCacheGroup, ...]:
    return tuple(
        KVCacheGroup(
            layer_ids=tuple(layer_ids),
            spec=group_spec([layers[layer_id] for layer_id in layer_ids]),
            is_draft=not request.draft_layer_ids.isdisjoint(layer_ids),
        )
        for layer_ids in groups
    )


def _num_page_sizes(layers: Layers) -> int:
    return len({spec.page_size_bytes for spec in layers.values()})


def _check_one_table(layers: Layers) -> None:
    """Raises UnplannableLayers where even layers kept whole need other blocks than the first one."""
    first_id, first = next(iter(layers.items()))
    for layer_id, spec in layers.items():
        if spec.table_key != first.table_key:
            raise UnplannableLayers(
                layer_id,
                f"{spec.kind} in blocks of {spec.block_size} tokens cannot share one block table with layer {first_id},"
                f" {first.kind} in blocks of {first.block_size}, even with every token stored; leave the hybrid planner"
                " on",
            )


def _check_one_window(layers: Layers) -> None:
    """Raises UnplannableLayers where layers kept whole would compute several windows or several chunk sizes."""
    specs = {i: spec for i, spec in layers.items() if isinstance(spec, AttentionSpec)}
    if any(spec.content.is_latent for spec in specs.values()):
        return  # such a group has a spec for each layer
    reaches = {i: spec.reach for i, spec in specs.items() if isinstance(spec.reach, FullReach)}
    for what, spans in (
        ("window", {i: reach.computes_window for i, reach in reaches.items()}),
        ("chunk", {i: reach.computes_chunk for i, reach in reaches.items()}),
    ):
        found = {span: i for i, span in spans.items() if span is not None}
        if len(found) > 1:
            raise UnplannableLayers(
                found[max(found)],
                f"attention {what}s of {', '.join(map(str, sorted(found)))} tokens in one group kept whole, where one"
                " is the limit; leave the hybrid planner on",
            )
