"""Qwen3-Next and Qwen3.5 compute what transformers computes, in float32: mixers alone, whole models, on several ranks.

Legend: T tokens, E hidden, B blocks, H value heads, K key dim, V value dim.
"""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.dense_step import DenseCaches, dense_logits, fresh_states
from support.state_oracles import make_step
from support.tiny_families import FAMILIES, checkpoint, load_reference, make_prompt, one_thread, reference_logits
from support.tiny_weights import randomise

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.registry import ModelParts, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import LayerStates, Step
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement
from blockferry.engine.worker.parallel import LoneCommunicator

FULL, LINEAR = 3, 1  # layers of each kind
PROMPT = make_prompt(6, 100)
NEXT, DENSE = FAMILIES["qwen3_next"], FAMILIES["qwen3_5"]
each_family = pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


def _moe_config(config):
    """Qwen3.5 with experts, of the dense model's sizes."""
    shared = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    return transformers.Qwen3_5MoeTextConfig(**shared | experts, shared_expert_intermediate_size=24)


def _changed(**values):
    def change(config):
        for key, value in values.items():
            setattr(config, key, value)
        return config

    return change


def _rope(**values):
    return _changed(rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5, **values})


VARIANTS = {
    "qwen3_5_moe": (DENSE, _moe_config),
    "biases": (DENSE, _changed(attention_bias=True)),
    "as many key heads as value heads": (DENSE, _changed(linear_num_key_heads=4)),
    "other head sizes": (DENSE, _changed(linear_key_head_dim=8, linear_value_head_dim=24, linear_conv_kernel_dim=3)),
    "tied embeddings": (DENSE, _changed(tie_word_embeddings=True)),
    "a layer without experts": (NEXT, _changed(mlp_only_layers=[1])),
    "every other layer without experts": (NEXT, _changed(decoder_sparse_step=2)),
    "no experts": (NEXT, _changed(num_experts=0)),
    "weights of experts as they are": (NEXT, _changed(norm_topk_prob=False)),
    "half of each head rotated": (NEXT, _rope(rope_type="default")),
    "yarn": (NEXT, _rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)),
}


def save_variant(name, folder):
    """A checkpoint that differs from its family's in one thing."""
    family, change = VARIANTS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(change(family.make_config()), dtype=torch.float32)
        randomise(model, family.scale)
    model.save_pretrained(folder)
    return folder


def load_mixer(path, layer, place=None):
    """One rank's mixer; what it returns is the rank's part of the sum."""
    model = load_model(
        path,
        place or RankPlace(),
        placement=Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=128),
        parts=ModelParts(ops=TorchOps(), state_ops=TorchStateOps(), communicator=LoneCommunicator()),
    )
    return model.layers[layer].mixer


def make_hidden(num_tokens=100):
    return torch.randn((num_tokens, 64), generator=torch.Generator().manual_seed(5))


@torch.inference_mode()
def run_mixer(mixer, x_TE, states=None):
    step = Step(positions_T=torch.arange(len(x_TE)), caches=DenseCaches(states))
    return mixer(x_TE.clone(), step)


@torch.inference_mode()
def reference_delta_net(path, x_TE):
    return load_reference(path).model.layers[LINEAR].linear_attn(x_TE[None])[0]


@each_family
def test_delta_net_equals_transformers(name, tmp_path_factory):
    path, x_TE = checkpoint(name, tmp_path_factory), make_hidden()

    y_TE = run_mixer(load_mixer(path, LINEAR), x_TE, fresh_states(path, len(x_TE)))

    torch.testing.assert_close(y_TE, reference_delta_net(path, x_TE), atol=1e-5, rtol=1e-5)


@each_family
def test_delta_net_in_several_steps_equals_transformers_in_one(name, tmp_path_factory):
    path, x_TE = checkpoint(name, tmp_path_factory), make_hidden()
    mixer, tensors = load_mixer(path, LINEAR), fresh_states(path, len(x_TE))[LINEAR].tensors
    outputs = []
    for part_TE in x_TE.split([33, 1, 1, 64, 1]):
        num_tokens = len(part_TE)
        step = make_step([num_tokens], num_decode_rows=int(num_tokens == 1), fresh=() if outputs else (0,))
        outputs.append(run_mixer(mixer, part_TE, {LINEAR: LayerStates(tensors=tensors, metadata=step)}))

    torch.testing.assert_close(torch.cat(outputs), reference_delta_net(path, x_TE), atol=1e-5, rtol=1e-5)


@each_family
def test_delta_nets_of_two_ranks_sum_up_to_one(name, tmp_path_factory):
    path, x_TE = checkpoint(name, tmp_path_factory), make_hidden()
    expected = run_mixer(load_mixer(path, LINEAR), x_TE, fresh_states(path, len(x_TE)))

    parts = [
        run_mixer(
            load_mixer(path, LINEAR, RankPlace(tp_rank=rank, tp_size=2)),
            x_TE,
            fresh_states(path, len(x_TE), tp_size=2),
        )
        for rank in range(2)
    ]

    torch.testing.assert_close(sum(parts), expected, atol=1e-5, rtol=1e-5)


@each_family
def test_a_rank_keeps_the_states_of_its_heads(name, tmp_path_factory):
    path, x_TE = checkpoint(name, tmp_path_factory), make_hidden()
    whole, rank_states = fresh_states(path, len(x_TE)), fresh_states(path, len(x_TE), tp_size=2)
    run_mixer(load_mixer(path, LINEAR), x_TE, whole)

    run_mixer(load_mixer(path, LINEAR, RankPlace(tp_rank=1, tp_size=2)), x_TE, rank_states)

    _, whole_BHKV = whole[LINEAR].tensors
    _, rank_BHKV = rank_states[LINEAR].tensors
    torch.testing.assert_close(rank_BHKV, whole_BHKV[:, 2:], atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def reference_attention(path, x_TE):
    model, num_tokens = load_reference(path).model, len(x_TE)
    mask = torch.full((1, 1, num_tokens, num_tokens), -torch.inf).triu(1)
    cos_sin = model.rotary_emb(x_TE[None], torch.arange(num_tokens)[None])
    return model.layers[FULL].self_attn(x_TE[None], position_embeddings=cos_sin, attention_mask=mask)[0][0]


@each_family
@pytest.mark.parametrize("tp_size", [1, 2])
def test_gated_attention_of_all_ranks_equals_transformers(name, tp_size, tmp_path_factory):
    path, x_TE = checkpoint(name, tmp_path_factory), make_hidden()

    parts = [
        run_mixer(load_mixer(path, FULL, RankPlace(tp_rank=rank, tp_size=tp_size)), x_TE) for rank in range(tp_size)
    ]

    torch.testing.assert_close(sum(parts), reference_attention(path, x_TE), atol=1e-5, rtol=1e-5)


@each_family
@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_equal_transformers(name, tp_size, tmp_path_factory):
    path = checkpoint(name, tmp_path_factory)

    logits = dense_logits(path, PROMPT, tp_size=tp_size)

    torch.testing.assert_close(logits, reference_logits(path, PROMPT), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_a_variant_on_two_ranks_equal_transformers(name, tmp_path):
    path = save_variant(name, tmp_path)

    logits = dense_logits(path, PROMPT, tp_size=2)

    torch.testing.assert_close(logits, reference_logits(path, PROMPT), atol=2e-4, rtol=1e-4)


def test_four_ranks_with_copies_of_kv_heads_equal_transformers(tmp_path):
    path = save_variant("as many key heads as value heads", tmp_path)

    logits = dense_logits(path, PROMPT, tp_size=4)

    torch.testing.assert_close(logits, reference_logits(path, PROMPT), atol=2e-4, rtol=1e-4)


def copy_of(name, folder, tmp_path_factory, **values):
    """A family's checkpoint with other values in config.json."""
    path = shutil.copytree(checkpoint(name, tmp_path_factory), folder / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))
    return path


def test_a_text_model_split_off_one_with_vision_is_read(tmp_path, tmp_path_factory):
    path = copy_of("qwen3_5", tmp_path, tmp_path_factory)
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors")

    logits = dense_logits(path, PROMPT[:8])

    assert torch.equal(logits, dense_logits(checkpoint("qwen3_5", tmp_path_factory), PROMPT[:8]))


def test_a_quarter_of_each_head_is_rotated_where_the_config_is_silent(tmp_path, tmp_path_factory):
    path = copy_of("qwen3_next", tmp_path, tmp_path_factory, rope_parameters=None, rope_theta=10000.0)

    logits = dense_logits(path, PROMPT[:8])

    assert torch.equal(logits, dense_logits(checkpoint("qwen3_next", tmp_path_factory), PROMPT[:8]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act=gelu is not supported; supported: silu"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads=3 is not a multiple of linear_num_key_heads=2"),
        ({"linear_conv_kernel_dim": 5}, r"conv1d\.weight has shape \(128, 1, 4\), config\.json says \(128, 1, 5\)"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_line(values, message, tmp_path, tmp_path_factory):
    path = copy_of("qwen3_5", tmp_path, tmp_path_factory, **values)
    with pytest.raises(ModelLoadError, match=message):
        dense_logits(path, PROMPT[:2])


def test_more_ranks_than_key_heads_are_refused(tmp_path_factory):
    path = checkpoint("qwen3_5", tmp_path_factory)
    with pytest.raises(ModelLoadError, match=r"2 key heads of linear attention cannot be shared by 4 ranks"):
        load_mixer(path, LINEAR, RankPlace(tp_rank=0, tp_size=4))
