"""A KV cache plan in words: the document of `plan --json`, the tables and the bar of characters of a terminal.

Computes shares and names; plans nothing and prints nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from blockferry.cluster.cli_output import size_words
from blockferry.cluster.plan_facts import PlanFacts, StageSpan, facts_of, layer_words, range_words
from blockferry.engine.kv.model_layers import ModelLayers
from blockferry.engine.kv.plan import KVCachePlan, PlanRequest
from blockferry.engine.kv.planners import Attempt
from blockferry.engine.kv.slab_planner import blocks_per_sequence

BAR_WIDTH = 64  # characters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """One group of a plan, and what one sequence of max_model_len takes of it."""

    kind: str
    layer_numbers: tuple[int, ...]  # the model's own
    block_size: int
    page_bytes: int  # of one block, all layers
    content_bytes: int  # of these, what is not padding
    stride_bytes: int  # what the pool spends on a block
    pages_per_slab: int  # 1 where there are no slabs
    blocks_per_sequence: int
    is_draft: bool

    @property
    def sequence_bytes(self) -> int:
        """Pool bytes that the sequence takes."""
        return self.blocks_per_sequence * self.stride_bytes

    @property
    def useful_sequence_bytes(self) -> int:
        """Of these, content."""
        return self.blocks_per_sequence * self.content_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model, what was asked, and what one planner made of it."""

    model: ModelLayers
    request: PlanRequest
    attempt: Attempt
    stage: StageSpan | None = None  # that the plan is of; None without a pipeline
    limits_length: bool = False  # twice as long a sequence was too long for this planner

    @property
    def plan(self) -> KVCachePlan:
        """The plan; an error if there is none."""
        assert self.attempt.plan is not None, self.attempt
        return self.attempt.plan

    @property
    def name(self) -> str:
        """Planner's name."""
        return self.attempt.planner.value

    @property
    def facts(self) -> PlanFacts:
        """What a deployment would report of the same plan."""
        length = self.request.limits.max_model_len
        return facts_of(self.plan, self.model, max_model_len=length, stage=self.stage)

    def shares(self) -> list[GroupShare]:
        """Every group, in the plan's order."""
        return [
            GroupShare(
                kind=group.spec.kind.value,
                layer_numbers=tuple(self.model.layer_numbers[layer_id] for layer_id in group.layer_ids),
                block_size=group.spec.block_size,
                page_bytes=sum(spec.page_size_bytes for spec in group.layer_specs),
                content_bytes=sum(spec.unpadded_page_size_bytes for spec in group.layer_specs),
                stride_bytes=self.plan.slab.page_stride_bytes[i] if self.plan.slab else self.plan.bytes_per_block,
                pages_per_slab=self.plan.slab.pages_per_slab[i] if self.plan.slab else 1,
                blocks_per_sequence=blocks_per_sequence(group, self.request.limits)
                if self.plan.slab
                else group.spec.max_admission_blocks_per_request(self.request.limits),
                is_draft=group.is_draft,
            )
            for i, group in enumerate(self.plan.groups)
        ]


def document_of(planned: PlannedModel) -> dict[str, Any]:
    """One plan as `--json` gives it; of a refused one the planner and the reason."""
    if planned.attempt.plan is None:
        return {
            "planner": planned.name,
            "error": str(planned.attempt.error),
            "warnings": list(planned.model.warnings),
            "notes": list(planned.model.notes),
        }
    facts, slab = planned.facts.to_json(), planned.plan.slab
    document = {
        "planner": facts["planner"],
        "model": planned.model.name,
        "memory_bytes": planned.request.memory_bytes,
        "max_model_len": facts["max_model_len"],
        "warnings": list(planned.model.warnings),
        "notes": list(planned.model.notes),
        "stage": facts["stage"],
        "groups": [
            group
            | {
                "blocks_per_sequence": share.blocks_per_sequence,
                "sequence_bytes": share.sequence_bytes,
                "is_draft": share.is_draft,
            }
            for group, share in zip(facts["groups"], planned.shares(), strict=True)
        ],
        "sequence_bytes": dict(bytes_by_type(planned)),
    }
    return (
        document
        | {key: value for key, value in facts.items() if key not in document}
        | {"slab": dataclasses.asdict(slab) if slab else None}
    )


def bytes_by_type(planned: PlannedModel) -> Mapping[str, int]:
    """Pool bytes of one sequence by cache type, largest first."""
    totals: dict[str, int] = {}
    for share in planned.shares():
        totals[share.kind] = totals.get(share.kind, 0) + share.sequence_bytes
    return dict(sorted(totals.items(), key=lambda entry: -entry[1]))


def group_table(planned: PlannedModel) -> Table:
    """One row per group."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("group")
    table.add_column("type")
    table.add_column("layers", overflow="fold")
    for heading in ("block", "page", "padding", "pages/slab", "blocks/seq", "bytes/seq", "share"):
        if heading != "pages/slab" or planned.plan.slab:
            table.add_column(heading, justify="right")
    shares = planned.shares()
    total = sum(share.sequence_bytes for share in shares)
    for index, share in enumerate(shares):
        table.add_row(
            str(index),
            share.kind + (" (with draft layers)" if share.is_draft else ""),
            f"{len(share.layer_numbers)}: {layer_words(share.layer_numbers)}",
            f"{share.block_size} tok",
            size_words(share.page_bytes),
            f"{1 - share.content_bytes / share.stride_bytes:.1%}",
            *([str(share.pages_per_slab)] if planned.plan.slab else []),
            f"{share.blocks_per_sequence:,}",
            size_words(share.sequence_bytes),
            f"{share.sequence_bytes / total:.1%}" if total else "-",
        )
    return table


def comparison_table(plans: Sequence[PlannedModel], best: KVCachePlan | None) -> Table:
    """One row per planner; the one that would be chosen is marked."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "planner"):
        table.add_column(heading)
    for heading in ("groups", "block", "blocks", "useful", "tokens that fit", "sequences", "whole", "one sequence"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for planned in plans:
        if planned.attempt.plan is None:
            table.add_row("", planned.name, *["-"] * 8, "not possible")
            continue
        plan = planned.plan
        sequence_bytes = sum(share.sequence_bytes for share in planned.shares())
        table.add_row(
            "*" if plan is best else "",
            planned.name,
            str(len(plan.groups)),
            size_words(plan.bytes_per_block),
            f"{plan.num_blocks:,}",
            f"{plan.useful_fraction:.1%}",
            f"{plan.capacity_tokens:,}",
            f"{plan.max_concurrency:,.2f}",
            f"{plan.num_whole_sequences:,}",
            size_words(sequence_bytes),
            "limits the length" if planned.limits_length else "",
        )
    return table


def summary_lines(planned: PlannedModel) -> Iterator[str]:
    """What the pool is cut into, and what it holds."""
    plan = planned.plan
    if planned.stage:
        span = range_words(planned.stage.first_layer, planned.stage.last_layer)
        yield f"pipeline stage {planned.stage.pp_rank}, which holds least: layers {span}"
    if not plan.groups:
        yield "nothing to cache: no layer of this model keeps anything between steps"
        return
    if plan.slab:
        yield (
            f"pool: {plan.slab.num_slabs:,} slabs of {size_words(plan.slab.slab_bytes)}, each of one group at a time; "
            f"{plan.num_blocks:,} blocks of the largest group"
        )
    else:
        yield f"pool: {plan.num_blocks:,} blocks of {size_words(plan.bytes_per_block)}, the null block included"
    yield (
        f"padding waste: {1 - plan.useful_fraction:.1%}; prefix hits in steps of {plan.hash_block_size} tokens, "
        f"scheduling in steps of {plan.scheduler_block_size}"
    )
    parts = ", ".join(f"{kind} {size_words(size)}" for kind, size in bytes_by_type(planned).items())
    yield f"one sequence: {parts}"
    yield (
        f"holds {plan.capacity_tokens:,} tokens: {plan.max_concurrency:,.2f} sequences of "
        f"{planned.request.limits.max_model_len:,}; whole ones at once: {plan.num_whole_sequences:,}"
    )


def page_bars(planned: PlannedModel) -> Iterator[Text]:
    """A block, or a slab, as each group sees it: filled where content lies, shaded where nothing does."""
    plan = planned.plan
    what = "slab" if plan.slab else "block"
    yield Text(f"one {what} of {size_words(plan.bytes_per_block)}:")
    for index, share in enumerate(planned.shares()):
        bar = "".join(_page_bar(share, plan.bytes_per_block))
        yield Text.assemble(f"  group {index:<2} ", (bar, "bold"), f" {share.kind}")


def _page_bar(share: GroupShare, total_bytes: int) -> Iterator[str]:
    """One character per BAR_WIDTH-th of the bytes; a line where a page ends, if pages are wide enough to see."""
    step = total_bytes / BAR_WIDTH
    for cell in range(BAR_WIDTH):
        page, offset = divmod((cell + 0.5) * step, share.stride_bytes)
        ends_here = int((cell + 1.5) * step // share.stride_bytes) != int(page) and cell < BAR_WIDTH - 1
        if ends_here and share.stride_bytes >= 2 * step:
            yield "│"
        else:
            yield "█" if offset < share.content_bytes else "░"
