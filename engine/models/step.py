"""What a model's layers reach beside their weights in one step: positions, and the caches behind the worker's pages.

The seam between models and worker: models name layers by their number in the checkpoint and know no blocks.

Legend: T tokens of the step, N tokens of an encoder's input, H query heads, K KV heads, D head dim, R latent vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from blockferry.engine.attention.base import AttentionRule
from blockferry.engine.models.state_ops import StateMetadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """One recurrent layer's states in this step: views of all blocks, [B, ...] each, and which blocks are whose."""

    tensors: tuple[torch.Tensor, ...]  # in the order of the layer's MambaSpec: convolution inputs, recurrent state
    metadata: StateMetadata


class Caches(Protocol):
    """The pages of one stage's layers, as the step sees them."""

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Write the step's keys and values, already rotated, and attend: [T, H, D]."""

    def attend_latent(
        self, layer: int, q_THR: torch.Tensor, latent_TR: torch.Tensor, rule: AttentionRule, *, value_dim: int
    ) -> torch.Tensor:
        """The same with one latent vector per token, the first value_dim of which are the value: [T, H, value_dim]."""

    def states(self, layer: int) -> LayerStates:
        """A recurrent layer's states."""

    def write_cross(self, layer: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        """Keep what a decoder layer's cross attention reads of an encoder's input that has just been encoded."""

    def attend_cross(self, layer: int, q_THD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Attend from every token to the whole of its row's encoder input, written before: [T, H, D]."""


LayerDone = Callable[[int], None]
"""Told the number of every layer that has written the step to its caches."""


def nobody_waits(number: int) -> None:
    """Of a step whose layers nobody waits for."""
    del number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one stage."""

    positions_T: torch.Tensor  # int64
    caches: Caches
    layer_done: LayerDone = nobody_waits
