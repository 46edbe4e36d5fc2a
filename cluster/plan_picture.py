"""Plans as a picture: whose bytes a block or slab holds, what one sequence takes, how many tokens fit.

Draws what plan_report.py says. Needs the `plot` extra (matplotlib), imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockferry.cluster.cli_output import size_words
from blockferry.cluster.plan_report import GroupShare, PlannedModel, bytes_by_type
from blockferry.engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4477aa", "#ee8866", "#44aa88", "#aa4477", "#ccbb44", "#66ccee")
MAX_LINES = 200  # page and layer borders that one bar can show
GIB = 1 << 30


def draw_plans(plans: Sequence[PlannedModel], path: Path) -> Path:
    """Write the picture: a row per plan, left one block or slab, right one sequence. Its path; PNG without a suffix.

    Raises ConfigError.
    """
    if path.is_dir():
        raise ConfigError("--plot", f"{path} is a folder; name a file in it, such as {path / 'plan.png'}")
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    try:
        from matplotlib.figure import Figure  # a heavy import, only for --plot
    except ImportError as error:
        raise ConfigError("--plot", "needs matplotlib; install blockferry[plot]") from error
    drawn = [one for one in plans if one.plan.groups]
    if not drawn:
        raise ConfigError("--plot", "nothing is cached, so there is nothing to draw")
    kinds = dict.fromkeys(share.kind for one in drawn for share in one.shares())
    colours = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    heights = [1.1 + 0.34 * len(one.plan.groups) for one in drawn]
    figure = Figure(figsize=(12, 1.2 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(drawn), 2, squeeze=False, height_ratios=heights, width_ratios=[3, 2])
    longest = max(sum(share.sequence_bytes for share in one.shares()) for one in drawn)
    for axes, planned in zip(grid, drawn, strict=True):
        _draw_block(axes[0], planned, colours)
        _draw_sequence(axes[1], planned, colours)
        axes[1].set_xlim(0, longest / GIB * 1.02)
    first = drawn[0]
    figure.suptitle(
        f"{first.model.name}: {size_words(first.request.memory_bytes)} of KV cache per rank, "
        f"sequences of {first.request.limits.max_model_len:,} tokens"
    )
    figure.legend(handles=_legend(colours), loc="outside lower center", ncols=len(colours) + 1, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigError("--plot", f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError("--plot", f"cannot write {path}: {error.strerror}") from None
    return path


def _draw_block(axes: Axes, planned: PlannedModel, colours: Mapping[str, str]) -> None:
    """One block, or one slab, as each group divides it: pages, their layers, and what is left."""
    plan, shares = planned.plan, planned.shares()
    what = "slab" if plan.slab else "block"
    for row, share in enumerate(shares):
        num_pages = share.pages_per_slab
        has_page_lines = 1 < num_pages <= MAX_LINES
        has_layer_lines = num_pages * len(share.layer_numbers) <= MAX_LINES
        _padding(axes, row, plan.bytes_per_block, height=0.8)
        if share.content_bytes == share.stride_bytes:
            axes.barh(row, plan.bytes_per_block, height=0.8, color=colours[share.kind])
        else:
            starts = [page * share.stride_bytes for page in range(num_pages)]
            axes.barh([row] * num_pages, [share.content_bytes] * num_pages, 0.8, starts, color=colours[share.kind])
        if has_layer_lines:
            axes.vlines(_layer_edges(share), row - 0.4, row + 0.4, colors="white", linewidths=0.4)
        if has_page_lines:
            edges = [page * share.stride_bytes for page in range(1, num_pages)]
            width = 1.0 if num_pages <= 40 else 0.4
            axes.vlines(edges, row - 0.4, row + 0.4, colors="black", linewidths=width)
    axes.set_yticks(range(len(shares)), [_label(share) for share in shares], fontsize="small")
    axes.set_xlim(0, plan.bytes_per_block)
    axes.set_xticks([0, plan.bytes_per_block], ["0", size_words(plan.bytes_per_block)], fontsize="small", ha="right")
    axes.invert_yaxis()
    axes.set_title(
        f"{planned.name}: one {what} of {size_words(plan.bytes_per_block)}, {plan.useful_fraction:.1%} useful",
        fontsize="medium",
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)


def _draw_sequence(axes: Axes, planned: PlannedModel, colours: Mapping[str, str]) -> None:
    """Bytes that one sequence takes, content by type and then all padding."""
    plan, shares = planned.plan, planned.shares()
    total = sum(share.sequence_bytes for share in shares) / GIB
    _padding(axes, 0, total, height=0.5)
    start = 0.0
    for kind in bytes_by_type(planned):
        width = sum(share.useful_sequence_bytes for share in shares if share.kind == kind) / GIB
        axes.barh(0, width, height=0.5, left=start, color=colours[kind])
        start += width
    axes.text(0, -0.35, size_words(total * GIB), va="bottom", fontsize="small")
    axes.set_ylim(1.0, -1.0)
    axes.set_yticks([])
    axes.set_xlabel("GiB that one sequence takes", fontsize="small")
    axes.tick_params(labelsize="small")
    axes.set_title(
        f"{plan.capacity_tokens:,} tokens fit: {plan.max_concurrency:,.1f} sequences", fontsize="medium", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)


def _layer_edges(share: GroupShare) -> list[float]:
    num_layers = len(share.layer_numbers)
    return [
        page * share.stride_bytes + share.content_bytes * layer / num_layers
        for page in range(share.pages_per_slab)
        for layer in range(1, num_layers)
    ]


def _padding(axes: Axes, row: int, width: float, *, height: float) -> None:
    """All of a bar; what is drawn over it is content."""
    axes.barh(row, width, height=height, color="white", edgecolor="#999999", hatch="////", linewidth=0)


def _label(share: GroupShare) -> str:
    pages = f", {share.pages_per_slab} pages" if share.pages_per_slab > 1 else ""
    return f"{len(share.layer_numbers)} x {_words(share.kind)}{pages}"


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _legend(colours: Mapping[str, str]) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = [Patch(color=colour, label=_words(kind)) for kind, colour in colours.items()]
    return [*kinds, Patch(facecolor="white", edgecolor="#999999", hatch="////", label="padding: holds nothing")]
