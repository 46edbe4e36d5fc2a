"""`check` finds what would stop a deployment, without starting it."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.deployments import LLAMA, PD

from blockferry.cluster.check import Level, check_deployment, check_weights, find_shortage_here
from blockferry.cluster.deployment import load_deployment
from blockferry.cluster.instance_plans import plan_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (model / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    return tmp_path


def findings(folder: Path, text: str) -> dict[str, tuple[Level, str]]:
    file = folder / "deployment.yaml"
    file.write_text(text + "cache: {memory: 256KiB}\n")
    return {one.subject: (one.level, one.message) for one in check_deployment(file, address=None)}


def test_sound_deployment_has_no_error(folder):
    found = findings(folder, PD + "api: {port: 0}\n")
    assert Level.ERROR not in {level for level, _ in found.values()}


def test_busy_port_is_found(folder):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        level, message = findings(folder, PD + f"api: {{port: {port}}}\n")["api.port"]
    assert level is Level.ERROR
    assert f"127.0.0.1:{port}" in message


def test_server_for_other_hosts_without_a_key_is_a_warning(folder):
    (folder / "keys").write_text("sesame\n")
    level, message = findings(folder, PD + "api: {port: 0, host: 0.0.0.0}\n")["api.host"]
    assert level is Level.WARNING
    assert "api_key_file" in message
    assert "api.host" not in findings(folder, PD + "api: {port: 0, host: 0.0.0.0, api_key_file: keys}\n")
    assert "api.host" not in findings(folder, PD + "api: {port: 0}\n")


def test_pool_shorter_than_the_model_is_a_warning(folder):
    level, message = findings(folder, PD)["instances[0].cache"]
    assert level is Level.WARNING
    assert "max_model_len=2048" in message


def test_blocks_of_a_stage_follow_its_layers_and_the_heads_of_the_rank_with_most(folder):
    text = PD.replace("{role: prefill}", "{role: prefill, tensor_parallel: 2, pipeline_parallel: 3}")
    file = folder / "deployment.yaml"
    file.write_text(text)
    deployment = load_deployment(file)
    one_head_one_layer = 16 * 2 * 8 * 2  # tokens, K and V, head_dim, bytes of bfloat16
    config = deployment.config
    plan = plan_of(config.model, deployment.header, config.instances[0], where="instances[0]")
    assert [stage.bytes_per_block // one_head_one_layer for stage in plan.stages] == [4, 2, 2]  # 2+1+1 layers, 2 heads


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def scramble(file: Path) -> None:
    file.write_bytes(b"\xff" * 100)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, scramble, empty])
def test_damaged_weights_are_found(folder, harm):
    harm(folder / "model" / "model.safetensors")
    (finding,) = [one for one in check_weights(folder / "model") if one.is_error]
    assert "model.safetensors is damaged" in finding.message


def test_missing_shard_and_tokenizer_are_found(folder):
    index = {"weight_map": {"weight": "model.safetensors", "other": "model-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model" / "tokenizer.json").unlink()
    messages = [one.message for one in check_weights(folder / "model") if one.is_error]
    assert any("model-00002.safetensors is missing" in message for message in messages)
    assert any("tokenizer" in message for message in messages)


@pytest.mark.parametrize(("memory", "subject"), [("256KiB", ""), ("200GiB", "memory: ")])
def test_what_one_more_instance_lacks_on_this_machine_is_found(folder, memory, subject):
    file = folder / "deployment.yaml"
    file.write_text(f"{PD}cache: {{memory: {memory}}}\n")
    deployment = load_deployment(file)
    assert find_shortage_here(deployment, [1]).startswith(subject)
    assert bool(find_shortage_here(deployment, [1])) == bool(subject)
    assert find_shortage_here(deployment, []) == ""
