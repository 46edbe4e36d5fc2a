"""Groups for layouts with blocks outermost, where pages of several sizes lie side by side in a block.

Every group has its own division of a block; the widest one sets the block's bytes:

    group 0  | A page | A page | A page |        |
    group 1  | B page     | B page     |         |
    block    |<-------- bytes_per_block -------->|

Layers that need the same blocks form a bucket. A bucket whose need per sequence is bounded (states, windows) is split
until its groups fit the block that the others need; a bucket that grows with the sequence is not, as each of its
groups would take as many blocks again. Decides only. The rules are vLLM's (vllm/v1/core/kv_cache_planning.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence

from blockferry.engine.kv.reach import SpecKind, cdiv
from blockferry.engine.kv.spec import LayerSpec

_STATE_KINDS = {SpecKind.MAMBA, SpecKind.SCRATCH_RING}
_WINDOW_KINDS = {SpecKind.SLIDING_WINDOW, SpecKind.SLIDING_WINDOW_MLA}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Layers of one table key; the i-th layers of all its page sizes are its i-th repeat."""

    kind: SpecKind
    layer_ids_by_page: dict[int, list[int]]  # page bytes -> layers, in order of appearance

    @property
    def num_repeats(self) -> int:
        return max(len(layer_ids) for layer_ids in self.layer_ids_by_page.values())

    @property
    def is_even(self) -> bool:
        """Whether every repeat has a page of each size."""
        return len({len(layer_ids) for layer_ids in self.layer_ids_by_page.values()}) == 1

    @property
    def repeat_bytes(self) -> int:
        return sum(self.layer_ids_by_page)

    def widest_group_bytes(self, num_groups: int) -> int:
        """Bytes of a block's pages in the largest of num_groups groups."""
        return sum(cdiv(len(layer_ids), num_groups) * page for page, layer_ids in self.layer_ids_by_page.items())

    def split(self, num_groups: int) -> list[list[int]]:
        """Whole repeats to the groups in turn; one group keeps the model's order of layers."""
        if num_groups == 1:
            return [sorted(itertools.chain.from_iterable(self.layer_ids_by_page.values()))]
        repeats = list(itertools.zip_longest(*self.layer_ids_by_page.values()))
        return [
            [layer_id for repeat in repeats[i::num_groups] for layer_id in repeat if layer_id is not None]
            for i in range(num_groups)
        ]


def pack_layers(layers: Mapping[int, LayerSpec]) -> list[list[int]]:
    """Layer numbers of each group, for layers of several page sizes."""
    buckets = _fill_buckets(layers)
    repeats_per_group = _choose_repeats_per_group(buckets)
    splittable = _STATE_KINDS if repeats_per_group else _STATE_KINDS | _WINDOW_KINDS

    def least_groups(bucket: _Bucket) -> int:
        return cdiv(bucket.num_repeats, repeats_per_group) if repeats_per_group and bucket.is_even else 1

    block_bytes = max(
        bucket.widest_group_bytes(bucket.num_repeats if bucket.kind in splittable else least_groups(bucket))
        for bucket in buckets
    )
    groups: list[list[int]] = []
    for bucket in buckets:
        num_groups = least_groups(bucket)
        if bucket.kind in splittable:
            num_groups = max(num_groups, cdiv(bucket.num_repeats, block_bytes // bucket.repeat_bytes))
        groups += bucket.split(num_groups)
    return groups


def _fill_buckets(layers: Mapping[int, LayerSpec]) -> list[_Bucket]:
    buckets: dict[Hashable, _Bucket] = {}
    for layer_id, spec in layers.items():
        bucket = buckets.setdefault(spec.table_key, _Bucket(kind=spec.kind, layer_ids_by_page={}))
        bucket.layer_ids_by_page.setdefault(spec.page_size_bytes, []).append(layer_id)
    return list(buckets.values())


def _choose_repeats_per_group(buckets: Sequence[_Bucket]) -> int | None:
    """Repeats that each group should take: at least those of even buckets of several sizes, which stay whole.

    None where there is no such bucket: then nothing asks for groups of equally many repeats.
    """
    counts = [bucket.num_repeats for bucket in buckets if bucket.is_even]
    mixed = [bucket.num_repeats for bucket in buckets if bucket.is_even and len(bucket.layer_ids_by_page) > 1]
    if not mixed:
        return None

    def num_padding(repeats: int) -> int:
        return sum(-count % repeats for count in counts)

    return min(range(max(mixed), max(counts) + 1), key=lambda repeats: (num_padding(repeats), -repeats))
