"""What a whole decode step needs to run as one call (cpu_decode.py), of models whose layers allow it.

Values only: weights and shapes of one rank's layers, all of them full attention and a gated MLP.

Legend: E hidden, D head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from blockferry.engine.models.layers import Linear


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """Weights of one layer; fused where the input is shared."""

    attention_norm_E: torch.Tensor
    qkv: Linear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    out: Linear
    mlp_norm_E: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TapeSource:
    """A stage that can be taped."""

    layers: Sequence[DenseLayer]
    cos_sin: torch.Tensor  # float32 [max_model_len, D], see layers.rope_table
    hidden_size: int
    num_heads: int  # query heads of this rank
    num_kv_heads: int
    head_dim: int
    num_features: int  # of the feed-forward layer on this rank
    norm_eps: float
