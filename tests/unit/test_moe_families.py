"""Models with experts compute what transformers computes, in float32, on one rank and on several."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_config
from support.dense_step import dense_logits
from support.tiny_families import checkpoint, make_prompt, reference_logits, reference_tokens
from support.worker_driver import generate, start_worker, worker_spec
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.kv.model_config import ModelConfig
from blockferry.engine.models.qwen3_moe import is_sparse
from blockferry.engine.models.yarn import yarn_config, yarn_table

PROMPT = make_prompt(4, 100)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_equal_transformers(family, tp_size, tmp_path_factory):
    path = checkpoint(family, tmp_path_factory)
    logits = dense_logits(path, PROMPT, tp_size=tp_size)
    torch.testing.assert_close(logits, reference_logits(path, PROMPT), atol=2e-4, rtol=1e-4)


def test_greedy_tokens_over_pages_equal_transformers(tmp_path_factory):
    path = checkpoint("qwen3_moe", tmp_path_factory)
    prompts = [PROMPT[:3], PROMPT[:70]]
    outputs = generate(start_worker(worker_spec(path)), prompts, num_output=12, chunk=40)
    assert outputs == [reference_tokens(path, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the 8 experts of a layer"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; supported: silu"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds the 4 experts of a layer"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised weights are not supported"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(family, changes, complaint, tmp_path, tmp_path_factory):
    path = shutil.copytree(checkpoint(family, tmp_path_factory), tmp_path / "model")
    edit_config(path, **changes)
    with pytest.raises(ModelLoadError, match=complaint):
        dense_logits(path, PROMPT[:2])


def test_gpt_oss_in_mxfp4_is_refused_in_one_line(tmp_path, tmp_path_factory):
    path = shutil.copytree(checkpoint("gpt_oss", tmp_path_factory), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"] = torch.zeros(4, 2, 2, 16, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"experts in MXFP4 are not supported; use a checkpoint in bfloat16"):
        dense_logits(path, PROMPT[:2])


def test_gpt_oss_without_rope_parameters_has_those_of_its_config_class(tmp_path, tmp_path_factory):
    path = shutil.copytree(checkpoint("gpt_oss", tmp_path_factory), tmp_path / "model")
    values = json.loads((path / "config.json").read_text())
    del values["rope_parameters"]
    (path / "config.json").write_text(json.dumps(values))
    torch.testing.assert_close(dense_logits(path, PROMPT), reference_logits(path, PROMPT), atol=2e-4, rtol=1e-4)


def test_only_every_other_layer_of_a_step_of_two_is_sparse():
    config = ModelConfig({"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [layer for layer in range(6) if is_sparse(config, layer)] == [1, 5]


def test_no_layer_is_sparse_without_experts():
    assert not is_sparse(ModelConfig({"num_experts": 0}), 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"truncate": False},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0.8},
        {"factor": 1.0},
    ],
)
def test_yarn_frequencies_and_sharpening_are_those_of_transformers(options):
    scaling = YARN | options
    config = transformers.Qwen3Config(head_dim=32, max_position_embeddings=512, rope_parameters=scaling)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    angles = torch.arange(512, dtype=torch.float)[:, None] * frequencies
    expected = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
    table = yarn_table(yarn_config(ModelConfig(scaling), theta=10000.0, max_positions=512), head_dim=32, max_len=512)
    torch.testing.assert_close(table, expected, atol=1e-5, rtol=1e-5)
