"""Tiny random checkpoints in Hugging Face format, made at test time, and transformers as the oracle for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 307  # divisible by no tensor-parallel size in use
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "one_kv_head": (transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
}


def make_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a tiny float32 model of a family; the same arguments give the same weights."""
    config_class, options = FAMILIES[family]
    config = config_class(**(_COMMON | options | overrides))
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    """Change keys of config.json in place."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load_reference(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint in transformers, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_greedy(model: transformers.PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation that never stops early."""
    cache = transformers.DynamicCache(config=model.config)
    token_ids = torch.tensor([list(prompt)])
    output: list[int] = []
    for _ in range(num_tokens):
        logits = model(token_ids, cache=cache, use_cache=True).logits
        output.append(int(logits[0, -1].argmax()))
        token_ids = torch.tensor([output[-1:]])
    return output


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 [T, V] of one sequence."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
