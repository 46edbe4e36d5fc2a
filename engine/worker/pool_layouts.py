"""Where a plan's pages lie, as connectors must know it: PoolLayouts of the regions of a rank's pool.

Arithmetic on the plan, without torch. What page_views.py turns into tensors is described here by the same strides:

    content   one token of one head                       heads                   tokens of a block
    KV        K then V                                    this rank's KV heads    block_size
    latent    the vector                                  one, on every rank      block_size
    state     one unit of a field                         this rank's units       one

A state has one layout for each of its fields (state_fields.py), which follow each other in its page. Scratch rings,
which no other sequence and no peer ever reads, have no layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from blockferry.connectors.base import ContentKind, PoolLayout, Strides
from blockferry.engine.kv.plan import KVCachePlan, PageRegion
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, MambaSpec
from blockferry.engine.kv.state_fields import StateField
from blockferry.engine.models.sharding import Span

_ONE_HEAD = Span(start=0, stop=1)


def pool_layouts(
    plan: KVCachePlan, *, order: str, dtype: str, kv_heads: HeldHeads, tp_rank: int, tp_size: int
) -> tuple[PoolLayout, ...]:
    """Layouts of everything in a rank's pool that is ferried, in the order of the plan's regions.

    `order` is the layout that the plan was made for. `kv_heads` are those that the rank really holds, no more than
    the plan's specs say, which are of the rank with most. A rank alone (tp_size 1) holds all heads of every layer,
    whatever kv_heads says. Raises ValueError for more heads than planned, for blocks that context-parallel ranks share,
    and for states whose fields the plan does not know.
    """
    rank = _Rank(order=order, dtype=dtype, kv_heads=kv_heads, tp_rank=tp_rank, tp_size=tp_size)
    layouts: list[PoolLayout] = []
    for region in plan.regions:
        num_blocks = 1 + plan.slab.num_pages(region.group) if plan.slab else plan.num_blocks
        layouts += rank.layouts(region, num_blocks)
    return tuple(layouts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldHeads:
    """KV heads of a rank; num_copies ranks of its instance, neighbours, hold the same."""

    span: Span
    num_copies: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Whose pool is described."""

    order: str
    dtype: str
    kv_heads: HeldHeads
    tp_rank: int
    tp_size: int

    def layouts(self, region: PageRegion, num_blocks: int) -> Iterator[PoolLayout]:
        """The region's layouts; none where it is not ferried."""
        spec = region.spec
        if isinstance(spec, MambaSpec):
            yield from self._state(region, spec, num_blocks)
        elif isinstance(spec, AttentionSpec):
            yield self._attention(region, spec, num_blocks)

    def _state(self, region: PageRegion, spec: MambaSpec, num_blocks: int) -> Iterator[PoolLayout]:
        if len(spec.fields) != len(spec.shapes):
            raise ValueError(
                f"layers {region.layer_ids} of group {region.group}: states of {len(spec.shapes)} tensors, of which "
                f"{len(spec.fields)} have known fields, cannot be ferried; name the fields in engine/kv/model_states.py"
            )
        offset = region.offset
        for shape, dtype_bytes, fields in zip(spec.shapes, spec.dtype_bytes, spec.fields, strict=True):
            row_bytes = math.prod(shape[1:]) * dtype_bytes
            for field in fields:
                unit_bytes = field.rows_per_unit * row_bytes
                yield self._field(region, field, unit_bytes=unit_bytes, offset=offset, num_blocks=num_blocks)
                offset += field.num_rows(self.tp_size) * row_bytes

    def _field(
        self, region: PageRegion, field: StateField, *, unit_bytes: int, offset: int, num_blocks: int
    ) -> PoolLayout:
        units, num_copies = field.held(self.tp_rank, self.tp_size), field.num_copies(self.tp_size)
        return PoolLayout(
            order=self.order,
            num_blocks=num_blocks,
            block_size=1,
            layer_ids=region.layer_ids,
            head_start=units.start,
            num_heads=len(units),
            content_bytes=unit_bytes,
            dtype=self.dtype,
            group=region.group,
            content=ContentKind.STATE,
            field=field.name,
            num_copies=num_copies,
            copy=self.tp_rank % num_copies,
            offset=offset,
            strides=Strides(block=region.block_stride, layer=region.layer_stride, head=unit_bytes, token=unit_bytes),
        )

    def _attention(self, region: PageRegion, spec: AttentionSpec, num_blocks: int) -> PoolLayout:
        if spec.context_parallel_size > 1:
            raise ValueError(
                f"layers {region.layer_ids} of group {region.group}: blocks that {spec.context_parallel_size} "
                "context-parallel ranks share cannot be ferried; use context_parallel_size=1"
            )
        is_latent = spec.content.is_latent
        heads = _ONE_HEAD if is_latent else self._heads(region, spec)
        num_copies = self.tp_size if is_latent else self.kv_heads.num_copies
        return PoolLayout(
            order=self.order,
            num_blocks=num_blocks,
            block_size=spec.block_size,
            layer_ids=region.layer_ids,
            head_start=heads.start,
            num_heads=len(heads),
            content_bytes=spec.content.head_bytes,
            dtype=self.dtype,
            group=region.group,
            content=ContentKind.LATENT if is_latent else ContentKind.KV,
            num_copies=num_copies,
            copy=self.tp_rank % num_copies,
            offset=region.offset,
            strides=_strides(region, spec, self.order),
        )

    def _heads(self, region: PageRegion, spec: AttentionSpec) -> Span:
        assert isinstance(spec.content, KVContent), spec
        num_planned = spec.content.num_kv_heads
        if self.tp_size == 1:
            return Span(start=0, stop=num_planned)
        held = self.kv_heads.span
        if len(held) > num_planned:
            raise ValueError(
                f"layers {region.layer_ids} of group {region.group} are planned with {num_planned} KV heads, but this "
                f"rank holds {len(held)}; plan for the rank with most"
            )
        return held


def _strides(region: PageRegion, spec: AttentionSpec, order: str) -> Strides:
    """As plan_layout.py lays pages out; see PageRegion for heads outside of layers."""
    head_bytes = spec.content.head_bytes
    token, head = head_bytes, spec.head_slice_bytes
    if order == "LBNHC":
        token, head = spec.content.token_bytes, head_bytes
    elif order == "BHLNC":
        head = len(region.layer_ids) * region.layer_stride
    return Strides(block=region.block_stride, layer=region.layer_stride, head=head, token=token)
