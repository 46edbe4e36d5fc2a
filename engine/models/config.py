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

from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.kv.model_config import ModelConfig

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
    named = values.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "(none)"
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
    except ConfigError as error:
        raise load_error(path, error) from error
    return header


def load_error(path: Path, error: ConfigError) -> ModelLoadError:
    """What is wrong with the checkpoint at `path`, in one line."""
    words = f"{path / 'config.json'}: {error.reason}" if error.path == "config.json" else f"{path}: {error.reason}"
    return ModelLoadError(words)


def _header(architecture: str, values: Mapping[str, Any]) -> ModelHeader:
    text = values.get("text_config")
    own = {**values, **text} if isinstance(text, Mapping) else dict(values)
    own.pop("text_config", None)
    config = ModelConfig(own)
    is_encoder_decoder = config.flag("is_encoder_decoder", default=False)
    ties_by_default = is_encoder_decoder or architecture.startswith("Gemma")
    return ModelHeader(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("d_model" if is_encoder_decoder else "hidden_size"),
        num_layers=config.integer("decoder_layers" if is_encoder_decoder else "num_hidden_layers"),
        norm_eps=config.number(*_EPS_NAMES, default=_NORM_EPS.get(architecture, 1e-6), above=0.0),
        max_positions=config.integer("max_position_embeddings", default=_MAX_POSITIONS.get(architecture, 32768)),
        has_tied_embeddings=config.flag("tie_word_embeddings", default=ties_by_default),
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


def dense_config(header: ModelHeader) -> DecoderConfig:
    """What the Llama family's options are. Raises ConfigError for what is missing or wrong."""
    architecture, config = header.architecture, ModelConfig(header.values)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    is_llama = architecture == "LlamaForCausalLM"
    check_activation(config)
    num_heads = config.integer("num_attention_heads")
    is_silent = "num_key_value_heads" not in header.values  # null means one for each head
    default_kv_heads = _KV_HEADS.get(architecture, num_heads) if is_silent else num_heads
    num_kv_heads = config.integer("num_key_value_heads", default=default_kv_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            "config.json", f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    has_attention_bias = config.flag("attention_bias", default=False) and (is_llama or is_qwen3)
    return DecoderConfig(
        hidden_size=header.hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=header.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", default=128 if is_qwen3 else header.hidden_size // num_heads),
        rope=rope_config(header.values, header.max_positions),
        has_qkv_bias=is_qwen2 or has_attention_bias,
        has_out_bias=has_attention_bias,
        has_mlp_bias=is_llama and config.flag("mlp_bias", default=False),
        has_qk_norm=is_qwen3,
    )


def check_activation(config: ModelConfig) -> None:
    """Raises ConfigError for a hidden_act other than silu."""
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError("config.json", f"hidden_act={activation} is not supported; supported: silu")


def _token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ConfigError("config.json", f"eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


def rope_scaling(values: Mapping[str, Any]) -> ModelConfig:
    """The section on rotary embedding: rope_parameters, or rope_scaling of old. Raises ConfigError."""
    return ModelConfig(values).mapping("rope_parameters", "rope_scaling")


def rope_kind(scaling: ModelConfig) -> str:
    """How rope_scaling's frequencies are scaled. Raises ConfigError."""
    return scaling.text("rope_type", scaling.text("type", "default"))


def rope_config(values: Mapping[str, Any], max_positions: int, *, theta: float = 10000.0) -> RopeConfig:
    """The rotary embedding of a family that rotates whole heads. Raises as partial_rope_config."""
    rope = partial_rope_config(values, max_positions, theta=theta)
    if rope.rotated_part != 1.0:
        raise ConfigError("config.json", f"partial_rotary_factor={rope.rotated_part} is not supported; supported: 1.0")
    return rope


def partial_rope_config(
    values: Mapping[str, Any], max_positions: int, *, theta: float = 10000.0, rotated_part: float = 1.0
) -> RopeConfig:
    """Old style is rope_theta beside rope_scaling, new style is rope_parameters with both.

    theta and rotated_part hold where the config names none. Raises ConfigError for what is wrong or not computed.
    """
    config, scaling = ModelConfig(values), rope_scaling(values)
    kind = rope_kind(scaling)
    if kind not in _ROPE_KINDS:
        raise ConfigError("config.json", f"rope_type={kind} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    partial = _first_number("partial_rotary_factor", scaling, config, default=rotated_part)
    if partial > 1:
        raise ConfigError(
            "config.json", f"partial_rotary_factor={partial} exceeds 1; it is the part of a head that is rotated"
        )
    is_llama3 = kind == "llama3"
    # Dynamic scaling changes nothing up to the trained length, and check_length() allows no more.
    return RopeConfig(
        theta=_first_number("rope_theta", scaling, config, default=theta),
        rotated_part=partial,
        kind="default" if kind == "dynamic" else kind,
        factor=_needed_number(scaling, "factor") if kind in ("linear", "llama3") else 1.0,
        low_freq_factor=_needed_number(scaling, "low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=_needed_number(scaling, "high_freq_factor") if is_llama3 else 4.0,
        original_max_positions=scaling.integer("original_max_position_embeddings", default=max_positions),
    )


def _first_number(name: str, *places: ModelConfig, default: float) -> float:
    found = (place.find_number(name, above=0.0) for place in places)
    return next((value for value in found if value is not None), default)


def _needed_number(scaling: ModelConfig, name: str) -> float:
    value = scaling.find_number(name, above=0.0)
    if value is None:
        raise ConfigError("config.json", f"{name} is missing beside rope_type={rope_kind(scaling)}")
    return value
