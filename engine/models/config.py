"""What a checkpoint's config.json says, resolved into one frozen value. Imports no torch; reads no weights.

A family is a set of options over one decoder (see llama.py): Llama, SmolLM2, Mistral, Qwen2 and Qwen3 dense.
What the code cannot compute exactly is refused here by name, never approximated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockferry.engine.errors import ModelLoadError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3")
# what transformers assumes where config.json is silent
_MAX_POSITIONS = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131072}
_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: theta, and how its frequencies are scaled."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense decoder-only model of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]

    def check_length(self, max_model_len: int) -> None:
        """Raises ModelLoadError where sequences of this length would be computed wrongly."""
        if max_model_len > self.max_positions:
            raise ModelLoadError(
                f"max_model_len={max_model_len} exceeds the model's {self.max_positions} positions; "
                f"set max_model_len to at most {self.max_positions}"
            )
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise ModelLoadError(
                f"max_model_len={max_model_len} exceeds the model's sliding window of {self.sliding_window} tokens, "
                f"which this version cannot compute; set max_model_len to at most {self.sliding_window}"
            )


def read_config(path: Path) -> DecoderConfig:
    """Read `path`/config.json. Raises ModelLoadError for a missing, malformed or unsupported one."""
    values = read_json(path / "config.json")
    architectures = values.get("architectures") or ["(none)"]
    architecture = str(architectures[0])
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(
            f"{path}: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if "quantization_config" in values:
        raise ModelLoadError(f"{path}: quantised weights are not supported; use an unquantised checkpoint")
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"{path}: hidden_act={activation} is not supported; supported: silu")
    try:
        return _decoder_config(architecture, values)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path / 'config.json'}: {_describe(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelLoadError naming the folder or file."""
    if not path.parent.is_dir():
        raise ModelLoadError(
            f"model folder {path.parent} does not exist; check the path or run `blockferry fetch-model`"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist; a Hugging Face model folder has one") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return value


def _describe(error: Exception) -> str:
    return f"key {error} is missing" if isinstance(error, KeyError) else str(error)


def _decoder_config(architecture: str, values: Mapping[str, Any]) -> DecoderConfig:
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    is_llama = architecture == "LlamaForCausalLM"
    num_heads = int(values["num_attention_heads"])
    hidden_size = int(values["hidden_size"])
    num_kv_heads = int(values.get("num_key_value_heads", _KV_HEADS.get(architecture)) or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    has_attention_bias = bool(values.get("attention_bias", False)) and (is_llama or is_qwen3)
    max_positions = int(values.get("max_position_embeddings", _MAX_POSITIONS.get(architecture, 32768)))
    head_dim = values.get("head_dim") or (128 if is_qwen3 else hidden_size // num_heads)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(values["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(values["intermediate_size"]),
        num_layers=int(values["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(head_dim),
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        rope=_rope_config(values, max_positions),
        has_tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        has_qkv_bias=is_qwen2 or has_attention_bias,
        has_out_bias=has_attention_bias,
        has_mlp_bias=is_llama and bool(values.get("mlp_bias", False)),
        has_qk_norm=is_qwen3,
        sliding_window=_sliding_window(architecture, values),
        eos_token_ids=_token_ids(values.get("eos_token_id")),
    )


def _sliding_window(architecture: str, values: Mapping[str, Any]) -> int | None:
    if architecture == "LlamaForCausalLM":
        return None
    is_used = architecture == "MistralForCausalLM" or bool(values.get("use_sliding_window", False))
    window = values.get("sliding_window", 4096) if is_used else None
    return None if window is None else int(window)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope_config(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Old style is rope_theta beside rope_scaling, new style is rope_parameters with both."""
    scaling: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope type {kind} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    partial = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial} is not supported; supported: 1.0")
    # Dynamic scaling changes nothing up to the trained length, and check_length() allows no more.
    return RopeConfig(
        theta=float(scaling.get("rope_theta", values.get("rope_theta", 10000.0))),
        kind="default" if kind == "dynamic" else kind,
        factor=float(scaling["factor"]) if kind in ("linear", "llama3") else 1.0,
        low_freq_factor=float(scaling["low_freq_factor"]) if kind == "llama3" else 1.0,
        high_freq_factor=float(scaling["high_freq_factor"]) if kind == "llama3" else 4.0,
        original_max_positions=int(scaling.get("original_max_position_embeddings", max_positions)),
    )
