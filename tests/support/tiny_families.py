"""Tiny random checkpoints of every model family, made at test time, and transformers as the oracle for them.

Small enough to build in a second, yet every mechanism bites within a prompt of 100 tokens: windows and chunks
are shorter than that, states remember, soft caps bend, rope is scaled, experts differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from support.tiny_weights import WeightScale, randomise

VOCAB_SIZE = 192
BYTE_VOCAB_SIZE = 260  # every byte is its own id, then begin, end, padding and a spare one
BYTE_MODELS_DIR = Path(__file__).parent.parent / "data" / "byte_models"
_UNTIED = WeightScale(matrix=0.16)
_RECURRENT = WeightScale(matrix=0.08)
# a tied head repeats the last token unless the layers outweigh its embedding
_TIED = WeightScale(matrix=0.25, embedding=0.03)
_TOKENS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = _TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """A family of models, and what about its tiny member is worth knowing."""

    name: str
    architecture: str  # as in config.json
    make_config: Callable[[], transformers.PreTrainedConfig]
    scale: WeightScale = _UNTIED
    has_state: bool = False  # recurrent or convolutional
    has_encoder: bool = False


def _llama() -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**_DECODER)


def _qwen3_moe() -> transformers.PreTrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_DECODER,
        head_dim=16,
        mlp_only_layers=[0],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    )


def _gemma3_text() -> transformers.PreTrainedConfig:
    return transformers.Gemma3TextConfig(
        **_DECODER | {"num_hidden_layers": 6},  # 5 sliding, 1 full
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=24,  # not the head size, so that mistaking one for the other shows
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
        },
    )


def _gemma2() -> transformers.PreTrainedConfig:
    return transformers.Gemma2Config(
        **_DECODER,
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,  # low enough to bend these logits
        final_logit_softcapping=0.5,
    )


def _gpt_oss() -> transformers.PreTrainedConfig:
    return transformers.GptOssConfig(
        **_DECODER,
        head_dim=16,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    )


def _llama4_text() -> transformers.PreTrainedConfig:
    return transformers.Llama4TextConfig(
        **_DECODER,  # layers 0 to 2 chunked with rope, layer 3 full without
        head_dim=16,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=2,  # layers 1 and 3
        num_local_experts=4,
        attention_chunk_size=32,
        floor_scale=16,
        attn_scale=0.3,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )


def _deepseek_v3() -> transformers.PreTrainedConfig:
    return transformers.DeepseekV3Config(
        **_DECODER | {"num_key_value_heads": 4},  # MLA gives every head its own
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        num_mtp_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 64,
        },
    )


def _qwen3_next() -> transformers.PreTrainedConfig:
    return transformers.Qwen3NextConfig(
        **_DECODER,  # layers 0 to 2 linear, layer 3 full
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    )


def _qwen3_5() -> transformers.PreTrainedConfig:
    return transformers.Qwen3_5TextConfig(
        **_DECODER | {"num_hidden_layers": 8},
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )


def _jamba() -> transformers.PreTrainedConfig:
    return transformers.JambaConfig(
        **_DECODER | {"num_hidden_layers": 6},
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=4,
        mamba_dt_rank=4,
    )


def _bamba() -> transformers.PreTrainedConfig:
    return transformers.BambaConfig(
        **_DECODER | {"num_hidden_layers": 5},
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_chunk_size=16,
    )


def _falcon_h1() -> transformers.PreTrainedConfig:
    return transformers.FalconH1Config(
        **_DECODER,
        head_dim=16,
        mamba_d_ssm=96,  # not expand times the hidden size
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_chunk_size=16,
        mamba_norm_before_gate=False,
        mamba_rms_norm=True,
        embedding_multiplier=1.5,
        lm_head_multiplier=0.75,
        attention_in_multiplier=1.25,
        attention_out_multiplier=0.8,
        key_multiplier=0.7,
        mlp_multipliers=[0.9, 1.1],
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.85,
        ssm_multipliers=[0.9, 1.1, 1.2, 0.8, 1.3],
    )


def _lfm2() -> transformers.PreTrainedConfig:
    return transformers.Lfm2Config(
        **_DECODER | {"num_hidden_layers": 6},
        full_attn_idxs=[2, 4],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    )


def _bart() -> transformers.PreTrainedConfig:
    return transformers.BartConfig(
        **_TOKENS,
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=512,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )


FAMILIES: dict[str, TinyFamily] = {
    family.name: family
    for family in (
        TinyFamily(name="llama", architecture="LlamaForCausalLM", make_config=_llama),
        TinyFamily(name="qwen3_moe", architecture="Qwen3MoeForCausalLM", make_config=_qwen3_moe),
        TinyFamily(name="gemma3_text", architecture="Gemma3ForCausalLM", make_config=_gemma3_text, scale=_TIED),
        TinyFamily(name="gemma2", architecture="Gemma2ForCausalLM", make_config=_gemma2, scale=_TIED),
        TinyFamily(name="gpt_oss", architecture="GptOssForCausalLM", make_config=_gpt_oss),
        TinyFamily(name="llama4_text", architecture="Llama4ForCausalLM", make_config=_llama4_text),
        TinyFamily(name="deepseek_v3", architecture="DeepseekV3ForCausalLM", make_config=_deepseek_v3),
        TinyFamily(
            name="qwen3_next",
            architecture="Qwen3NextForCausalLM",
            make_config=_qwen3_next,
            has_state=True,
            scale=_RECURRENT,
        ),
        TinyFamily(
            name="qwen3_5", architecture="Qwen3_5ForCausalLM", make_config=_qwen3_5, has_state=True, scale=_RECURRENT
        ),
        TinyFamily(name="jamba", architecture="JambaForCausalLM", make_config=_jamba, has_state=True, scale=_RECURRENT),
        TinyFamily(name="bamba", architecture="BambaForCausalLM", make_config=_bamba, has_state=True, scale=_RECURRENT),
        TinyFamily(
            name="falcon_h1",
            architecture="FalconH1ForCausalLM",
            make_config=_falcon_h1,
            has_state=True,
            scale=_RECURRENT,
        ),
        TinyFamily(name="lfm2", architecture="Lfm2ForCausalLM", make_config=_lfm2, has_state=True, scale=_TIED),
        TinyFamily(
            name="bart",
            architecture="BartForConditionalGeneration",
            make_config=_bart,
            scale=WeightScale(matrix=0.3),
            has_encoder=True,
        ),
    )
}


def byte_models() -> dict[str, Path]:
    """Folders of the trained byte-level models by family; see train_byte_models.py. Weights are bfloat16."""
    return {folder.name: folder for folder in sorted(BYTE_MODELS_DIR.iterdir())}


@functools.cache
def byte_text() -> bytes:
    """Python's documentation of its language, as this CPython carries it, with runs of spaces cut to one.

    The byte-level models know the beginning of one edition of it by heart.
    """
    return re.sub(" +", " ", "\n".join(topics[name] for name in sorted(topics))).encode()


def byte_prompt(num_bytes: int, *, first: int = 0) -> list[int]:
    """Token ids of a stretch of byte_text."""
    return list(byte_text()[first : first + num_bytes])


def checkpoint(name: str, folders: pytest.TempPathFactory) -> Path:
    """The folder of a family's checkpoint, built once per test session."""
    return build(FAMILIES[name], folders.getbasetemp() / "tiny_families")


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    """Random token ids without the special ones."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=num_tokens)


def build(family: TinyFamily, folder: Path) -> Path:
    """Write a family's float32 checkpoint to `folder`/NAME unless it lies there, and return that folder.

    The same family gives the same weights. Leaves torch's global generator as it was.
    """
    target = folder / family.name
    if not (target / "config.json").is_file():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = _model_class(family.has_encoder).from_config(family.make_config(), dtype=torch.float32)
            randomise(model, family.scale)
        model.save_pretrained(target)
    return target


@functools.lru_cache(maxsize=len(FAMILIES))
def load_reference(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint in transformers: float32, eager attention, experts one by one. Shared; do not change it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = _model_class(bool(config.is_encoder_decoder))
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # generate takes what it is not told from here
    return model


@torch.inference_mode()
def reference_tokens(folder: Path, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers' generate, never stopped by an end token.

    The prompt of an encoder-decoder is its encoder's; the result is what its decoder adds to its start token.
    """
    model = load_reference(folder)
    prompt = torch.tensor([list(prompt_ids)])
    with one_thread():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=1, max_new_tokens=num_tokens
        )
    tokens: list[int] = output[0].tolist()
    assert len(tokens) == num_tokens + (1 if model.config.is_encoder_decoder else len(prompt_ids)), tokens
    return tokens[-num_tokens:]


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: Sequence[int], *, encoder_ids: Sequence[int] = ()) -> torch.Tensor:
    """float32 [T, V] by one forward pass without a cache.

    Args:
        folder: the checkpoint.
        token_ids: the sequence; of an encoder-decoder the decoder's, with its start token.
        encoder_ids: the prompt of an encoder-decoder.
    """
    model = load_reference(folder)
    inputs = {"input_ids": torch.tensor([list(token_ids)])}
    if encoder_ids:
        inputs = {"input_ids": torch.tensor([list(encoder_ids)]), "decoder_input_ids": inputs["input_ids"]}
    with one_thread():
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return logits


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors take several times longer on more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _model_class(has_encoder: bool) -> Any:
    return transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
