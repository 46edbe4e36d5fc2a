"""How to cut a pool into slabs: which slab size, and how many pages of each group fit one.

Pure arithmetic over page sizes; knows nothing of layers or specs.

    pool    | null | slab 0 | slab 1 | ... | slab n-1 | tail |
    slab    of group 0: | page | page | page | page |          page_stride_bytes[0] each
            of group 1: |    page    |     page     |          page_stride_bytes[1] each
    tail    smaller than a slab: pages that always belong to one group, whose block ids simply go on

Two levels of allocation after Jenga (Zhang et al., SOSP 2025), whose large pages have the least common multiple of all
page sizes. Where a pool would hold few of those, slabs here may be smaller and strides a little longer than pages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from blockferry.engine.kv.spec import SlabGeometry

STRIDE_ALIGNMENT = 16  # bytes: the widest vector load of a kernel, and a multiple of every element
MAX_PADDING = 0.008  # fraction of a slab that a group may leave empty, wherever some slab size allows that
PAGE_COUNTS = (*range(1, 128), *(128 * 3**i // 2**i for i in range(20)))  # of any one group in slabs to try
ROUNDINGS = (1, 3, 4)  # of page lengths in slabs of approximate size, in units of the alignment
IDLE_SLABS = 1 / 32  # per group, counted as waste: see choose_geometry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageDemand:
    """One group's page, and how many of them one sequence of maximal length takes."""

    page_bytes: int
    blocks_per_sequence: int
    is_dropping: bool = False  # lets pages go as a sequence grows, so that those it holds may begin inside a slab


def choose_geometry(demands: Sequence[PageDemand], memory_bytes: int) -> SlabGeometry:
    """The slabs that waste least of a pool. Raises ValueError for a pool that cannot give every group a slab.

    Waste is what strides add to pages, what no page fits at the end, and a share of a slab per group, as the last
    slab of each is seldom full: that share is small, so it decides only between sizes that hold about as much.
    """
    if len(demands) == 1:
        return _one_page_per_slab(demands[0], memory_bytes)
    counts = _page_counts([demand.page_bytes for demand in demands], memory_bytes // len(demands))
    geometries = [lay_out(demands, one, memory_bytes) for one in counts]
    fitting = [geometry for geometry in geometries if geometry.num_slabs >= len(demands)]
    if not fitting:
        raise ValueError(_too_small(demands, memory_bytes))
    holding = [one for one in fitting if slabs_taken(one, demands) <= one.num_slabs] or fitting
    tight = [geometry for geometry in holding if _padding(geometry, demands) <= MAX_PADDING] or holding
    return min(tight, key=lambda geometry: _waste(geometry, demands, memory_bytes))


def lay_out(demands: Sequence[PageDemand], pages_per_slab: Sequence[int], memory_bytes: int) -> SlabGeometry:
    """The smallest slab that holds these many pages of each group, as often as it fits: perhaps never."""
    step = math.lcm(*pages_per_slab) * STRIDE_ALIGNMENT
    least = max(demand.page_bytes * count for demand, count in zip(demands, pages_per_slab, strict=True))
    slab_bytes = -(-least // step) * step
    strides = tuple(slab_bytes // count for count in pages_per_slab)
    num_slabs, tail_bytes = divmod(max(0, memory_bytes - max(strides)), slab_bytes)
    geometry = SlabGeometry(
        slab_bytes=slab_bytes,
        num_slabs=num_slabs,
        pages_per_slab=tuple(pages_per_slab),
        page_stride_bytes=strides,
        null_bytes=max(strides),
    )
    owned = [
        dataclasses.replace(geometry, tail_group=group, tail_pages=tail_bytes // stride)
        for group, stride in enumerate(strides)
    ]
    return max(owned, key=lambda tailed: sequences_that_fit(tailed, demands))


def sequences_that_fit(geometry: SlabGeometry, demands: Sequence[PageDemand]) -> float:
    """Sequences of maximal length, fractions included; null pages are counted in, as they are in a uniform plan."""
    needs = [demand.blocks_per_sequence / n for demand, n in zip(demands, geometry.pages_per_slab, strict=True)]
    num_slabs = geometry.num_slabs + geometry.null_bytes / geometry.slab_bytes
    tail_slabs = geometry.tail_pages / geometry.pages_per_slab[geometry.tail_group]
    num_sequences = (num_slabs + tail_slabs) / sum(needs)
    tail_need = needs[geometry.tail_group]
    if tail_need * num_sequences >= tail_slabs:
        return num_sequences
    return num_slabs / (sum(needs) - tail_need)  # the tail holds more than its group can use


def whole_sequences_that_fit(geometry: SlabGeometry, demands: Sequence[PageDemand]) -> int:
    """Sequences of maximal length that run at once, slabs being whole and null pages nobody's."""
    num_sequences = int(sequences_that_fit(geometry, demands))
    while num_sequences and slabs_taken(geometry, demands, num_sequences) > geometry.num_slabs:
        num_sequences -= 1
    return num_sequences


def slabs_taken(geometry: SlabGeometry, demands: Sequence[PageDemand], num_sequences: int = 1) -> int:
    """Slabs that sequences of maximal length take when nothing else runs, the last one of a group perhaps not full."""
    num_slabs = 0
    for group, (demand, pages) in enumerate(zip(demands, geometry.pages_per_slab, strict=True)):
        tail_pages = geometry.tail_pages if group == geometry.tail_group else 0
        num_pages = num_sequences * demand.blocks_per_sequence
        if demand.is_dropping and num_pages:
            num_slabs += 1 - (1 - num_pages) // pages
        else:
            num_slabs += -(-max(0, num_pages - tail_pages) // pages)
    return num_slabs


def _one_page_per_slab(demand: PageDemand, memory_bytes: int) -> SlabGeometry:
    """As a uniform plan of one group has it."""
    num_pages = memory_bytes // demand.page_bytes
    if num_pages < 2:
        raise ValueError(_too_small([demand], memory_bytes))
    return SlabGeometry(
        slab_bytes=demand.page_bytes,
        num_slabs=num_pages - 1,
        pages_per_slab=(1,),
        page_stride_bytes=(demand.page_bytes,),
        null_bytes=demand.page_bytes,
    )


def _page_counts(page_sizes: Sequence[int], max_slab_bytes: int) -> list[tuple[int, ...]]:
    """Pages per slab of each group, for slabs of many sizes: those that pad least.

    A slab of about a given size must be a multiple of either the number or the length of each group's pages, whichever
    is smaller; lengths rounded up to a few units have smaller common multiples. The least common multiple of all
    lengths, which pads nothing, is one of the sizes.
    """
    found: dict[tuple[int, ...], float] = {}
    for rounding in ROUNDINGS:
        step = rounding * STRIDE_ALIGNMENT
        lengths = [-(-page_bytes // step) * rounding for page_bytes in page_sizes]
        for target in _slab_units(lengths, max_slab_bytes // STRIDE_ALIGNMENT):
            counts = [target // length for length in lengths]
            common = math.lcm(*map(min, counts, lengths))
            slab_units = -(-target // common) * common
            pages = tuple(
                count if count <= length else slab_units // length
                for count, length in zip(counts, lengths, strict=True)
            )
            slab_bytes = slab_units * STRIDE_ALIGNMENT
            if slab_bytes > max_slab_bytes:
                continue
            found[pages] = max(1 - n * page_bytes / slab_bytes for n, page_bytes in zip(pages, page_sizes, strict=True))
    tight = [pages for pages, padding in found.items() if padding <= MAX_PADDING]
    return tight or list(found)


def _slab_units(lengths: Sequence[int], max_units: int) -> list[int]:
    """Sizes to try, in units of the alignment: multiples of each page, ever further apart, and the least common one."""
    exact = math.lcm(*lengths)
    targets = {length * count for length in lengths for count in PAGE_COUNTS}
    return [exact, *sorted(units for units in targets if max(lengths) <= units <= max_units)]


def _padding(geometry: SlabGeometry, demands: Sequence[PageDemand]) -> float:
    """Fraction of a slab that its worst owner leaves empty."""
    strides = geometry.page_stride_bytes
    return max(1 - demand.page_bytes / stride for demand, stride in zip(demands, strides, strict=True))


def _waste(geometry: SlabGeometry, demands: Sequence[PageDemand], memory_bytes: int) -> float:
    """Bytes of the memory that hold no content."""
    sequence_bytes = sum(demand.page_bytes * demand.blocks_per_sequence for demand in demands)
    idle_bytes = len(demands) * geometry.slab_bytes * IDLE_SLABS
    return memory_bytes - sequences_that_fit(geometry, demands) * sequence_bytes + idle_bytes


def _too_small(demands: Sequence[PageDemand], memory_bytes: int) -> str:
    largest = max(demand.page_bytes for demand in demands)
    return (
        f"{memory_bytes} bytes cannot hold pages of {len(demands)} cache group(s), the largest page having {largest} "
        "bytes; give more memory or lower block_size"
    )
