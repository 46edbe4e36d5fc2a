"""Deployment files: what they become, and how each mistake is refused."""

import json
from pathlib import Path

import pytest
from support.deployments import LLAMA, PD

from blockferry.cluster.deployment import is_disaggregated, load_deployment
from blockferry.cluster.yaml_reader import parse_size
from blockferry.engine.config import DType, Role
from blockferry.engine.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def load(folder: Path, text: str):
    file = folder / "deployment.yaml"
    file.write_text(text)
    return load_deployment(file)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_checkpoint_gives_the_defaults(folder):
    model = load(folder, PD).config.model
    assert (model.max_model_len, model.dtype, model.served_name) == (2048, DType.BFLOAT16, "model")


def test_prefill_and_decode_make_a_disaggregated_deployment(folder):
    config = load(folder, PD).config
    assert is_disaggregated(config)
    assert [instance.role for instance in config.instances] == [Role.PREFILL, Role.DECODE]


def test_instance_overrides_the_shared_cache_and_scheduler(folder):
    text = PD + "cache: {memory: 64MiB, block_size: 32}\nscheduler: {max_num_seqs: 8}\n"
    text = text.replace("{role: prefill}", "{role: prefill, cache: {num_blocks: 9}, scheduler: {max_num_seqs: 4}}")
    first, second = load(folder, text).config.instances
    assert (first.cache.num_blocks, first.cache.block_size, first.scheduler.max_num_seqs) == (9, 32, 4)
    assert (second.cache.num_blocks, second.cache.memory_bytes, second.scheduler.max_num_seqs) == (None, 64 << 20, 8)


def test_time_to_resume_is_the_files(folder):
    health = load(folder, PD + "health: {resume_timeout_s: 2.5}\n").config.health
    assert (health.resume_timeout_s, health.silence_limit_s) == (2.5, 10.0)
    assert load(folder, PD).config.health.resume_timeout_s == 18.0


@pytest.mark.parametrize(
    ("written", "num_bytes"), [(4096, 4096), ("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000), ("512 mib", 512 << 20)]
)
def test_sizes_take_units(written, num_bytes):
    assert parse_size("cache.memory", written) == num_bytes


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        (("replicas", "replica"), "instances[1].replica", "did you mean 'replicas'"),
        (("role: prefill", "role: prefil"), "instances[0].role", "did you mean 'prefill'"),
        (("replicas: 2", "replicas: two"), "instances[1].replicas", "whole number"),
        (("replicas: 2", "replicas: 0"), "instances[1].replicas", "at least 1|between 1"),
        (("replicas: 2", "replicas: true"), "instances[1].replicas", "whole number"),
        (("name: test", "name: 7"), "name", "must be text, not int 7; put it in quotes"),
        (("name: test", "name: off"), "name", "must be text, not bool False; put it in quotes"),
        (("name: test", "nmae: test"), "nmae", "did you mean 'name'"),
        (("name: test", "name: a/b"), "name", "letters"),
        (("path: model", "path: nowhere"), "model.path", "nowhere"),
        (("{path: model}", "{name: smollm"), "", "not valid YAML"),
        (("{path: model}", "{name: smolm2-135m-instruct}"), "model.name", "did you mean 'smollm2-135m-instruct'"),
        (("{path: model}", "{path: model, max_model_len: 4096}"), "model.max_model_len", "at most 2048"),
        (("{path: model}", "{path: model, dtype: int8}"), "model.dtype", "not one of"),
        (("{path: model}", "[]"), "model", "must be a mapping"),
        (("- {role: prefill}", ""), "instances", "decode without prefill"),
        (("role: prefill", "role: mixed"), "instances[0].role", "mixed cannot stand beside"),
        (("{role: prefill}", "{role: prefill, tensor_parallel: 4}"), "instances[0].tensor_parallel", "use one of"),
        (("{role: prefill}", "{role: prefill, pipeline_parallel: 5}"), "instances[0].pipeline_parallel", "at most 4"),
        (("{role: prefill}", "{role: prefill, cache: {layout: BLNC}}"), "instances[0].cache.layout", "BHLNC"),
        (("{role: prefill}", "{role: prefill, cache: {memory: 0}}"), "instances[0].cache.memory", "positive"),
        (("{role: prefill}", "{role: prefill, resources: {CPU: 1}}"), "instances[0].resources.CPU", "num_cpus"),
        (("name: test", "name: test\ndevice: tpu"), "device", "cpu, cuda"),
        (("name: test", "name: test\ndevice: cuda"), "device", "cannot be ferried yet; use role mixed"),
        (("name: test", "name: test\nname: again"), "", "appears twice"),
        (("name: test", "connector: {transport: loopback}"), "connector.transport", "use 'ucx'"),
        (("name: test", "connector: {lease_s: -1}"), "connector.lease_s", "out of range"),
        (("name: test", "connector: {checksums: 2}"), "connector.checksums", "true or false"),
        (("name: test", "connector: {overlap: all}"), "connector.overlap", "not one of none, chunks, layers"),
        (("name: test", "connector: {mode: pull, overlap: layers}"), "connector.overlap", "use chunks, or mode push"),
        (("name: test", "router: {policy: random}"), "router.policy", "not one of prefix_affinity, least_loaded"),
        (("name: test", "cache: {memory: lots}"), "cache.memory", "512MiB"),
        (("name: test", "cache: {memory: 1GiB, num_blocks: 7}"), "cache.memory", "keep one"),
        (("name: test", "api: {port: 70000}"), "api.port", "65535"),
        (("name: test", "scheduler: {max_num_seqs: 9, max_num_batched_tokens: 4}"), "scheduler", "9 or more"),
    ],
)
def test_mistake_is_refused_with_path_and_remedy(folder, change, path, words):
    assert change[0] in PD
    message = refusal(folder, PD.replace(*change, 1))
    assert message.startswith(path)
    assert any(word in message for word in words.split("|")), message


def test_block_size_must_fit_the_gpu_kernels(folder):
    mixed = "model: {path: model}\ninstances: [{role: mixed}]\n"
    message = refusal(folder, "device: cuda\ncache: {block_size: 24}\n" + mixed)
    assert message == ("instances[0].cache.block_size: 24 is not a multiple of 16, the kernel tile; use 16, 32 or 64")


def test_sides_may_differ_in_ranks_and_blocks_even_with_recurrent_states(folder):
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    states = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "full_attn_idxs": [1, 3], "conv_L_cache": 3}
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA | shape | states))
    unequal = PD.replace("{role: prefill}", "{role: prefill, tensor_parallel: 2, cache: {block_size: 8}}")
    first, second, *_ = load(folder, unequal).config.instances
    assert (first.tensor_parallel, first.cache.block_size) == (2, 8)
    assert (second.tensor_parallel, second.cache.block_size) == (1, None)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_deployment(tmp_path / "absent.yaml")


def test_unsupported_architecture_is_refused(folder):
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["GPT2LMHeadModel"]}))
    assert "GPT2LMHeadModel" in refusal(folder, PD)


def test_broken_config_json_is_refused(folder):
    (folder / "model" / "config.json").write_text("{")
    assert "config.json" in refusal(folder, PD)


SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda one: one.stem)
def test_every_shipped_deployment_is_sound(file, folder):
    # the model that they serve: heads that draft for it are held against its sizes
    (folder / "model" / "config.json").write_text((file.parent / "models" / "smollm2-135m.json").read_text())
    deployment = load_deployment(file, resolve=lambda *_names, **_options: folder / "model")
    assert deployment.config.instances


def test_api_keys_are_those_of_the_file_and_of_the_environment(folder, monkeypatch):
    (folder / "keys").write_text("# ours\none\n\n two \n")
    monkeypatch.setenv("BLOCKFERRY_API_KEY", "three, four")
    assert load(folder, PD).config.api.keys == ("three", "four")
    api = load(folder, PD + "api: {api_key_file: keys, max_concurrent_requests: 7}\n").config.api
    assert api.keys == ("one", "two", "three", "four")
    assert api.max_concurrent_requests == 7
    assert "four" not in repr(api)


@pytest.mark.parametrize(("text", "word"), [(None, "cannot be read"), ("# none\n", "holds no key")])
def test_api_key_file_without_a_key_is_refused(folder, text, word):
    if text is not None:
        (folder / "keys").write_text(text)
    found = refusal(folder, PD + "api: {api_key_file: keys}\n")
    assert "api.api_key_file" in found
    assert word in found
