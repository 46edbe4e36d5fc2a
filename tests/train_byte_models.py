"""Trains the byte-level models of tests/data/byte_models: `python tests/train_byte_models.py [NAME...]`.

Owns those checkpoints. They continue text of Python's own documentation, which every CPython carries, so that a
wrong state, window or cache turns words into noise. Each takes two to three minutes of one core.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from support.tiny_families import BYTE_MODELS_DIR, BYTE_VOCAB_SIZE, byte_text
from support.tiny_weights import WeightScale, randomise

# so little text that the models learn much of it by heart: greedy output of a model that only knows the
# language well enough to guess is one phrase, repeated
TEXT_BYTES = 32_000
NUM_STEPS = 700
BATCH_SIZE = 8
SEQUENCE_LENGTH = 256  # longer than the windows
LEARNING_RATE = 6e-3
WARM_UP_STEPS = 30
_COMMON: dict[str, Any] = {
    "vocab_size": BYTE_VOCAB_SIZE,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def gemma3_text() -> transformers.PreTrainedConfig:
    """Five layers with a window of 48 bytes, then one without."""
    return transformers.Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=6,
        head_dim=16,
        intermediate_size=128,
        sliding_window=48,
        query_pre_attn_scalar=16,
    )


def qwen3_next() -> transformers.PreTrainedConfig:
    """Three gated delta nets, then attention; experts in every layer."""
    return transformers.Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )


def bamba() -> transformers.PreTrainedConfig:
    """Mamba-2 and attention in turn."""
    return transformers.BambaConfig(
        **_COMMON,
        num_hidden_layers=5,
        attn_layer_indices=[1, 3],
        intermediate_size=112,
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )


def lfm2() -> transformers.PreTrainedConfig:
    """Short convolutions, and attention in two layers of six."""
    return transformers.Lfm2Config(
        **_COMMON,
        num_hidden_layers=6,
        full_attn_idxs=[2, 4],
        intermediate_size=112,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    )


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "gemma3_text": gemma3_text,
    "qwen3_next": qwen3_next,
    "bamba": bamba,
    "lfm2": lfm2,
}


def training_text() -> torch.Tensor:
    """The bytes that the models learn, int64 [TEXT_BYTES]."""
    return torch.frombuffer(bytearray(byte_text()[:TEXT_BYTES]), dtype=torch.uint8).long()


def train(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """A model of `config` that knows the training text."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, WeightScale(matrix=0.08, embedding=0.08))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    text, start_s = training_text(), time.process_time()
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step)
        first_B = torch.randint(len(text) - SEQUENCE_LENGTH, (BATCH_SIZE,))
        tokens_BT = torch.stack([text[first : first + SEQUENCE_LENGTH] for first in first_B])
        loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == NUM_STEPS - 1:
            cpu_s = time.process_time() - start_s
            print(f"  step {step}: loss {loss.item():.3f} nats per byte, {cpu_s:.0f} s of CPU", flush=True)
    return model.eval()


def _learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine."""
    if step < WARM_UP_STEPS:
        return LEARNING_RATE * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / (NUM_STEPS - WARM_UP_STEPS)
    return LEARNING_RATE * 0.5 * (1.0 + math.cos(math.pi * done))


def main() -> None:
    """Train the named models, or all."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CONFIGS:
        print(name)
        model = train(CONFIGS[name]()).to(torch.bfloat16)
        model.config.use_cache = True
        model.save_pretrained(BYTE_MODELS_DIR / name)


if __name__ == "__main__":
    main()
