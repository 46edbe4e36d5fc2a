"""From config.json to cache specs: every family, tensor parallelism, drafts, and configs that are refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blockferry.engine.errors import ConfigError
from blockferry.engine.kv.model_layers import CacheDType, LayerOptions, ModelLayers, layers_of, uniform_block_size
from blockferry.engine.kv.reach import ChunkReach, KVContent, LatentContent, SpecKind, WindowReach
from blockferry.engine.kv.spec import AttentionSpec, MambaMode, MambaSpec

SHIPPED = Path(__file__).parents[2] / "configs" / "models"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
FULL, SLIDING, MAMBA, MLA = SpecKind.FULL_ATTENTION, SpecKind.SLIDING_WINDOW, SpecKind.MAMBA, SpecKind.MLA


def read(config: dict[str, Any], **options: Any) -> ModelLayers:
    return layers_of(config, LayerOptions(**options))


def shipped(name: str, **options: Any) -> ModelLayers:
    return read(json.loads((SHIPPED / f"{name}.json").read_text()), **options)


def kinds(model: ModelLayers) -> list[SpecKind]:
    return [spec.kind for spec in model.layers]


def kv_content(model: ModelLayers, index: int = 0) -> KVContent:
    spec = model.layers[index]
    assert isinstance(spec, AttentionSpec)
    assert isinstance(spec.content, KVContent)
    return spec.content


def state(model: ModelLayers, index: int = 0) -> MambaSpec:
    spec = model.layers[index]
    assert isinstance(spec, MambaSpec)
    return spec


def test_plain_decoder_of_an_unknown_family_has_full_attention() -> None:
    model = read({**LLAMA, "model_type": "brand_new"})
    assert kinds(model) == [FULL] * 4
    assert kv_content(model) == KVContent(num_kv_heads=2, head_dim=32, dtype_bytes=2)
    assert (model.max_position, model.num_encoder_tokens) == (2048, 0)


def test_names_of_gpt2_are_understood() -> None:
    model = read({"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 1024})
    assert kv_content(model) == KVContent(num_kv_heads=4, head_dim=16, dtype_bytes=2)
    assert (len(model.layers), model.max_position) == (3, 1024)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_cache_has_the_data_type_of_the_weights(dtype: str, num_bytes: int) -> None:
    assert kv_content(read({**LLAMA, "torch_dtype": dtype})).dtype_bytes == num_bytes


def test_cache_dtype_overrides_that_of_the_weights() -> None:
    assert kv_content(read({**LLAMA, "dtype": "float32"}, cache_dtype=CacheDType.FP8)).dtype_bytes == 1


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_ranks_share_kv_heads_and_copy_them_when_there_are_fewer(tp_size: int, heads: int) -> None:
    assert kv_content(read(LLAMA, tp_size=tp_size)).num_kv_heads == heads


def test_tensor_parallelism_that_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel=3 cannot share 8 query heads"):
        read(LLAMA, tp_size=3)


def test_mistral_has_a_window_in_every_layer() -> None:
    model = read({**LLAMA, "model_type": "mistral", "sliding_window": 64})
    assert kinds(model) == [SLIDING] * 4
    assert isinstance(spec := model.layers[0], AttentionSpec)
    assert spec.reach == WindowReach(window=64)


def test_qwen_uses_its_window_only_when_told_and_from_a_layer_on() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3}
    assert kinds(read(qwen)) == [FULL] * 4
    assert kinds(read({**qwen, "use_sliding_window": True})) == [FULL] * 3 + [SLIDING]


def test_named_layer_types_win_over_the_familys_pattern() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model = read({**LLAMA, "model_type": "gemma2", "sliding_window": 64, "layer_types": types})
    assert kinds(model) == [FULL, SLIDING, SLIDING, FULL]


def test_gemma2_alternates() -> None:
    assert kinds(read({**LLAMA, "model_type": "gemma2", "sliding_window": 64})) == [SLIDING, FULL, SLIDING, FULL]


def test_layers_that_share_another_layers_cache_keep_none() -> None:
    model = read({**LLAMA, "model_type": "gemma3n", "sliding_window": 64, "num_kv_shared_layers": 3})
    assert model.layer_numbers == (0,)


def test_gemma3_27b_has_10_full_and_52_sliding_layers() -> None:
    model = shipped("gemma-3-27b")
    assert Counter(kinds(model)) == {SLIDING: 52, FULL: 10}
    assert [i for i, kind in enumerate(kinds(model)) if kind is FULL] == list(range(5, 62, 6))
    assert kv_content(model) == KVContent(num_kv_heads=16, head_dim=128, dtype_bytes=2)


def test_gpt_oss_20b_alternates_windows_of_128() -> None:
    model = shipped("gpt-oss-20b")
    assert kinds(model) == [SLIDING, FULL] * 12
    assert isinstance(spec := model.layers[0], AttentionSpec)
    assert spec.reach == WindowReach(window=128)


def test_llama4_scout_sees_everything_in_every_fourth_layer() -> None:
    model = shipped("llama-4-scout")
    assert kinds(model) == ([SpecKind.CHUNKED_LOCAL] * 3 + [FULL]) * 12
    assert isinstance(spec := model.layers[0], AttentionSpec)
    assert spec.reach == ChunkReach(chunk=8192)


def test_llama4_without_chunks_is_full() -> None:
    assert kinds(read({**LLAMA, "model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0]})) == [FULL] * 4


def test_qwen3_next_keeps_a_delta_net_state_in_three_of_four_layers() -> None:
    model = shipped("qwen3-next-80b")
    assert kinds(model) == ([MAMBA] * 3 + [FULL]) * 12
    assert state(model).shapes == ((8192, 3), (32, 128, 128))
    assert kv_content(model, 3) == KVContent(num_kv_heads=2, head_dim=256, dtype_bytes=2)


def test_states_are_split_among_ranks() -> None:
    assert state(shipped("qwen3-next-80b", tp_size=4)).shapes == ((2048, 3), (8, 128, 128))
    with pytest.raises(ConfigError, match="16 key heads of linear attention cannot be shared by 32 ranks"):
        state(shipped("qwen3-next-80b", tp_size=32))


def test_speculation_adds_a_state_per_draft_of_the_same_shape() -> None:
    spec = state(shipped("qwen3-next-80b", num_speculative_tokens=2, mamba_mode=MambaMode.NONE))
    assert spec.shapes[0] == (8192, 3)
    assert (spec.num_speculative_blocks, spec.mode) == (2, MambaMode.NONE)


def test_recurrent_state_has_the_data_type_that_the_config_names() -> None:
    config = json.loads((SHIPPED / "qwen3-next-80b.json").read_text())
    assert state(read(config)).dtype_bytes == (2, 2)
    assert state(read({**config, "mamba_ssm_dtype": "float32"})).dtype_bytes == (2, 4)


def test_jamba_has_one_attention_layer_in_eight() -> None:
    model = shipped("jamba-1.5-mini")
    assert [i for i, kind in enumerate(kinds(model)) if kind is FULL] == [4, 12, 20, 28]
    assert state(model).shapes == ((8192, 3), (8192, 16))


def test_deepseek_v3_keeps_one_latent_vector_per_token_on_every_rank() -> None:
    model = shipped("deepseek-v3", tp_size=8)
    assert kinds(model) == [MLA] * 61
    assert isinstance(spec := model.layers[0], AttentionSpec)
    assert spec.content == LatentContent(latent_dim=576, dtype_bytes=2)


def test_fp8_record_of_sparse_mla_is_656_bytes_and_of_latent_attention_only() -> None:
    assert shipped("deepseek-v3", cache_dtype=CacheDType.FP8_DS_MLA).layers[0].page_size_bytes == 16 * 656
    with pytest.raises(ConfigError, match="fp8_ds_mla"):
        read(LLAMA, cache_dtype=CacheDType.FP8_DS_MLA)


def test_indexer_of_deepseek_v32_has_a_cache_of_its_own_in_each_layer() -> None:
    config = json.loads((SHIPPED / "deepseek-v3.json").read_text())
    model = read({**config, "model_type": "deepseek_v32", "index_head_dim": 128})
    assert model.layer_numbers[:4] == (0, 0, 1, 1)
    assert [spec.page_size_bytes for spec in model.layers[:2]] == [16 * 576 * 2, 16 * 132]


def test_draft_layers_come_along_only_for_speculation() -> None:
    assert not shipped("deepseek-v3").draft_layer_ids
    model = shipped("deepseek-v3", num_speculative_tokens=1)
    assert (model.draft_layer_ids, model.layer_numbers[-1]) == (frozenset({61}), 61)


@pytest.mark.parametrize(("num_draft_layers", "drafting"), [(0, frozenset()), (2, {61, 62})])
def test_draft_layers_may_be_others_than_the_models_own(num_draft_layers, drafting) -> None:
    model = shipped("deepseek-v3", num_speculative_tokens=3, num_draft_layers=num_draft_layers)
    assert {model.layer_numbers[i] for i in model.draft_layer_ids} == drafting


def test_falcon_h1_keeps_attention_and_state_in_every_layer() -> None:
    model = read(
        {**LLAMA, "model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}
        | {"mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_d_conv": 4}
    )
    assert kinds(model) == [FULL, MAMBA] * 4
    assert model.layer_numbers == (0, 0, 1, 1, 2, 2, 3, 3)
    assert state(model, 1).shapes == ((128 + 2 * 32, 3), (8, 16, 32))


def test_one_group_of_mamba2_is_copied_to_every_rank() -> None:
    bamba = {**LLAMA, "model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_state": 32}
    model = read({**bamba, "mamba_n_groups": 1}, tp_size=2)
    assert kinds(model) == [MAMBA, FULL, MAMBA, MAMBA]
    assert state(model).shapes == ((256 + 2 * 32, 3), (8, 32, 32))


def test_nemotron_h_has_layers_without_any_cache() -> None:
    model = read(
        {**LLAMA, "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-*EM"}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "head_dim": 32}
    )
    assert kinds(model) == [MAMBA, FULL, MAMBA]
    assert model.layer_numbers == (0, 2, 4)
    assert state(model).shapes == ((128 + 2 * 2 * 32, 3), (8, 16, 32))


def test_lfm2_keeps_only_the_inputs_of_its_convolution() -> None:
    model = read({**LLAMA, "model_type": "lfm2", "full_attn_idxs": [2], "conv_L_cache": 3})
    assert kinds(model) == [MAMBA, MAMBA, FULL, MAMBA]
    assert state(model).shapes == ((256, 2),)


@pytest.mark.parametrize(
    ("config", "num_layers", "head_dim", "num_encoder_tokens"),
    [
        (
            {"model_type": "whisper", "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
            | {"encoder_layers": 3, "encoder_attention_heads": 4, "max_source_positions": 1500},
            (2, 3),
            16,
            1500,
        ),
        (
            {"model_type": "t5", "d_model": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8},
            (2, 3),
            8,
            512,
        ),
        (
            {"model_type": "bart", "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
            | {"encoder_layers": 3, "encoder_attention_heads": 4, "max_position_embeddings": 1024},
            (2, 3),
            16,
            1024,
        ),
    ],
    ids=["whisper", "t5", "bart"],
)
def test_encoder_decoder_keeps_self_and_cross_attention(
    config: dict[str, Any], num_layers: tuple[int, int], head_dim: int, num_encoder_tokens: int
) -> None:
    model = read({**config, "is_encoder_decoder": True})
    num_decoders, num_encoders = num_layers
    expected = [FULL, SpecKind.CROSS_ATTENTION] * num_decoders + [SpecKind.ENCODER_ONLY] * num_encoders
    assert kinds(model) == expected
    assert kv_content(model) == KVContent(num_kv_heads=4, head_dim=head_dim, dtype_bytes=2)
    assert model.num_encoder_tokens == num_encoder_tokens


def test_an_encoder_keeps_nothing() -> None:
    assert (
        kinds(read({**LLAMA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}))
        == [SpecKind.ENCODER_ONLY] * 4
    )


def test_block_size_for_pages_of_one_size_lets_attention_pages_hold_a_state() -> None:
    jamba, llama = shipped("jamba-1.5-mini"), read(LLAMA)
    assert uniform_block_size(jamba.layers, 16) == 80
    assert uniform_block_size(llama.layers, 16) == 16
    raised = shipped("jamba-1.5-mini", block_size=80)
    assert raised.layers[4].page_size_bytes >= raised.layers[0].page_size_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers or n_layer .* is missing"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'; it must be a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be a whole number of at least 1"),
        ({"layer_types": ["full_attention"]}, "names the types of 1 layers but has 4"),
        ({"layer_types": ["full_attention"] * 3 + ["magic"]}, "layer type 'magic' is unknown; known: full_attention"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window .*is missing"),
        ({"layer_types": ["linear_attention"] * 4}, "'llama' has recurrent layers of an unknown shape"),
        ({"use_sliding_window": "no", "sliding_window": 3}, "use_sliding_window is 'no'; it must be true or false"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?*-"}, "hybrid_override_pattern is 'M\\?\\*-'"),
        ({"model_type": "bamba", "attn_layer_indices": ["a"]}, "attn_layer_indices is .* list of whole numbers"),
    ],
)
def test_malformed_config_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read({**LLAMA, **change})
    assert "\n" not in str(raised.value)


def test_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds a list"):
        layers_of([], LayerOptions())  # type: ignore[arg-type]  # what a file may hold


TINY: dict[str, dict[str, Any]] = {
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 4},
    "jamba": {"num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 16},
    "lfm2": {"full_attn_idxs": [1], "block_ff_dim": 64},
    "mamba": {"state_size": 4, "intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2},
    "nemotron_h": {"hybrid_override_pattern": "M*", "mamba_num_heads": 8, "mamba_head_dim": 8}
    | {"ssm_state_size": 8, "n_groups": 2, "head_dim": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_state_shapes_are_those_of_transformers(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"num_key_value_heads": 2, "vocab_size": 32} | TINY[family]
    config = AutoConfig.for_model(family, **values)
    cache = AutoModelForCausalLM.from_config(config)(torch.arange(6)[None], use_cache=True).past_key_values
    model = read(values | {"model_type": family})
    caches = zip(model.layer_numbers, model.layers, strict=True)
    states = {number: spec for number, spec in caches if isinstance(spec, MambaSpec)}
    assert states
    for number, spec in states.items():
        layer = cache.layers[number]
        conv, *recurrent = spec.shapes
        kernel_inputs = layer.conv_states[0] if isinstance(layer.conv_states, dict) else layer.conv_states
        assert kernel_inputs.shape[1:] in (conv, (conv[0], conv[1] + 1))
        for shape in recurrent:
            kept = layer.recurrent_states[0] if isinstance(layer.recurrent_states, dict) else layer.recurrent_states
            assert tuple(kept.shape[1:]) == shape
