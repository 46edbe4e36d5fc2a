"""Which class computes which architecture. Owns nothing; the one place a new family is added.

config.py says what a checkpoint is without torch; this module builds the model it describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.config import DecoderConfig, read_config
from blockferry.engine.models.layers import Communicator, Linear
from blockferry.engine.models.llama import Attend, DecoderLayer, LlamaModel, ModelShard, Placement, shard_of
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.models.ops import LayerOps
from blockferry.engine.models.sharding import RankPlace


class CausalModel(Protocol):
    """What the worker needs of a model; see LlamaModel for shapes."""

    config: DecoderConfig
    shard: ModelShard
    layers: Sequence[DecoderLayer]  # of this stage
    cos_sin: torch.Tensor  # float32 [max_model_len, D], see layers.rope_table

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Hidden states of token ids; first stage only."""

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run this stage's layers."""

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """Logits on rank 0 of the last stage."""

    @property
    def layer_linears(self) -> Sequence[Linear]:
        """Linear layers that every token passes."""

    @property
    def head(self) -> Linear | None:
        """The language-model head; last stage only."""


def load_model(
    path: Path, place: RankPlace, *, placement: Placement, ops: LayerOps, communicator: Communicator
) -> CausalModel:
    """Read one rank's part of the checkpoint at `path`. Raises ModelLoadError in one line."""
    config = read_config(path)
    config.check_length(placement.max_model_len)
    try:
        shard = shard_of(config, place)
    except ValueError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    checkpoint = Checkpoint(path)
    try:
        return LlamaModel(config, shard, checkpoint=checkpoint, placement=placement, ops=ops, communicator=communicator)
    finally:
        checkpoint.close()
