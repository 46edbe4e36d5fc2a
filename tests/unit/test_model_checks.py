"""Configs that are not what they look like: refused, warned of, or read as they mean it."""

from typing import Any

import pytest

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_layers import CacheDType, LayerOptions, ModelLayers, layers_of
from blockferry.engine.kv.reach import KVContent, SpecKind
from blockferry.engine.kv.spec import AttentionSpec

BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
FULL, SLIDING = SpecKind.FULL_ATTENTION, SpecKind.SLIDING_WINDOW


def read(changes: dict[str, Any], **options: Any) -> ModelLayers:
    return layers_of(BASE | changes, LayerOptions(**options))


def kv_content(model: ModelLayers) -> KVContent:
    spec = model.layers[0]
    assert isinstance(spec, AttentionSpec)
    assert isinstance(spec.content, KVContent)
    return spec.content


@pytest.mark.parametrize(
    ("changes", "num_kv_heads"),
    [
        ({"model_type": "falcon", "multi_query": True}, 1),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1),
        ({"model_type": "gpt_bigcode", "multi_query": False}, 8),
        ({"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"model_type": "dbrx", "num_attention_heads": None, "n_heads": 8, "attn_config": {"kv_n_heads": 4}}, 4),
        ({"model_type": "mpt", "attn_config": {"attn_type": "multiquery_attention"}}, 1),
    ],
)
def test_kv_heads_are_found_under_every_name(changes: dict[str, Any], num_kv_heads: int) -> None:
    assert kv_content(read(changes)).num_kv_heads == num_kv_heads


@pytest.mark.parametrize("name", ["seq_length", "model_max_length"])
def test_longest_sequence_is_found_under_every_name(name: str) -> None:
    assert read({"max_position_embeddings": None, name: 4096}).max_position == 4096


def test_letters_of_exaone4_say_which_layers_have_a_window() -> None:
    changes = {"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LGL"}
    assert [spec.kind for spec in read(changes).layers] == [SLIDING, FULL, SLIDING, FULL]
    assert [spec.kind for spec in read(changes | {"sliding_window": None}).layers] == [FULL] * 4


def test_layer_types_of_exaone4_go_before_its_letters() -> None:
    types = ["full_attention"] + ["sliding_attention"] * 3
    changes = {"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLLG", "layer_types": types}
    assert [spec.kind for spec in read(changes).layers] == [FULL] + [SLIDING] * 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("linear_attn_config", {"full_attn_layers": [4]}),
        ("attn_type_list", [0, 0, 0, 1]),
        ("hybrid_layer_ids", [2]),
        ("block_types", ["recurrent", "attention"]),
        ("hybrid_layer_pattern", [0, 1, 1, 0]),
        ("block_configs", [{"attention": {"no_op": True}}]),
        ("cross_attention_layers", [3]),
        ("attention_types", [[["global", "local"], 2]]),
        ("mamba_d_state", 16),
        ("kv_lora_rank", 512),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "brand_new"])
def test_key_of_layers_that_are_not_modelled_is_refused(model_type: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} says that .* not modelled for model_type {model_type}"):
        read({"model_type": model_type, key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("attn_layer_period", 8), ("sliding_window_pattern", 6), ("hybrid_override_pattern", "M*")]
)
def test_key_that_only_a_known_family_can_read_is_refused_elsewhere(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} says that"):
        read({"model_type": "brand_new", key: value})


def test_type_without_a_telling_key_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="model_type phi4flash has recurrent layers"):
        read({"model_type": "phi4flash"})


def test_keys_that_say_nothing_are_not_held_against_a_model() -> None:
    model = read({"model_type": "minimax_m2", "attn_type_list": [1, 1, 1, 1], "cross_attention_layers": []})
    assert ([spec.kind for spec in model.layers], model.warnings) == ([FULL] * 4, ())


def test_encoder_is_known_by_its_model_type() -> None:
    model = read({"model_type": "bert", "architectures": ["BertModel"]})
    assert ({spec.kind for spec in model.layers}, model.warnings) == ({SpecKind.ENCODER_ONLY}, ())


def test_family_that_is_not_known_is_full_attention_with_a_warning() -> None:
    model = read({"model_type": "brand_new", "sliding_window": 64})
    assert [spec.kind for spec in model.layers] == [FULL] * 4
    assert model.warnings == (
        "model_type brand_new is not known: planned as plain full attention; check it against the model's code",
    )


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "gemma2"])
def test_known_family_has_no_warning(model_type: str) -> None:
    assert read({"model_type": model_type, "sliding_window": 64}).warnings == ()


@pytest.mark.parametrize(
    "quantization",
    [
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"kv_cache_quant_algo": "FP8"},
        {"quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_quantized_cache_of_the_config_is_taken_and_told(quantization: dict[str, Any]) -> None:
    model = read({"quantization_config": quantization})
    assert kv_content(model).dtype_bytes == 1
    assert "keys and values are fp8, as quantization_config.kv_cache_" in model.notes[0]
    asked = read({"quantization_config": quantization}, cache_dtype=CacheDType.BFLOAT16)
    assert (kv_content(asked).dtype_bytes, asked.notes) == (2, ())


def test_quantized_cache_of_a_vision_model_is_found_beside_its_text_config() -> None:
    config = {"text_config": BASE, "quantization_config": {"kv_cache_quant_algo": "FP8"}}
    assert kv_content(layers_of(config, LayerOptions())).dtype_bytes == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_dtype": "int3"}, "torch_dtype is 'int3'; it must be one of float32"),
        ({"dtype": ["bfloat16"]}, "dtype is .*; it must be a string"),
        ({"torch_dtype": "fp8"}, "torch_dtype is 'fp8'; it must be one of"),
        ({"model_type": ["llama"]}, "model_type is .*; it must be a string"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}}, "give --kv-dtype"),
        ({"num_hidden_layers": 1_000_000}, "no model has more than 10,000"),
        ({"max_position_embeddings": 10**30}, "no model has more than 1,099,511,627,776"),
        ({"hidden_size": 10**400}, r"hidden_size is 1000.*\(401 characters\); no model"),
        ({"hidden_size": 250}, "250 channels cannot be split into 8 heads"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 KV heads evenly"),
        ({"num_key_value_heads": 16}, "8 attention heads cannot share 16 KV heads evenly"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; it must be below the 4 layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1; it must be a whole number of at least 0"),
    ],
)
def test_value_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(changes)


def test_all_but_one_layer_may_share_its_cache() -> None:
    assert len(read({"num_kv_shared_layers": 3}).layers) == 1
