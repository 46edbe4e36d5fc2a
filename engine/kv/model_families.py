"""Model families: which kind of cache each layer has, what attention stores, which state recurrent layers keep.

One entry per family; a family without one is read as full attention, and model_checks.py says so. New families are
added here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.model_states import (
    StateReader,
    gated_delta_net_state,
    mamba1_state,
    mamba2_state,
    short_conv_state,
)
from blockferry.engine.kv.reach import KVContent, LatentContent
from blockferry.engine.models.sharding import Span, split_heads


class LayerType(enum.Enum):
    """What one decoder layer keeps. HYBRID: attention and state side by side. NONE: a feed-forward layer."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    RETAINED_PROMPT = "retained prompt"
    STATE = "state"
    HYBRID = "hybrid"
    NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContentOptions:
    """What attention stores per token, besides the model's shape."""

    dtype_bytes: int
    tp_size: int = 1
    is_fp8_ds_mla: bool = False


_HEAD_NAMES = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
TypeReader = Callable[[ModelConfig], list[LayerType]]
ContentReader = Callable[[ModelConfig, ContentOptions], Sequence[KVContent | LatentContent]]

_NAMED_TYPES: Mapping[str, LayerType] = {
    "full_attention": LayerType.FULL,
    "attention": LayerType.FULL,
    "global_attention": LayerType.FULL,
    "indexed_attention": LayerType.FULL,
    "deepseek_sparse_attention": LayerType.FULL,
    "sliding_attention": LayerType.SLIDING,
    "local_attention": LayerType.SLIDING,
    "chunked_attention": LayerType.CHUNKED,
    "reference_sliding_attention": LayerType.RETAINED_PROMPT,
    "linear_attention": LayerType.STATE,
    "mamba": LayerType.STATE,
    "mamba2": LayerType.STATE,
    "conv": LayerType.STATE,
    "short_conv": LayerType.STATE,
    "hybrid": LayerType.HYBRID,
    "mlp": LayerType.NONE,
    "moe": LayerType.NONE,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read one family's config."""

    types: TypeReader  # where the config does not name them
    contents: ContentReader
    state: StateReader | None = None

    def layer_types(self, config: ModelConfig) -> list[LayerType]:
        """Of every layer, in order. Raises ConfigError for a type that is not known or a list of another length."""
        names = config.texts("layer_types", "layers_block_type")
        if names is None:
            types = self.types(config)
        else:
            unknown = next((name for name in names if name not in _NAMED_TYPES), None)
            if unknown is not None:
                raise ConfigError("config.json", f"layer type {unknown!r} is unknown; known: {', '.join(_NAMED_TYPES)}")
            types = [_NAMED_TYPES[name] for name in names]
        total = num_layers(config)
        if len(types) != total:
            raise ConfigError("config.json", f"names the types of {len(types)} layers but has {total}")
        num_shared = config.count("num_kv_shared_layers")  # the last layers read what earlier ones stored
        if num_shared >= total:
            raise ConfigError(
                "config.json", f"num_kv_shared_layers is {num_shared}; it must be below the {total} layers"
            )
        return types[: total - num_shared] + [LayerType.NONE] * num_shared


def family_of(config: ModelConfig) -> Family:
    """The family that model_type names; full attention in every layer where it names none that is known."""
    return FAMILIES.get(family_name(config), UNKNOWN)


def family_name(config: ModelConfig) -> str:
    """Name that FAMILIES may have."""
    return config.model_type.removesuffix("_text")


def num_layers(config: ModelConfig) -> int:
    """Decoder layers, drafts not counted."""
    pattern = config.text("hybrid_override_pattern", "")
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return config.integer(*names, default=len(pattern) or None)


def kv_contents(config: ModelConfig, options: ContentOptions) -> Sequence[KVContent | LatentContent]:
    """Keys and values of each KV head of the rank that has most."""
    if options.is_fp8_ds_mla:
        raise ConfigError(
            "kv-dtype", "fp8_ds_mla is a record of latent attention, which this model does not have; use fp8"
        )
    heads = config.integer(*_HEAD_NAMES)
    head_dim = config.find_integer("head_dim", "attention_head_dim", "kv_channels")
    if head_dim is None:
        head_dim = split_hidden(config.integer("hidden_size", "n_embd", "d_model"), heads)
    num_kv_heads = len(kv_head_span(config, tp_rank=0, tp_size=options.tp_size))
    return [KVContent(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype_bytes=options.dtype_bytes)]


def kv_head_span(config: ModelConfig, *, tp_rank: int, tp_size: int) -> Span:
    """The KV heads of one rank; rank 0 has most. Raises ConfigError."""
    heads = config.integer(*_HEAD_NAMES)
    kv_heads = _num_kv_heads(config, heads)
    if heads % kv_heads:
        raise ConfigError("config.json", f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
    try:
        return split_heads(num_heads=heads, num_kv_heads=kv_heads, tp_rank=tp_rank, tp_size=tp_size).kv
    except ValueError as error:
        raise ConfigError("tp", str(error)) from None


def split_hidden(hidden: int, heads: int) -> int:
    """Head dim of a config that names none. Raises ConfigError."""
    if hidden % heads:
        raise ConfigError(
            "config.json", f"{hidden} channels cannot be split into {heads} heads, and no head_dim is named"
        )
    return hidden // heads


def _num_kv_heads(config: ModelConfig, heads: int) -> int:
    """Of all ranks, by any of the names; one head where a config asks for multi-query attention."""
    attention = config.section("attn_config")  # MPT and DBRX
    if attention.text("attn_type", "") == "multiquery_attention":
        return 1
    if config.has("multi_query_attention"):  # ChatGLM
        return config.integer("multi_query_group_num", default=1)
    has_one = config.flag("multi_query", default=family_name(config) in {"falcon", "gpt_bigcode"})
    if has_one and not config.flag("new_decoder_architecture", default=False):
        return 1
    named = config.find_integer("num_key_value_heads", "num_kv_heads", "n_head_kv")
    return named or attention.find_integer("kv_n_heads") or heads


def latent_contents(config: ModelConfig, options: ContentOptions) -> Sequence[KVContent | LatentContent]:
    """Multi-head latent attention: one vector on every rank; with an indexer (DeepSeek-V3.2) its keys beside it.

    Those are fp8 with a float32 scale for each 128 values, whatever the cache's own data type.
    """
    heads = config.integer(*_HEAD_NAMES)
    if heads % options.tp_size:
        raise ConfigError(
            "tp", f"{heads} query heads cannot be shared by {options.tp_size} ranks; use a divisor of {heads} for tp"
        )
    latent = LatentContent(
        latent_dim=config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim"),
        dtype_bytes=options.dtype_bytes,
        is_fp8_ds_mla=options.is_fp8_ds_mla,
    )
    index_dim = config.find_integer("index_head_dim")
    if index_dim is None:
        return [latent]
    return [latent, LatentContent(latent_dim=index_dim + -(-index_dim // 128) * 4, dtype_bytes=1)]


def _all_attention(config: ModelConfig) -> list[LayerType]:
    """Full attention, or the window of a model that has one and does not switch it off."""
    has_window = config.find_integer("sliding_window") is not None and config.flag("use_sliding_window", default=True)
    return [LayerType.SLIDING if has_window else LayerType.FULL] * num_layers(config)


def _windows_from_layer(config: ModelConfig) -> list[LayerType]:
    """Qwen2 and Qwen3: windows from max_window_layers on, where use_sliding_window is set."""
    total = num_layers(config)
    has_window = config.flag("use_sliding_window", default=False)
    first = config.count("max_window_layers", default=28) if has_window else total
    return [LayerType.FULL if i < first else LayerType.SLIDING for i in range(total)]


def _every_nth_full(default: int, *names: str, others: LayerType = LayerType.SLIDING) -> TypeReader:
    """Full attention in every n-th layer, n being the first of these keys or the default."""

    def read(config: ModelConfig) -> list[LayerType]:
        period = config.integer(*names, default=default)
        return [others if (i + 1) % period else LayerType.FULL for i in range(num_layers(config))]

    return read


def _exaone4_types(config: ModelConfig) -> list[LayerType]:
    """A string such as LLLG, repeated: L has a window, G sees everything. Without a window all do."""
    total = num_layers(config)
    pattern = config.text("sliding_window_pattern", "")
    if not config.has("sliding_window") or not pattern:
        return [LayerType.FULL] * total
    if pattern.isdecimal():
        return _every_nth_full(4, "sliding_window_pattern")(config)
    if set(pattern) - {"L", "G"}:
        raise ConfigError("config.json", f"sliding_window_pattern is {pattern!r}; it must be made of L and G")
    types = [LayerType.FULL if pattern[i % len(pattern)] == "G" else LayerType.SLIDING for i in range(total)]
    return [*types[:-1], LayerType.FULL]  # the last sees everything, whatever its letter


def _llama4_types(config: ModelConfig) -> list[LayerType]:
    """Layers without rotary embedding see everything, the others their chunk."""
    total = num_layers(config)
    rotary = config.integers("no_rope_layers")
    if rotary is None:
        period = config.integer("no_rope_layer_interval", default=4)
        rotary = [int((i + 1) % period != 0) for i in range(total)]
    has_chunks = config.find_integer("attention_chunk_size") is not None
    return [LayerType.CHUNKED if has_rotary and has_chunks else LayerType.FULL for has_rotary in rotary]


def _jamba_types(config: ModelConfig) -> list[LayerType]:
    period = config.integer("attn_layer_period", default=8)
    offset = config.count("attn_layer_offset", default=4)
    return [LayerType.FULL if i % period == offset else LayerType.STATE for i in range(num_layers(config))]


def _attention_at(*names: str) -> TypeReader:
    """Attention in the layers that a list names, states in the others."""

    def read(config: ModelConfig) -> list[LayerType]:
        chosen = config.integers(*names) or []
        return [LayerType.FULL if i in chosen else LayerType.STATE for i in range(num_layers(config))]

    return read


def _nemotron_h_types(config: ModelConfig) -> list[LayerType]:
    letters = {"M": LayerType.STATE, "*": LayerType.FULL, "-": LayerType.NONE, "E": LayerType.NONE}
    pattern = config.text("hybrid_override_pattern", "")
    unknown = set(pattern) - set(letters)
    if unknown or not pattern:
        raise ConfigError(
            "config.json", f"hybrid_override_pattern is {pattern!r}; it must be made of {''.join(letters)}"
        )
    return [letters[letter] for letter in pattern]


def _all_of(layer_type: LayerType) -> TypeReader:
    return lambda config: [layer_type] * num_layers(config)


PLAIN = Family(types=_all_attention, contents=kv_contents)
UNKNOWN = Family(types=_all_of(LayerType.FULL), contents=kv_contents)
_PLAIN_NAMES = (  # attention in every layer, with the config's window where there is one
    *("apertus", "aquila", "arcee", "baichuan", "bloom", "chatglm", "codegen", "cohere", "dbrx", "deepseek"),
    *("ernie4_5", "ernie4_5_moe", "exaone", "falcon", "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gptj", "granite", "granitemoe", "granitemoeshared", "internlm", "internlm2", "internlm3", "llama"),
    *("minicpm", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2"),
    *("olmoe", "opt", "orion", "persimmon", "phi", "phi3", "phimoe", "qwen", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2", "xverse"),
)
_QWEN = Family(types=_windows_from_layer, contents=kv_contents)
_ALTERNATING = Family(types=_every_nth_full(2), contents=kv_contents)
_LATENT = Family(types=_all_of(LayerType.FULL), contents=latent_contents)
_DELTA_NET = Family(
    types=_every_nth_full(4, "full_attention_interval", others=LayerType.STATE),
    contents=kv_contents,
    state=gated_delta_net_state,
)
_BAMBA = Family(types=_attention_at("attn_layer_indices"), contents=kv_contents, state=mamba2_state)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_PLAIN_NAMES, PLAIN),
    "exaone4": Family(types=_exaone4_types, contents=kv_contents),
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN,
    "gemma2": _ALTERNATING,
    "gpt_oss": _ALTERNATING,
    "gemma3": Family(types=_every_nth_full(6, "sliding_window_pattern"), contents=kv_contents),
    "gemma3n": Family(types=_every_nth_full(5), contents=kv_contents),
    "cohere2": Family(types=_every_nth_full(4, "sliding_window_pattern"), contents=kv_contents),
    "olmo3": Family(types=_every_nth_full(4), contents=kv_contents),
    "llama4": Family(types=_llama4_types, contents=kv_contents),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "kimi_k2": _LATENT,
    "qwen3_next": _DELTA_NET,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET,
    "jamba": Family(types=_jamba_types, contents=kv_contents, state=mamba1_state),
    "mamba": Family(types=_all_of(LayerType.STATE), contents=kv_contents, state=mamba1_state),
    "falcon_mamba": Family(types=_all_of(LayerType.STATE), contents=kv_contents, state=mamba1_state),
    "mamba2": Family(types=_all_of(LayerType.STATE), contents=kv_contents, state=mamba2_state),
    "bamba": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "falcon_h1": Family(types=_all_of(LayerType.HYBRID), contents=kv_contents, state=mamba2_state),
    "nemotron_h": Family(types=_nemotron_h_types, contents=kv_contents, state=mamba2_state),
    "lfm2": Family(types=_attention_at("full_attn_idxs"), contents=kv_contents, state=short_conv_state),
    "lfm2_moe": Family(types=_attention_at("full_attn_idxs"), contents=kv_contents, state=short_conv_state),
}
