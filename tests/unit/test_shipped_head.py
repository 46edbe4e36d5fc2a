"""The shipped draft head is one for SmolLM2-135M, small enough for a repository and whole."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from blockferry.cluster.shipped import shipped_heads, shipped_models
from blockferry.engine.config import DraftMethod, SpeculationConfig
from blockferry.engine.models.config import read_header
from blockferry.engine.models.draft_head import num_drafting_layers
from blockferry.engine.spec_decode.training.head_folder import HEAD_NAMES, head_config

MAX_BYTES = 10_000_000


def smollm2(folder: Path) -> Path:
    """Its shipped config is for plans, which need no positions."""
    values = json.loads(shipped_models()["smollm2-135m"].read_text())
    (folder / "config.json").write_text(json.dumps(values | {"rope_theta": 100000.0}))
    return folder


def test_it_drafts_for_smollm2(tmp_path: Path) -> None:
    header = read_header(smollm2(tmp_path))
    head = shipped_heads()["smollm2-135m-mtp"]
    speculation = SpeculationConfig(method=DraftMethod.MTP, num_tokens=3, head_path=head)

    values = json.loads((head / "config.json").read_text())

    assert num_drafting_layers(header, speculation) == 1
    assert values == head_config(header, values["training"])


def test_its_weights_are_whole_and_small(tmp_path: Path) -> None:
    head = shipped_heads()["smollm2-135m-mtp"]
    tensors = load_file(head / "model.safetensors")
    token_ids = tensors.pop("draft_token_ids")

    assert (head / "model.safetensors").stat().st_size < MAX_BYTES
    assert set(tensors) == {f"model.layers.30.{name}" for name in HEAD_NAMES}
    assert all(tensor.dtype is torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values())
    assert token_ids.dtype is torch.int32
    assert (token_ids.diff() > 0).all()
    assert token_ids[-1] < read_header(smollm2(tmp_path)).vocab_size
