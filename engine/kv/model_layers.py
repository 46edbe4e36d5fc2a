"""From a model's config.json to the cache specs of its layers on one tensor-parallel rank.

Families differ in model_families.py; here their layers become specs. Reads no files and imports no model code.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_checks import check_model, is_encoder, warnings_of
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.kv.model_families import ContentOptions, Family, LayerType, family_of, split_hidden
from blockferry.engine.kv.model_states import StateOptions
from blockferry.engine.kv.reach import (
    ChunkReach,
    EncoderReach,
    FullReach,
    KVContent,
    NoReach,
    Reach,
    RetainedPromptReach,
    WindowReach,
    cdiv,
)
from blockferry.engine.kv.spec import AttentionSpec, LayerSpec, MambaMode, MambaSpec
from blockferry.engine.models.sharding import split_heads

BLOCK_SIZE_MULTIPLE = 16  # tokens: what attention kernels work on at once


class CacheDType(enum.StrEnum):
    """Data type of keys, values and latents. AUTO: that of the weights. FP8_DS_MLA: DeepSeek's sparse MLA record."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"


_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float": 4, "half": 2}
_CACHE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_ds_mla": 1}


_LENGTH_NAMES = (
    *("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len", "max_sequence_length"),
    *("seq_length", "model_max_length", "n_ctx"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """How a model is to be served, as far as its caches depend on it."""

    block_size: int = 16
    cache_dtype: CacheDType = CacheDType.AUTO
    tp_size: int = 1
    mamba_mode: MambaMode = MambaMode.ALIGN
    num_speculative_tokens: int = 0  # drafted per step; more than 0 takes draft layers along
    num_draft_layers: int | None = None  # None: those that the config names, at most one per drafted token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """All caches of a model: layers[i] belongs to the model's layer layer_numbers[i], which may have two."""

    name: str  # of the architecture
    layers: tuple[LayerSpec, ...]
    layer_numbers: tuple[int, ...]
    draft_layer_ids: frozenset[int]  # indices into layers
    max_position: int | None
    num_encoder_tokens: int  # longest input of an encoder; 0 without one
    warnings: tuple[str, ...] = ()  # what was assumed of the model
    notes: tuple[str, ...] = ()  # what was decided because its config says so

    @property
    def encoder_numbers(self) -> frozenset[int]:
        """Numbers of an encoder-decoder's encoder layers, which keep nothing; they come after the decoder's."""
        if not self.num_encoder_tokens:
            return frozenset()
        return frozenset(
            number
            for number, spec in zip(self.layer_numbers, self.layers, strict=True)
            if isinstance(spec, AttentionSpec) and isinstance(spec.reach, NoReach)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    layer_number: int
    spec: LayerSpec
    is_draft: bool = False


def layers_of(config: Mapping[str, Any], options: LayerOptions) -> ModelLayers:
    """The cache specs of a model. Raises ConfigError, in one line, for a config that is malformed or not understood."""
    model = ModelConfig(config)
    architectures = model.texts("architectures")
    check_model(model)
    quantized = _quantized_cache(model) if options.cache_dtype is CacheDType.AUTO else None
    if quantized is not None:
        options = dataclasses.replace(options, cache_dtype=CacheDType.FP8)
    read = _encoder_decoder_caches if model.flag("is_encoder_decoder", default=False) else _decoder_caches
    caches = list(read(model, options))
    return ModelLayers(
        name=architectures[0] if architectures else model.model_type or "unknown model",
        layers=tuple(cache.spec for cache in caches),
        layer_numbers=tuple(cache.layer_number for cache in caches),
        draft_layer_ids=frozenset(i for i, cache in enumerate(caches) if cache.is_draft),
        max_position=model.find_integer(*_LENGTH_NAMES),
        num_encoder_tokens=num_encoder_tokens(model),
        warnings=warnings_of(model),
        notes=() if quantized is None else (f"keys and values are fp8, as {quantized} says",),
    )


def uniform_block_size(layers: Sequence[LayerSpec], block_size: int) -> int:
    """Smallest block size, from block_size on, at which every attention page holds any state of the model.

    Pages of one size waste most of the pool where a state is many times an attention page; so vLLM, too, raises the
    block size of models with states (vllm/model_executor/models/config.py).
    """
    states = [spec.page_size_bytes for spec in layers if isinstance(spec, MambaSpec)]
    token_bytes = [spec.content.token_bytes for spec in layers if isinstance(spec, AttentionSpec)]
    if not states or not token_bytes:
        return block_size
    needed = cdiv(max(states), max(token_bytes))
    return max(block_size, cdiv(needed, BLOCK_SIZE_MULTIPLE) * BLOCK_SIZE_MULTIPLE)


def _decoder_caches(config: ModelConfig, options: LayerOptions) -> Iterator[_Cache]:
    if is_encoder(config):
        yield from _encoder_caches(config, options, first_number=0)
        return
    family = family_of(config)
    types = family.layer_types(config)
    for number, layer_type in enumerate(types):
        for spec in _layer_specs(family, layer_type, config, options):
            yield _Cache(layer_number=number, spec=spec)
    if options.num_speculative_tokens:
        num_drafts = options.num_draft_layers
        if num_drafts is None:
            num_drafts = min(num_draft_layers(config), options.num_speculative_tokens)
        for number in range(len(types), len(types) + num_drafts):
            for spec in _layer_specs(family, LayerType.FULL, config, options):
                yield _Cache(layer_number=number, spec=spec, is_draft=True)


def _layer_specs(
    family: Family, layer_type: LayerType, config: ModelConfig, options: LayerOptions
) -> Iterator[LayerSpec]:
    reach = _reach_of(layer_type, config)
    if reach is not None:
        for content in family.contents(config, _content_options(config, options)):
            yield AttentionSpec(block_size=options.block_size, content=content, reach=reach)
    if layer_type in (LayerType.STATE, LayerType.HYBRID):
        yield _state_spec(family, config, options)


def _reach_of(layer_type: LayerType, config: ModelConfig) -> Reach | None:
    match layer_type:
        case LayerType.FULL | LayerType.HYBRID:
            return FullReach()
        case LayerType.SLIDING:
            return WindowReach(window=config.integer("sliding_window", "sliding_window_size"))
        case LayerType.CHUNKED:
            return ChunkReach(chunk=config.integer("attention_chunk_size"))
        case LayerType.RETAINED_PROMPT:
            return RetainedPromptReach(window=config.integer("sliding_window"))
        case LayerType.STATE | LayerType.NONE:
            return None


def _state_spec(family: Family, config: ModelConfig, options: LayerOptions) -> MambaSpec:
    if family.state is None:
        raise ConfigError("config.json", f"model_type {config.model_type!r} has recurrent layers of an unknown shape")
    shapes = family.state(config, StateOptions(tp_size=options.tp_size))
    weight_bytes = _weight_bytes(config)
    recurrent_dtype = config.text("mamba_ssm_cache_dtype", config.text("mamba_ssm_dtype", "auto"))
    recurrent_bytes = weight_bytes if recurrent_dtype == "auto" else _dtype_bytes("mamba_ssm_dtype", recurrent_dtype)
    recurrent = [] if shapes.recurrent is None else [shapes.recurrent]
    recurrent_fields = [] if shapes.recurrent is None else [shapes.recurrent_fields]
    return MambaSpec(
        block_size=options.block_size,
        shapes=(shapes.conv, *recurrent),
        dtype_bytes=(weight_bytes, *[recurrent_bytes for _ in recurrent]),
        fields=(shapes.conv_fields, *recurrent_fields),
        mode=options.mamba_mode,
        num_speculative_blocks=options.num_speculative_tokens,
    )


def _encoder_decoder_caches(config: ModelConfig, options: LayerOptions) -> Iterator[_Cache]:
    """Decoder layers with attention to themselves and to the encoder; then the encoder's, which keep nothing."""
    num_decoders = config.integer("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
    content = _stack_content(config, options, heads=("decoder_attention_heads", "num_heads", "num_attention_heads"))
    for number in range(num_decoders):
        for reach in (FullReach(), EncoderReach()):
            spec = AttentionSpec(block_size=options.block_size, content=content, reach=reach)
            yield _Cache(layer_number=number, spec=spec)
    yield from _encoder_caches(config, options, first_number=num_decoders)


def _encoder_caches(config: ModelConfig, options: LayerOptions, *, first_number: int) -> Iterator[_Cache]:
    num_encoders = config.integer("encoder_layers", "num_layers", "num_hidden_layers", "n_layers")
    content = _stack_content(
        config, options, heads=("encoder_attention_heads", "num_heads", "num_attention_heads", "n_heads")
    )
    for number in range(first_number, first_number + num_encoders):
        yield _Cache(
            layer_number=number,
            spec=AttentionSpec(block_size=options.block_size, content=content, reach=NoReach()),
        )


def _stack_content(config: ModelConfig, options: LayerOptions, *, heads: tuple[str, ...]) -> KVContent:
    num_heads = config.integer(*heads)
    head_dim = config.find_integer("d_kv") or split_hidden(config.integer("d_model", "hidden_size", "dim"), num_heads)
    try:
        split = split_heads(num_heads=num_heads, num_kv_heads=num_heads, tp_rank=0, tp_size=options.tp_size)
    except ValueError as error:
        raise ConfigError("tp", str(error)) from None
    dtype_bytes = _content_options(config, options).dtype_bytes
    return KVContent(num_kv_heads=len(split.kv), head_dim=head_dim, dtype_bytes=dtype_bytes)


def _content_options(config: ModelConfig, options: LayerOptions) -> ContentOptions:
    dtype = options.cache_dtype
    dtype_bytes = _weight_bytes(config) if dtype is CacheDType.AUTO else _CACHE_BYTES[dtype]
    is_fp8_ds_mla = dtype is CacheDType.FP8_DS_MLA
    return ContentOptions(dtype_bytes=dtype_bytes, tp_size=options.tp_size, is_fp8_ds_mla=is_fp8_ds_mla)


def _weight_bytes(config: ModelConfig) -> int:
    """Bytes of one value as the model computes; 2 where the config does not say. Raises ConfigError."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.text(name, "auto")
    return 2 if dtype == "auto" else _dtype_bytes(name, dtype)


def _dtype_bytes(name: str, dtype: str) -> int:
    num_bytes = _WEIGHT_BYTES.get(dtype.removeprefix("torch."))
    if num_bytes is None:
        raise ConfigError("config.json", f"{name} is {dtype[:40]!r}; it must be one of {', '.join(_WEIGHT_BYTES)}")
    return num_bytes


def _quantized_cache(config: ModelConfig) -> str | None:
    """The key that asks for an fp8 cache, if one does. Raises ConfigError for a data type that is not planned."""
    outer = config.section("quantization_config")
    for section in (outer, outer.section("quantization")):
        algorithm = section.text("kv_cache_quant_algo", "")
        scheme = section.section("kv_cache_scheme")
        if algorithm:
            key, is_fp8, asked = "kv_cache_quant_algo", algorithm.upper() == "FP8", algorithm
        elif scheme.names():
            num_bits, kind = scheme.integer("num_bits", default=8), scheme.text("type", "float")
            key, is_fp8, asked = "kv_cache_scheme", (num_bits, kind) == (8, "float"), f"{num_bits}-bit {kind}"
        else:
            continue
        if not is_fp8:
            raise ConfigError("config.json", f"{key} asks for {asked}, which is not planned; give --kv-dtype")
        return f"quantization_config.{key}"
    return None


def num_draft_layers(config: ModelConfig) -> int:
    """Layers for multi-token prediction that come with the model."""
    return config.count("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")


def num_encoder_tokens(config: ModelConfig) -> int:
    """Longest input of an encoder-decoder's encoder; 0 for any other model. Raises ConfigError."""
    if not config.flag("is_encoder_decoder", default=False):
        return 0
    return config.integer("max_source_positions", "max_position_embeddings", "n_positions", default=512)
