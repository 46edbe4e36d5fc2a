"""Assembles one rank's weights from a checkpoint's tensors: slices of rows and columns, fused where inputs are shared.

Reads through Checkpoint and owns nothing. Which slices a rank holds is sharding.py's to say, what they mean the
families'.

Legend: E hidden, F output features, V vocabulary shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from blockferry.engine.models.layers import Linear, make_linear
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.sharding import Span


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and as what the weights live."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One of several projections of the same input, stored as NAME.weight [size, in features]."""

    name: str
    size: int  # output features of all ranks
    rows: Sequence[Span]  # this rank's, in order
    paired_head_dim: int | None = None  # of heads whose rotated pairs are neighbours: stored as halves here


class WeightReader:
    """One rank's reader. Every method raises ModelLoadError for a tensor that is missing or of another shape."""

    def __init__(self, checkpoint: Checkpoint, placement: Placement, *, adds_row_bias: bool) -> None:
        """adds_row_bias: on one rank only, as the bias of a row-parallel layer enters the sum once."""
        self.checkpoint = checkpoint
        self.placement = placement
        self._adds_row_bias = adds_row_bias

    def vector(self, name: str, size: int, *, part: Span | None = None) -> torch.Tensor:
        """A tensor [size], or the rank's part of it."""
        out = self.empty(size if part is None else len(part))
        self.checkpoint.read_into(out, name, (size,), rows=part)
        return out

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        """A norm's weight [size]; offset 1 for families that store it relative to one."""
        out = torch.empty(size, dtype=torch.float32, device=self.placement.device)
        self.checkpoint.read_into(out, name, (size,))
        out += offset
        return out.to(self.placement.dtype)

    def float_vector(self, name: str, size: int, *, part: Span | None = None) -> torch.Tensor:
        """A tensor [size] in float32 whatever the model's dtype, or the rank's part of it."""
        out = torch.empty(size if part is None else len(part), dtype=torch.float32, device=self.placement.device)
        self.checkpoint.read_into(out, name, (size,), rows=part)
        return out

    def matrix(self, name: str, shape: tuple[int, ...], *, rows: Sequence[Span] | None = None) -> torch.Tensor:
        """A tensor of `shape`, or spans of its first axis one after the other."""
        if rows is None:
            rows = [Span(start=0, stop=shape[0])]
        out = self.empty(sum(map(len, rows)), *shape[1:])
        start = 0
        for span in rows:
            self.checkpoint.read_into(out[start:], name, shape, rows=span)
            start += len(span)
        return out

    def linear(self, name: str, shape: tuple[int, int], *, has_bias: bool = False) -> Linear:
        """A whole projection of `shape` (out, in), the same on every rank."""
        whole = Projection(name=name, size=shape[0], rows=[Span(start=0, stop=shape[0])])
        return self.column_parallel([whole], shape[1], has_bias=has_bias)

    def column_parallel(self, parts: Sequence[Projection], num_inputs: int, *, has_bias: bool = False) -> Linear:
        """One layer of several projections of one input."""
        num_features = sum(len(span) for part in parts for span in part.rows)
        weight_FE = self.empty(num_features, num_inputs)
        bias_F = self.empty(num_features) if has_bias else None
        start = 0
        for part in parts:
            for span in part.rows:
                self.checkpoint.read_into(weight_FE[start:], f"{part.name}.weight", (part.size, num_inputs), rows=span)
                if bias_F is not None:
                    self.checkpoint.read_into(bias_F[start:], f"{part.name}.bias", (part.size,), rows=span)
                if part.paired_head_dim is not None:
                    order = halves_of_pairs(part.paired_head_dim, len(span)) + start
                    weight_FE[start : start + len(span)] = weight_FE[order]
                    if bias_F is not None:
                        bias_F[start : start + len(span)] = bias_F[order]
                start += len(span)
        return make_linear(weight_FE, bias_F)

    def row_parallel(self, name: str, shape: tuple[int, int], columns: Span, *, has_bias: bool = False) -> Linear:
        """A layer of `shape` (out, in) whose input features are shared; the ranks' outputs are summed."""
        weight_FE = self.empty(shape[0], len(columns))
        self.checkpoint.read_into(weight_FE, f"{name}.weight", shape, columns=columns)
        bias_F = self.vector(f"{name}.bias", shape[0]) if has_bias and self._adds_row_bias else None
        return make_linear(weight_FE, bias_F)

    def vocab(self, name: str, shape: tuple[int, int], rows: Span, stride: int) -> torch.Tensor:
        """The rank's vocabulary rows [stride, E] of a tensor of `shape`; padding rows are zero."""
        out = self.empty(stride, shape[1])
        self.checkpoint.read_into(out, name, shape, rows=rows)
        out[len(rows) :].zero_()
        return out

    def empty(self, *shape: int) -> torch.Tensor:
        """Uninitialised memory of the model's dtype on its device."""
        return torch.empty(shape, dtype=self.placement.dtype, device=self.placement.device)


def halves_of_pairs(head_dim: int, num_features: int) -> torch.Tensor:
    """Where the features of whole heads come from when each head's even ones are put before its odd ones; int64 [F].

    Scores do not change when queries and keys are reordered alike, and rotating neighbours (GPT-J style) becomes
    rotating halves (NeoX style), which is all that LayerOps.rotate does.
    """
    return torch.arange(num_features).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def features_of(heads: Span, head_dim: int) -> Span:
    """The features that a run of heads takes."""
    return Span(start=heads.start * head_dim, stop=heads.stop * head_dim)
