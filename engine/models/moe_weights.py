"""The weights of one rank's experts, read from any of the layouts that checkpoints store them in.

Whole experts are shared among tensor-parallel ranks, so that every matrix and bias of an expert lies on one rank.

    separate                PREFIX.7.gate_proj.weight, PREFIX.7.up_proj.weight [F, E], PREFIX.7.down_proj.weight [E, F]
                            (Qwen3-MoE, Qwen3-Next, DeepSeek-V3, Jamba: on the hub and as transformers 5 saves them)
    stacked, rows           PREFIX.gate_up_proj [X, 2F, E], gates before ups; PREFIX.down_proj [X, E, F]
                            (what transformers 5 holds in memory, and checkpoints that were written as it stood there)
    stacked, columns        PREFIX.gate_up_proj [X, E, 2F], gates before ups; PREFIX.down_proj [X, F, E]  (Llama 4)
    stacked, alternating    PREFIX.gate_up_proj [X, E, 2F], gate, up, gate, up; PREFIX.down_proj [X, F, E]; with
                            PREFIX.gate_up_proj_bias [X, 2F], PREFIX.down_proj_bias [X, E]  (gpt-oss)

Legend: X this rank's experts, E hidden, F feed-forward size of an expert, G = 2F: gates, then ups.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

import torch

from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.sharding import Span
from blockferry.engine.models.weights import Placement


class StackedLayout(enum.Enum):
    """How a family's stacked tensors lie, where a checkpoint has them."""

    ROWS = "rows"
    COLUMNS = "columns"
    ALTERNATING_COLUMNS = "alternating columns"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a family calls its experts' tensors."""

    prefix: str  # of the layer, such as "model.layers.3.mlp.experts"
    stacked: StackedLayout = StackedLayout.ROWS
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShapes:
    """Sizes of one layer's experts."""

    num_experts: int  # of the layer, on all ranks
    hidden_size: int
    feed_forward_size: int  # of one expert
    has_bias: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Matrices of one rank's experts, output features first, gates before ups."""

    experts: Span  # which of the layer's experts these are
    gate_up_XGE: torch.Tensor
    gate_up_bias_XG: torch.Tensor | None = None
    down_XEF: torch.Tensor
    down_bias_XE: torch.Tensor | None = None


def read_experts(
    checkpoint: Checkpoint, names: ExpertNames, shapes: ExpertShapes, span: Span, placement: Placement
) -> ExpertWeights:
    """Read the experts of `span`, and nothing of the others. Raises ModelLoadError as Checkpoint does."""
    reader = _ExpertReader(checkpoint, names, shapes, span, placement)
    is_separate = f"{names.prefix}.0.{names.gate}.weight" in checkpoint
    if f"{names.prefix}.gate_up_proj" not in checkpoint and (is_separate or names.stacked is StackedLayout.ROWS):
        return reader.separate()
    return reader.stacked_rows() if names.stacked is StackedLayout.ROWS else reader.stacked_columns()


class _ExpertReader:
    """Fills one rank's matrices of one layer."""

    def __init__(
        self, checkpoint: Checkpoint, names: ExpertNames, shapes: ExpertShapes, span: Span, placement: Placement
    ) -> None:
        self._checkpoint: Final = checkpoint
        self._names: Final = names
        self._shapes: Final = shapes
        self._span: Final = span
        self._placement: Final = placement
        hidden, size = shapes.hidden_size, shapes.feed_forward_size
        self._gate_up_XGE: Final = self._empty(len(span), 2 * size, hidden)
        self._down_XEF: Final = self._empty(len(span), hidden, size)

    def separate(self) -> ExpertWeights:
        names, size, hidden = self._names, self._shapes.feed_forward_size, self._shapes.hidden_size
        for index, expert in enumerate(range(self._span.start, self._span.stop)):
            gate_up_GE, prefix = self._gate_up_XGE[index], f"{names.prefix}.{expert}"
            self._checkpoint.read_into(gate_up_GE[:size], f"{prefix}.{names.gate}.weight", (size, hidden))
            self._checkpoint.read_into(gate_up_GE[size:], f"{prefix}.{names.up}.weight", (size, hidden))
            self._checkpoint.read_into(self._down_XEF[index], f"{prefix}.{names.down}.weight", (hidden, size))
        return self._weights(gate_up_bias_XG=None, down_bias_XE=None)

    def stacked_rows(self) -> ExpertWeights:
        self._read_stacked(self._gate_up_XGE, "gate_up_proj")
        self._read_stacked(self._down_XEF, "down_proj")
        return self._weights(gate_up_bias_XG=self._gate_up_bias(), down_bias_XE=self._down_bias())

    def stacked_columns(self) -> ExpertWeights:
        """One expert at a time, so that only one lies in memory twice."""
        shapes, first = self._shapes, self._span.start
        columns_1EG = self._empty(1, shapes.hidden_size, 2 * shapes.feed_forward_size)
        for index in range(len(self._span)):
            expert = Span(start=first + index, stop=first + index + 1)
            self._read_stacked(columns_1EG, "gate_up_proj", expert)
            self._gate_up_XGE[index] = self._gates_first(columns_1EG[0].T)
            self._read_stacked(self._down_XEF[index : index + 1].transpose(1, 2), "down_proj", expert)
        return self._weights(gate_up_bias_XG=self._gate_up_bias(), down_bias_XE=self._down_bias())

    def _weights(self, *, gate_up_bias_XG: torch.Tensor | None, down_bias_XE: torch.Tensor | None) -> ExpertWeights:
        return ExpertWeights(
            experts=self._span,
            gate_up_XGE=self._gate_up_XGE,
            gate_up_bias_XG=gate_up_bias_XG,
            down_XEF=self._down_XEF,
            down_bias_XE=down_bias_XE,
        )

    def _gate_up_bias(self) -> torch.Tensor | None:
        if not self._shapes.has_bias:
            return None
        bias_XG = self._empty(len(self._span), 2 * self._shapes.feed_forward_size)
        self._read_stacked(bias_XG, "gate_up_proj_bias")
        return self._gates_first(bias_XG.T).T.contiguous()

    def _down_bias(self) -> torch.Tensor | None:
        if not self._shapes.has_bias:
            return None
        bias_XE = self._empty(len(self._span), self._shapes.hidden_size)
        self._read_stacked(bias_XE, "down_proj_bias")
        return bias_XE

    def _gates_first(self, features: torch.Tensor) -> torch.Tensor:
        """Gate and up features, on the first dim, with all gates before all ups."""
        if self._names.stacked is not StackedLayout.ALTERNATING_COLUMNS:
            return features
        return torch.cat((features[::2], features[1::2]))

    def _read_stacked(self, out: torch.Tensor, name: str, experts: Span | None = None) -> None:
        shape = (self._shapes.num_experts, *out.shape[1:])
        self._checkpoint.read_into(out, f"{self._names.prefix}.{name}", shape, rows=experts or self._span)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._placement.dtype, device=self._placement.device)
