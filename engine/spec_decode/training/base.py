"""The model that a draft head is trained for, as far as training needs it: its ends, its shape, its last layer.

Reads the checkpoint once. The head's one layer is of the same shape as the model's own layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.config import DecoderConfig, ModelHeader, dense_config, read_header
from blockferry.engine.models.layers import rope_table
from blockferry.engine.models.loader import Checkpoint
from blockferry.engine.spec_decode.training.head_folder import LAYER_NAMES

TRAINABLE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """Ends and last layer of a checkpoint, on the CPU."""

    path: Path
    header: ModelHeader
    config: DecoderConfig
    embedding_VE: torch.Tensor  # bfloat16
    head_VE: torch.Tensor  # bfloat16; the same memory where they are tied
    norm_E: torch.Tensor  # float32
    last_layer: Mapping[str, torch.Tensor]  # float32, by the names that follow model.layers.N.

    @classmethod
    def load(cls, path: Path) -> BaseModel:
        """Raises ModelLoadError; also for models whose layers are not those of the head."""
        header = read_header(path)
        if header.architecture not in TRAINABLE_ARCHITECTURES:
            raise ModelLoadError(
                f"{path}: no draft head can be trained for {header.architecture}; "
                f"trainable are {', '.join(TRAINABLE_ARCHITECTURES)}"
            )
        config = dense_config(header)
        if config.has_qkv_bias or config.has_out_bias or config.has_mlp_bias:
            raise ModelLoadError(
                f"{path}: its layers have biases, which a draft head's layer does not; use another one"
            )
        checkpoint = Checkpoint(path)
        prefix = f"model.layers.{config.num_layers - 1}."
        try:
            embedding_VE = checkpoint.tensor("model.embed_tokens.weight").bfloat16()
            is_tied = header.has_tied_embeddings
            return cls(
                path=path,
                header=header,
                config=config,
                embedding_VE=embedding_VE,
                head_VE=embedding_VE if is_tied else checkpoint.tensor("lm_head.weight").bfloat16(),
                norm_E=checkpoint.tensor("model.norm.weight").float(),
                last_layer={name: checkpoint.tensor(prefix + name).float() for name in LAYER_NAMES},
            )
        finally:
            checkpoint.close()

    def cos_sin(self, max_len: int) -> torch.Tensor:
        """float32 [max_len, D]: cosines then sines of every position."""
        return rope_table(self.config.rope, head_dim=self.config.head_dim, max_len=max_len)
