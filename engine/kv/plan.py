"""A plan of the KV cache: which layers share block tables, and where their pages lie in a rank's memory.

Values only; planning.py and slab_planning.py make them, the ledger and the workers are built from them.
"""

from __future__ import annotations

import dataclasses
import enum

from blockferry.engine.kv.reach import SequenceLimits
from blockferry.engine.kv.spec import KVCacheGroup, LayerSpec, SlabGeometry


class Planner(enum.StrEnum):
    """How groups are formed.

    UNIFORM: pages of one size, groups of equally many layers, padding where counts do not divide. SLAB: one group per
    spec, pages of each group's own size carved out of slabs. UNIFIED: one group; local layers are kept whole.
    """

    UNIFORM = "uniform"
    SLAB = "slab"
    UNIFIED = "unified"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for: one rank of an instance."""

    layers: tuple[LayerSpec, ...]  # by layer number
    limits: SequenceLimits
    memory_bytes: int  # for the whole pool, null block included
    layout: str = "BLHNC"  # axes, outermost first; see plan_layout.py
    draft_layer_ids: frozenset[int] = frozenset()  # layers of a draft model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageRegion:
    """Where layers of one group lie: page b of the i-th layer starts at offset + i * layer_stride + b * block_stride.

    All in bytes from the pool's start. Regions of different groups overlap: a block belongs to one group at a time.
    Where heads lie outside layers (BHLNC) that start is of head 0, whose successors follow
    len(layer_ids) * layer_stride apart.
    """

    group: int
    layer_ids: tuple[int, ...]
    spec: LayerSpec  # of each of these layers
    offset: int
    layer_stride: int
    block_stride: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCachePlan:
    """The plan of one rank's pool.

    num_blocks counts the null block; of a slab plan it is that of the group with most blocks. useful_fraction is
    content bytes over pool bytes when all blocks are taken. capacity_tokens and max_concurrency are for sequences of
    max_model_len, fractions of a sequence included; num_whole_sequences of them can run at once.
    """

    planner: Planner
    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    bytes_per_block: int  # of the pool, per block id; of a slab plan, per slab
    regions: tuple[PageRegion, ...]
    hash_block_size: int
    scheduler_block_size: int
    useful_fraction: float
    capacity_tokens: int
    max_concurrency: float
    num_whole_sequences: int
    pool_bytes: int
    slab: SlabGeometry | None = None
