"""Which layers draft tokens for a model: the checkpoint's own, or those of a head folder that was trained for it.

    HEAD/config.json         model_type llama_mtp, num_nextn_predict_layers, and what the head was trained for:
                             hidden_size, base_num_hidden_layers, base_vocab_size (must be there), heads, sizes (may)
    HEAD/model.safetensors   model.layers.N.*, N from the model's number of layers on; draft_token_ids, a shortlist

Reads config files and no weights; imports no torch, so that planning, checking and loading all ask here.
"""

from __future__ import annotations

from pathlib import Path

from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.model_layers import num_draft_layers
from blockferry.engine.models.config import DENSE_ARCHITECTURES, ModelHeader, dense_config, load_error, read_json

HEAD_TYPE = "llama_mtp"
# families with draft layers in their checkpoints, and how many where config.json is silent (vLLM, qwen3_next_mtp.py)
_OWN_LAYERS = {
    **dict.fromkeys(DENSE_ARCHITECTURES, 0),
    "DeepseekV3ForCausalLM": 0,
    "Qwen3NextForCausalLM": 1,
    "Qwen3_5ForCausalLM": 1,
    "Qwen3_5MoeForCausalLM": 1,
}


def num_drafting_layers(header: ModelHeader, speculation: SpeculationConfig | None) -> int:
    """Layers with caches of their own that draft for the model: one per drafted token at most, none for n-grams.

    Raises ModelLoadError, in one line, where nobody could draft or a head is not of this model.
    """
    if speculation is None or speculation.method is not DraftMethod.MTP:
        return 0
    head = speculation.head_path
    try:
        count = _num_own(header) if head is None else _num_in_head(head, header)
    except ConfigError as error:
        raise ModelLoadError(f"multi-token prediction: {error.reason}") from error
    return min(count, speculation.num_tokens)


def _num_own(header: ModelHeader) -> int:
    silent = _OWN_LAYERS.get(header.architecture)
    if silent is None:
        raise ModelLoadError(
            f"{header.architecture} has no layers that predict several tokens; use method ngram, or a model of "
            f"{', '.join(_OWN_LAYERS)}"
        )
    count = num_draft_layers(ModelConfig(header.values)) or silent
    if not count:
        raise ModelLoadError(
            f"config.json of this {header.architecture} names no layers that predict several tokens"
            " (num_nextn_predict_layers); give a head folder that was trained for it, or use method ngram"
        )
    return count


def _num_in_head(path: Path, header: ModelHeader) -> int:
    """Layers of a head folder, held against the model."""
    values = read_json(path / "config.json")
    if values.get("model_type") != HEAD_TYPE:
        raise ModelLoadError(f"{path}: model_type is {values.get('model_type')!r}; a head folder says {HEAD_TYPE!r}")
    if header.architecture not in DENSE_ARCHITECTURES:
        raise ModelLoadError(
            f"{path} is a head for {', '.join(DENSE_ARCHITECTURES)}, the model is a {header.architecture}; "
            "use the model's own layers, or method ngram"
        )
    try:
        _check_head(ModelConfig(values), path, header)
        return ModelConfig(values).integer("num_nextn_predict_layers")
    except ConfigError as error:
        raise load_error(path, error) from error


def _check_head(config: ModelConfig, path: Path, header: ModelHeader) -> None:
    """Raises ModelLoadError for a head of another model, ConfigError for one that does not say of which it is."""
    dense = dense_config(header)
    needed = {
        "hidden_size": header.hidden_size,
        "base_num_hidden_layers": header.num_layers,
        "base_vocab_size": header.vocab_size,
    }
    named = {
        "intermediate_size": dense.intermediate_size,
        "num_attention_heads": dense.num_heads,
        "num_key_value_heads": dense.num_kv_heads,
        "head_dim": dense.head_dim,
    }
    found = {key: config.integer(key) for key in needed} | {
        key: value for key in named if (value := config.find_integer(key)) is not None
    }
    for key, value in found.items():
        wanted = (needed | named)[key]
        if value != wanted:
            raise ModelLoadError(
                f"{path} is a head for {key}={value}, the model has {wanted}; use a head of this model"
            )
    theta = config.find_number("rope_theta", above=0.0)
    if theta is not None and theta != dense.rope.theta:
        raise ModelLoadError(f"{path} is a head for rope_theta={theta}, the model has {dense.rope.theta}")
