"""What a checkpoint's config.json says, resolved into one frozen value. Imports no torch; reads no weights.

ModelHeader is what all families have. The Llama family (llama.py: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 dense) is a
set of options over one layer and read whole; other families read the rest where they are built. What the code cannot
compute exactly is refused by name, never approximated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockferry.engine.errors import ModelLoadError

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ARCHITECTURES = (
    *DENSE_ARCHITECTURES,
    "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "JambaForCausalLM",
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "Lfm2ForCausalLM",
    "BartForConditionalGeneration",
)
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3")
# what transformers assumes where config.json is silent
_MAX_POSITIONS = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "JambaForCausalLM": 262144,
    "BambaForCausalLM": 262144,
    "FalconH1ForCausalLM": 8192,
}
_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
_NORM_EPS = {"BambaForCausalLM": 1e-5, "FalconH1ForCausalLM": 1e-5}
_EPS_NAMES = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    """What every family has; `values` is the language model's part of config.json for what only one family has."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int  # of an encoder-decoder the decoder's
    norm_eps: float
    max_positions: int
    has_tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    values: Mapping[str, Any]

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the input, and a decoder that attends to it writes the answer."""
        return bool(self.values.get("is_encoder_decoder", False))

    def check_length(self, max_model_len: int) -> None:
        """Raises ModelLoadError where sequences of this length would be computed wrongly."""
        if max_model_len > self.max_positions:
            raise ModelLoadError(
                f"max_model_len={max_model_len} exceeds the model's {self.max_positions} positions; "
                f"set max_model_len to at most {self.max_positions}"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: theta, how its frequencies are scaled, and how much of a head is rotated."""

    theta: float
    rotated_part: float = 1.0  # of a head's dims, the first ones
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense decoder-only model of the Llama family."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool


def read_header(path: Path) -> ModelHeader:
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
    try:
        header = _header(architecture, values)
        if architecture in DENSE_ARCHITECTURES:
            dense_config(header)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path / 'config.json'}: {_describe(error)}") from error
    return header


def _header(architecture: str, values: Mapping[str, Any]) -> ModelHeader:
    text = values.get("text_config")
    own: Mapping[str, Any] = {**values, **text} if isinstance(text, Mapping) else values
    default_eps = _NORM_EPS.get(architecture, 1e-6)
    is_encoder_decoder = bool(own.get("is_encoder_decoder", False))
    ties_by_default = is_encoder_decoder or architecture.startswith("Gemma")
    return ModelHeader(
        architecture=architecture,
        vocab_size=int(own["vocab_size"]),
        hidden_size=int(own["d_model" if is_encoder_decoder else "hidden_size"]),
        num_layers=int(own["decoder_layers" if is_encoder_decoder else "num_hidden_layers"]),
        norm_eps=float(next((own[name] for name in _EPS_NAMES if own.get(name) is not None), default_eps)),
        max_positions=int(own.get("max_position_embeddings") or _MAX_POSITIONS.get(architecture, 32768)),
        has_tied_embeddings=bool(own.get("tie_word_embeddings", ties_by_default)),
        eos_token_ids=_token_ids(own.get("eos_token_id")),
        values=own,
    )


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


def dense_config(header: ModelHeader) -> DecoderConfig:
    """What the Llama family's options are. Raises KeyError, TypeError or ValueError for what is missing or wrong."""
    architecture, values = header.architecture, header.values
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    is_llama = architecture == "LlamaForCausalLM"
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act={activation} is not supported; supported: silu")
    num_heads = int(values["num_attention_heads"])
    num_kv_heads = int(values.get("num_key_value_heads", _KV_HEADS.get(architecture)) or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    has_attention_bias = bool(values.get("attention_bias", False)) and (is_llama or is_qwen3)
    head_dim = values.get("head_dim") or (128 if is_qwen3 else header.hidden_size // num_heads)
    return DecoderConfig(
        hidden_size=header.hidden_size,
        intermediate_size=int(values["intermediate_size"]),
        num_layers=header.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(head_dim),
        rope=rope_config(values, header.max_positions),
        has_qkv_bias=is_qwen2 or has_attention_bias,
        has_out_bias=has_attention_bias,
        has_mlp_bias=is_llama and bool(values.get("mlp_bias", False)),
        has_qk_norm=is_qwen3,
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def rope_config(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """The rotary embedding of a family that rotates whole heads. Raises as dense_config."""
    rope = partial_rope_config(values, max_positions)
    if rope.rotated_part != 1.0:
        raise ValueError(f"partial_rotary_factor={rope.rotated_part} is not supported; supported: 1.0")
    return rope


def partial_rope_config(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Old style is rope_theta beside rope_scaling, new style is rope_parameters with both. Raises as dense_config."""
    scaling: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope type {kind} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    partial = float(scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)))
    if not 0 < partial <= 1:
        raise ValueError(f"partial_rotary_factor={partial} is outside 0..1; it is the part of a head that is rotated")
    # Dynamic scaling changes nothing up to the trained length, and check_length() allows no more.
    return RopeConfig(
        theta=float(scaling.get("rope_theta", values.get("rope_theta", 10000.0))),
        rotated_part=partial,
        kind="default" if kind == "dynamic" else kind,
        factor=float(scaling["factor"]) if kind in ("linear", "llama3") else 1.0,
        low_freq_factor=float(scaling["low_freq_factor"]) if kind == "llama3" else 1.0,
        high_freq_factor=float(scaling["high_freq_factor"]) if kind == "llama3" else 4.0,
        original_max_positions=int(scaling.get("original_max_position_embeddings", max_positions)),
    )
