"""What a config.json says that no family here models: keys that refuse it, and what is assumed of a model not known.

Looks at keys alone; reads no layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.model_families import FAMILIES, family_name, family_of, latent_contents

ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet"),
        *("nomic_bert", "roberta", "xlm-roberta"),
    }
)
ENCODER_DECODERS = frozenset({"bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"})

_UNMODELLED_KEYS: Mapping[str, str] = {  # of any family
    "attention_types": "layers alternate between kinds of attention",
    "attn_type_list": "some layers are linear attention",
    "block_configs": "each layer has a shape of its own",
    "block_types": "some layers are recurrent",
    "cross_attention_layers": "some layers attend to an image's tokens",
    "global_head_dim": "layers differ in head dim",
    "hybrid_layer_ids": "some layers are recurrent, others share their weights",
    "hybrid_layer_pattern": "layers differ in window and heads",
    "linear_attn_config": "some layers are linear attention",
    "num_global_key_value_heads": "layers differ in KV heads",
    "swa_head_dim": "layers differ in head dim",
    "swa_num_key_value_heads": "layers differ in KV heads",
}
_UNKNOWN_FAMILY_KEYS: Mapping[str, str] = {  # that only a family's own entry can read
    "attention_chunk_size": "some layers are chunked attention",
    "attn_layer_indices": "only some layers are attention",
    "attn_layer_period": "only some layers are attention",
    "full_attention_interval": "only some layers are full attention",
    "full_attn_idxs": "only some layers are attention",
    "hybrid_override_pattern": "only some layers are attention",
    "layer_group_size": "only some layers are full attention",
    "lru_width": "some layers are recurrent",
    "mb_per_layer": "some layers are recurrent",
    "sliding_window_pattern": "only some layers have a window",
}
_STATE_PREFIXES = ("mamba", "n_mamba", "ssm_", "linear_num_", "linear_key_", "conv_L_", "rwkv")
_UNMODELLED_TYPES = frozenset({"phi4flash", "recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"})


def known_families() -> list[str]:
    """Every model_type that is planned without a warning."""
    return sorted({*FAMILIES, *ENCODERS, *ENCODER_DECODERS})


def is_encoder(config: ModelConfig) -> bool:
    """Whether no layer ever attends to a token of an earlier step: BERT and its kin."""
    architectures = config.texts("architectures") or []
    is_named = config.model_type in ENCODERS or any("MaskedLM" in name for name in architectures)
    return is_named and not config.flag("is_decoder", default=False)


def check_model(config: ModelConfig) -> None:
    """Raises ConfigError for a model whose layers are known to be other than what would be planned."""
    if config.model_type in _UNMODELLED_TYPES:
        raise ConfigError(
            "config.json", f"model_type {config.model_type} has recurrent layers that blockferry plan does not model"
        )
    meanings = dict(_UNMODELLED_KEYS)
    family = family_of(config)
    if family_name(config) not in FAMILIES:
        named = config.has("layer_types") or config.has("layers_block_type")
        meanings |= {} if named else _UNKNOWN_FAMILY_KEYS
    if family.state is None:
        meanings |= {key: "some layers are recurrent" for key in config.names() if key.startswith(_STATE_PREFIXES)}
    if family.contents is not latent_contents:
        meanings["kv_lora_rank"] = "attention is latent"
    for key, meaning in meanings.items():
        if config.has(key) and not _is_uniform(config, key):
            raise ConfigError(
                "config.json",
                f"{key} says that {meaning}, which is not modelled for model_type {config.model_type or '(none)'}; "
                "known are the families in `blockferry plan --help`",
            )


def warnings_of(config: ModelConfig) -> tuple[str, ...]:
    """What a reader of the plan should check."""
    is_stack = config.flag("is_encoder_decoder", default=False) and config.model_type in ENCODER_DECODERS
    if is_stack or is_encoder(config) or family_name(config) in FAMILIES:
        return ()
    name = f"model_type {config.model_type}" if config.model_type else "a config without model_type"
    how = "as its layer types say" if config.has("layer_types") else "as plain full attention"
    return (f"{name} is not known: planned {how}; check it against the model's code",)


def _is_uniform(config: ModelConfig, key: str) -> bool:
    """Whether a list of layer kinds makes all of them full attention after all."""
    full = {"attn_type_list": 1, "hybrid_layer_pattern": 0}.get(key)
    return full is not None and all(kind == full for kind in config.integers(key) or [])
