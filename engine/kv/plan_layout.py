"""Where the pages of a plan's groups lie in a rank's pool.

    blocks outermost (BHLNC, BLHNC): every block holds the pages of all layers of whichever group has it
        group 0: | block 0: A A A B B  pad | block 1: A A A B B  pad | ...
        group 1: | block 0: C C C          | block 1: C C C          | ...
    layers outermost (LBHNC, LBNHC): every layer has its pages of all blocks in a row
        group 0: | A: block 0 | block 1 | ... | A: block 0 | ... | B: block 0 | ...
        group 1: | C: block 0 | block 1 | ... | C: block 0 | ... |

All groups start at byte 0, as a block belongs to one of them at a time. Computes addresses; allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockferry.engine.errors import ConfigError, UnplannableLayers
from blockferry.engine.kv.plan import PageRegion
from blockferry.engine.kv.spec import KVCacheGroup, LayerSpec

LAYOUTS = ("BHLNC", "BLHNC", "LBHNC", "LBNHC")


def is_block_outermost(layout: str) -> bool:
    """Whether a block is one run of bytes. Raises ConfigError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ConfigError("layout", f"{layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    return layout.startswith("B")


def bytes_per_block(groups: Sequence[KVCacheGroup]) -> int:
    """Bytes of a block id: those of the widest group; 0 where there is no layer."""
    return max((sum(spec.page_size_bytes for spec in group.layer_specs) for group in groups), default=0)


def useful_fraction(groups: Sequence[KVCacheGroup]) -> float:
    """Content bytes over pool bytes, with equally many blocks taken by every group."""
    content = sum(spec.unpadded_page_size_bytes for group in groups for spec in group.layer_specs)
    return content / (bytes_per_block(groups) * len(groups)) if content else 1.0


def check_layout(layout: str, groups: Sequence[KVCacheGroup]) -> None:
    """Raises UnplannableLayers where groups with pages of several sizes would have to share layer-outermost memory.

    Block b of a layer lies at b times its page size there, so pages of other sizes would overlap other blocks.
    """
    pages = {
        spec.page_size_bytes: layer_id
        for group in groups
        for layer_id, spec in zip(group.layer_ids, group.layer_specs, strict=True)
    }
    if is_block_outermost(layout) or len(groups) <= 1 or len(pages) <= 1:
        return
    raise UnplannableLayers(
        pages[min(pages)],
        f"layout {layout} cannot hold the pages of {len(groups)} groups in sizes of"
        f" {', '.join(map(str, sorted(pages)))} bytes, only of one size; use layout BLHNC",
    )


def lay_out_pages(groups: Sequence[KVCacheGroup], layout: str, num_blocks: int) -> tuple[PageRegion, ...]:
    """One region per group and per spec in it."""
    block_bytes = bytes_per_block(groups)
    regions: list[PageRegion] = []
    for index, group in enumerate(groups):
        layer_ids_by_spec: dict[LayerSpec, list[int]] = {}
        for layer_id, spec in zip(group.layer_ids, group.layer_specs, strict=True):
            layer_ids_by_spec.setdefault(spec, []).append(layer_id)
        bytes_before = 0  # in each block
        for spec, layer_ids in layer_ids_by_spec.items():
            page = spec.page_size_bytes
            if is_block_outermost(layout):
                offset, block_stride = bytes_before, block_bytes
                layer_stride = spec.head_slice_bytes if layout == "BHLNC" else page
            else:
                offset, block_stride = bytes_before * num_blocks, page
                layer_stride = page * num_blocks
            regions.append(
                PageRegion(
                    group=index,
                    layer_ids=tuple(layer_ids),
                    spec=spec,
                    offset=offset,
                    layer_stride=layer_stride,
                    block_stride=block_stride,
                )
            )
            bytes_before += page * len(layer_ids)
    return tuple(regions)
