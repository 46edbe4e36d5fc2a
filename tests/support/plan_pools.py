"""Pools of real plans, as connectors and as kernels see them, for tests of what moves between two of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch

from blockferry.connectors.base import PoolLayout, TransferPart
from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.plan import KVCachePlan, Planner, PlanRequest
from blockferry.engine.kv.planners import plan_with
from blockferry.engine.kv.planning import RankShare, plan_ranks
from blockferry.engine.kv.reach import (
    ChunkReach,
    FullReach,
    KVContent,
    LatentContent,
    SequenceLimits,
    SpecKind,
    WindowReach,
)
from blockferry.engine.kv.spec import AttentionSpec, LayerSpec, MambaSpec, ScratchRingSpec
from blockferry.engine.kv.state_fields import StateField
from blockferry.engine.models.sharding import Span, split_heads, split_layers
from blockferry.engine.worker.page_views import PageDTypes, PageViews
from blockferry.engine.worker.pool_layouts import HeldHeads, pool_layouts

ORDERS = ("BHLNC", "BLHNC", "LBHNC", "LBNHC")
LIMITS = SequenceLimits(max_model_len=64, max_in_flight_tokens=16)
DTYPES = PageDTypes(kv=torch.float16, states=(torch.float16, torch.float32))
NUM_HEADS = 4
STATE_FIELDS = (
    (
        StateField(name="conv.x", num_units=4, rows_per_unit=2),
        StateField(name="conv.b", num_units=1, rows_per_unit=3),  # on two ranks: two copies
        StateField(name="conv.c", num_units=2, rows_per_unit=1),
    ),
    (StateField(name="recurrent", num_units=8, rows_per_unit=1),),
)


def kv_span(tp_rank: int, tp_size: int) -> Span:
    """KV heads of a rank; more ranks than heads share one, in copies."""
    return split_heads(num_heads=2 * NUM_HEADS, num_kv_heads=NUM_HEADS, tp_rank=tp_rank, tp_size=tp_size).kv


def kv(block_size: int, tp_size: int, reach=None) -> AttentionSpec:
    content = KVContent(num_kv_heads=len(kv_span(0, tp_size)), head_dim=4, dtype_bytes=2)
    return AttentionSpec(block_size=block_size, content=content, reach=reach or FullReach())


def layers_of(mix: str, block_size: int, tp_size: int) -> tuple[LayerSpec, ...]:
    full = kv(block_size, tp_size)
    window = kv(block_size, tp_size, WindowReach(window=8))
    chunk = kv(block_size, tp_size, ChunkReach(chunk=16))
    latent = AttentionSpec(block_size=block_size, content=LatentContent(latent_dim=24, dtype_bytes=2))
    state = MambaSpec(
        block_size=block_size,
        shapes=tuple((sum(one.num_rows(tp_size) for one in fields), 3, 4) for fields in STATE_FIELDS),
        dtype_bytes=(2, 4),
        fields=STATE_FIELDS,
    )
    wide = dataclasses.replace(full, content=dataclasses.replace(full.content, head_dim_v=16))
    ring = ScratchRingSpec(block_size=8, page_bytes=96)
    return {
        "full": (full,) * 3,
        "full and windows": (full, window, window, full, window),
        "four full, two windows": (full, window, full, full, window, full),
        "three reaches": (full, window, chunk, full),
        "full and states": (full, state, full, state, state),
        "three kinds": (full, state, window, state, state),
        "latents": (latent,) * 3,
        "latents and states": (latent, state, latent, window, state),
        "two widths and a ring": (full, wide, full, ring, window),
    }[mix]


MIXES = (
    "full",
    "full and windows",
    "four full, two windows",
    "three reaches",
    "full and states",
    "three kinds",
    "latents",
    "latents and states",
    "two widths and a ring",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolKey:
    """A rank's pool: what of, how planned, and which rank."""

    mix: str
    planner: Planner = Planner.UNIFORM
    order: str = "BLHNC"
    block_size: int = 4
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1  # stages; a slab plan has one
    pp_rank: int = 0


@functools.cache
def plan_of(key: PoolKey) -> KVCachePlan | None:
    """None where the planner cannot."""
    layers = layers_of(key.mix, key.block_size, key.tp_size)
    request = PlanRequest(layers=layers, limits=LIMITS, memory_bytes=1 << 16, layout=key.order)
    try:
        if key.pp_size == 1:
            return plan_with(key.planner, request)
        spans = [split_layers(len(layers), rank, key.pp_size) for rank in range(key.pp_size)]
        ids = [frozenset(range(span.start, span.stop)) for span in spans]
        shares = [RankShare(layer_ids=one, memory_bytes=request.memory_bytes) for one in ids]
        return plan_ranks(request, shares, planner=key.planner)[key.pp_rank]
    except ConfigError:
        return None


@functools.cache
def layouts_of(key: PoolKey) -> tuple[PoolLayout, ...]:
    kv_heads = HeldHeads(span=kv_span(key.tp_rank, key.tp_size), num_copies=max(1, key.tp_size // NUM_HEADS))
    return pool_layouts(
        plan_of(key), order=key.order, dtype="float16", kv_heads=kv_heads, tp_rank=key.tp_rank, tp_size=key.tp_size
    )


def owned_blocks(plan: KVCachePlan, group: int) -> list[int]:
    """Blocks of a group that share no byte with those that this gives to other groups."""
    if plan.slab is None:
        return list(range(1 + group, plan.num_blocks, len(plan.groups)))
    pages = plan.slab.pages_per_slab[group]
    owned = range(group, plan.slab.num_slabs, len(plan.groups))
    return [1 + slab * pages + page for slab in owned for page in range(pages)]


def views_of(key: PoolKey, pool) -> dict[int, list]:
    """Bytes of every layer as kernels see them: [B, heads, tokens, bytes] of attention, [B, ...] per state tensor."""
    views = PageViews(plan_of(key), torch.from_numpy(pool), layout=key.order, dtypes=DTYPES)
    as_bytes = {i: [one.view(torch.uint8).numpy() for one in tensors] for i, tensors in views.layers.items()}
    for layer_id, spec in enumerate(layers_of(key.mix, key.block_size, key.tp_size)):
        if layer_id in as_bytes and isinstance(spec, AttentionSpec) and spec.content.is_latent:
            as_bytes[layer_id] = [one[:, None] for one in as_bytes[layer_id]]
    return as_bytes


def state_rows(key: PoolKey, tensor: int) -> list[tuple[str, int, int]]:
    """What each row of a state's tensor is: (field, unit, row within the unit)."""
    return [
        (field.name, unit, row)
        for field in STATE_FIELDS[tensor]
        for held in [field.held(key.tp_rank, key.tp_size)]
        for unit, row in itertools.product(range(held.start, held.stop), range(field.rows_per_unit))
    ]


def held_heads(key: PoolKey, layer_id: int) -> list[int]:
    """Heads of an attention layer that the rank holds."""
    spec = layers_of(key.mix, key.block_size, key.tp_size)[layer_id]
    if spec.content.is_latent:
        return [0]
    span = kv_span(key.tp_rank, key.tp_size)
    return list(range(span.start, span.stop))


def copy_naively(src: PoolKey, dst: PoolKey, src_pool, dst_pool, parts) -> None:
    """What a transfer must do, one token of one head of one layer after the other, through the kernels' views."""
    src_views, dst_views = views_of(src, src_pool), views_of(dst, dst_pool)
    for part in parts:
        for layer_id in common_layers(src, dst, GroupPair(part.src_group, part.dst_group)):
            if is_state(src, part.src_group):
                for tensor, (mine, theirs) in enumerate(zip(src_views[layer_id], dst_views[layer_id])):
                    places = {row: place for place, row in enumerate(state_rows(src, tensor))}
                    for place, row in enumerate(state_rows(dst, tensor)):
                        if row in places:
                            theirs[part.dst_block_ids[0], place] = mine[part.src_block_ids[0], places[row]]
                continue
            common = set(held_heads(src, layer_id)) & set(held_heads(dst, layer_id))
            for mine, theirs in zip(src_views[layer_id], dst_views[layer_id]):
                for head, token in itertools.product(common, range(part.num_tokens)):
                    src_column, src_slot = divmod(part.first_token + token, mine.shape[2])
                    dst_column, dst_slot = divmod(part.dst_first_token + token, theirs.shape[2])
                    value = mine[part.src_block_ids[src_column], held_heads(src, layer_id).index(head), src_slot]
                    theirs[part.dst_block_ids[dst_column], held_heads(dst, layer_id).index(head), dst_slot] = value


class GroupPair(NamedTuple):
    """A group of each side."""

    src: int
    dst: int


def group_pairs(src: PoolKey, dst: PoolKey) -> list[GroupPair]:
    """Those that have layers in common which are ferried."""
    pairs = itertools.product(range(len(plan_of(src).groups)), range(len(plan_of(dst).groups)))
    return [
        pair
        for pair in itertools.starmap(GroupPair, pairs)
        if is_ferried(src, pair.src) and common_layers(src, dst, pair)
    ]


def common_layers(src: PoolKey, dst: PoolKey, pair: GroupPair) -> list[int]:
    theirs = plan_of(dst).groups[pair.dst].layer_ids
    return [layer_id for layer_id in plan_of(src).groups[pair.src].layer_ids if layer_id in theirs]


def part_of(src: PoolKey, dst: PoolKey, pair: GroupPair, *, num_blocks: int) -> TransferPart:
    """What fills num_blocks blocks of the destination, from blocks in no order."""
    src_ids, dst_ids = (owned_blocks(plan_of(key), group)[::-1] for key, group in zip((src, dst), pair))
    size = 1 if is_state(dst, pair.dst) else plan_of(dst).groups[pair.dst].spec.block_size
    num_blocks = 1 if is_state(dst, pair.dst) else num_blocks
    return TransferPart(
        src_group=pair.src,
        dst_group=pair.dst,
        src_block_ids=np.array(src_ids[: num_blocks * 4], np.int32),
        dst_block_ids=np.array(dst_ids[:num_blocks], np.int32),
        num_tokens=num_blocks * size,
    )


def is_state(key: PoolKey, group: int) -> bool:
    return plan_of(key).groups[group].spec.kind is SpecKind.MAMBA


def is_ferried(key: PoolKey, group: int) -> bool:
    return plan_of(key).groups[group].spec.prefix_cacheable


def new_pool(key: PoolKey, seed: int | None = None):
    num_bytes = plan_of(key).pool_bytes
    if seed is None:
        return np.zeros(num_bytes, np.uint8)
    return np.random.default_rng(seed).integers(1, 255, num_bytes).astype(np.uint8)
