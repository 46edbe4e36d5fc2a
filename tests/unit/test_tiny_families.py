"""The tiny checkpoints are worth comparing with: their output varies and depends on states, windows and caps."""

import functools

import pytest
import torch
import transformers
from support.tiny_families import (
    FAMILIES,
    build,
    byte_models,
    byte_prompt,
    checkpoint,
    load_reference,
    make_prompt,
    one_thread,
    reference_logits,
    reference_tokens,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin

START = 2  # begins a decoder's sequence
NUM_TOKENS = 24
BYTE_MODELS = ["bamba", "gemma3_text", "lfm2", "qwen3_next"]
RECURRENT = [name for name, family in FAMILIES.items() if family.has_state]
# what bites only where it is shorter or lower than what the prompt needs, and the value that switches it off
LIMITS = [
    ("gemma3_text", "sliding_window", 512),
    ("gemma3_text", "query_pre_attn_scalar", 16),
    ("gemma2", "sliding_window", 512),
    ("gemma2", "attn_logit_softcapping", None),
    ("gemma2", "final_logit_softcapping", None),
    ("gpt_oss", "sliding_window", 512),
    ("llama4_text", "attention_chunk_size", 512),
    ("llama4_text", "attn_temperature_tuning", False),
    ("deepseek_v3", "topk_group", 4),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_small_and_of_its_architecture(name, tmp_path_factory):
    model = load_reference(checkpoint(name, tmp_path_factory))

    assert model.config.architectures == [FAMILIES[name].architecture]
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000


@pytest.mark.parametrize("prompt_seed", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_varies(name, prompt_seed, tmp_path_factory):
    folder = checkpoint(name, tmp_path_factory)

    tokens = _generated(folder, prompt_seed)

    assert len(set(tokens)) >= 6


@pytest.mark.parametrize("name", FAMILIES)
def test_generated_tokens_are_those_of_forward_passes_without_a_cache(name, tmp_path_factory):
    folder, prompt = checkpoint(name, tmp_path_factory), make_prompt(2, 90)
    tokens = _generated(folder, 2)

    if FAMILIES[name].has_encoder:
        logits_TV = reference_logits(folder, [START, *tokens[:-1]], encoder_ids=prompt)
    else:
        logits_TV = reference_logits(folder, prompt + tokens[:-1])

    assert logits_TV[-NUM_TOKENS:].argmax(dim=-1).tolist() == tokens


@pytest.mark.parametrize("name", RECURRENT)
def test_lost_states_change_the_output(name, tmp_path_factory):
    model, prompt = load_reference(checkpoint(name, tmp_path_factory)), make_prompt(1, 40)

    kept_V = _decode_after(model, prompt, keeps_states=True)
    lost_V = _decode_after(model, prompt, keeps_states=False)

    assert (kept_V - lost_V).abs().max() > 0.5 * kept_V.std()


@pytest.mark.parametrize(("name", "key", "value"), LIMITS)
@one_thread()
def test_limit_changes_the_output(name, key, value, tmp_path_factory):
    folder, prompt = checkpoint(name, tmp_path_factory), make_prompt(1, 90)

    limited_V = reference_logits(folder, prompt)[-1]
    free_V = _with_config(folder, **{key: value})(torch.tensor([prompt])).logits[0, -1]

    assert (limited_V - free_V).abs().max() > 0.1 * limited_V.std()


def test_building_twice_gives_the_same_weights(tmp_path):
    first = build(FAMILIES["gpt_oss"], tmp_path / "first")
    second = build(FAMILIES["gpt_oss"], tmp_path / "second")

    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", BYTE_MODELS)
def test_byte_model_knows_its_text(name):
    prompt = byte_prompt(600, first=5000)

    logits_TV = reference_logits(byte_models()[name], prompt)

    loss = torch.nn.functional.cross_entropy(logits_TV[300:-1], torch.tensor(prompt[301:]))
    assert loss < 1.5  # nats per byte; 5.6 would be knowing nothing, and this Python's text may differ from the learnt


@pytest.mark.parametrize("first", [1000, 9000])
@pytest.mark.parametrize("name", BYTE_MODELS)
def test_byte_model_continues_a_long_prompt_with_varied_text(name, first):
    tokens = reference_tokens(byte_models()[name], byte_prompt(320, first=first), 64)

    assert len(set(tokens)) >= 10
    assert bytes(tokens).isascii()


def test_byte_models_are_small():
    sizes = [file.stat().st_size for folder in byte_models().values() for file in folder.iterdir()]

    assert sum(sizes) < 2 << 20


@functools.cache
def _generated(folder, prompt_seed):
    return reference_tokens(folder, make_prompt(prompt_seed, 90), NUM_TOKENS)


@torch.inference_mode()
@one_thread()
def _decode_after(model, prompt, *, keeps_states):
    """Logits of one decode step after the prompt, with its recurrent states or with zeros."""
    cache = transformers.DynamicCache(config=model.config)
    model(torch.tensor([prompt]), cache=cache, use_cache=True)
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin) and not keeps_states:
            for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                if state is not None:
                    state.zero_()
    return model(torch.tensor([[5]]), cache=cache, use_cache=True).logits[0, -1]


def _with_config(folder, **changes):
    config = transformers.AutoConfig.from_pretrained(folder, **changes)
    model_class = transformers.AutoModelForCausalLM
    return model_class.from_pretrained(folder, config=config, attn_implementation="eager", dtype=torch.float32).eval()
