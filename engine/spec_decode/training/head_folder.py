"""A trained draft head on disk: config.json and model.safetensors under DeepSeek-V3's names.

    model.layers.N.*   enorm, hnorm, eh_proj, shared_head.norm, and the tensors of a decoder layer
    draft_token_ids    int32 [S], ascending: the tokens that it may draft, rows of the model's own head

N is the number of layers of the model that it was trained for, whose embedding and head it shares. What a folder must
hold, engine/models/draft_head.py says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from blockferry.engine.models.config import ModelHeader, dense_config
from blockferry.engine.models.draft_head import HEAD_TYPE
from blockferry.engine.models.mtp_loader import SHORTLIST
from blockferry.engine.spec_decode.training.files import write_bytes

LAYER_NAMES = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
HEAD_NAMES = ("enorm.weight", "hnorm.weight", "eh_proj.weight", *LAYER_NAMES, "shared_head.norm.weight")


def head_config(header: ModelHeader, training: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a head for this model; `training`: how it came to be, for people."""
    config = dense_config(header)
    return {
        "model_type": HEAD_TYPE,
        "num_nextn_predict_layers": 1,
        "hidden_size": header.hidden_size,
        "base_num_hidden_layers": header.num_layers,
        "base_vocab_size": header.vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope.theta,
        "training": dict(training),
    }


def save_head(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], draft_token_ids: torch.Tensor
) -> None:
    """Write a head's folder; weights by HEAD_NAMES, stored in bfloat16."""
    prefix = f"model.layers.{config['base_num_hidden_layers']}."
    tensors = {prefix + name: weights[name].to(torch.bfloat16).contiguous() for name in HEAD_NAMES}
    tensors[SHORTLIST] = draft_token_ids.to(torch.int32)
    write_bytes(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_bytes(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
