"""Checkpoints: single and sharded, slices, and one clear line for everything that can be wrong with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_config, make_checkpoint

from blockferry.engine.errors import ModelLoadError
from blockferry.engine.models.config import dense_config, read_header
from blockferry.engine.models.layers import rope_table
from blockferry.engine.models.loader import Checkpoint, fingerprint
from blockferry.engine.models.ops import TorchOps
from blockferry.engine.models.registry import ModelParts, load_model
from blockferry.engine.models.sharding import (
    RankPlace,
    Span,
    split_evenly,
    split_heads,
    split_layers,
    split_padded,
)
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement
from blockferry.engine.worker.parallel import LoneCommunicator

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(path: Path, *, place: RankPlace | None = None, max_model_len: int = 64) -> None:
    load_model(
        path,
        place or RankPlace(),
        placement=Placement(dtype=torch.float32, device=torch.device("cpu"), max_model_len=max_model_len),
        parts=ModelParts(ops=TorchOps(), state_ops=TorchStateOps(), communicator=LoneCommunicator()),
    )


def shard_files(path: Path) -> None:
    """Rewrite a single-file checkpoint as three files and an index."""
    tensors = load_file(path / SINGLE)
    (path / SINGLE).unlink()
    names = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("prepare", [lambda path: None, shard_files], ids=["single", "sharded"])
def test_slices_are_read_and_cast(model: Path, prepare: Callable[[Path], None]) -> None:
    name, shape = "model.layers.1.mlp.up_proj.weight", (100, 72)
    expected = load_file(model / SINGLE)[name]
    prepare(model)
    checkpoint = Checkpoint(model)
    out = torch.full((12, 72), 7.0, dtype=torch.bfloat16)
    columns = torch.empty(100, 5)

    checkpoint.read_into(out, name, shape, rows=Span(start=20, stop=30))
    checkpoint.read_into(columns, name, shape, columns=Span(start=3, stop=8))

    assert torch.equal(out[:10], expected[20:30].bfloat16())
    assert (out[10:] == 7.0).all()
    assert torch.equal(columns, expected[:, 3:8])


def remove_tensor(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    del tensors["model.layers.2.self_attn.k_norm.weight"]
    save_file(tensors, path / SINGLE)


def remove_shard(path: Path) -> None:
    shard_files(path)
    (path / "part-1.safetensors").unlink()


def truncate(path: Path) -> None:
    data = (path / SINGLE).read_bytes()
    (path / SINGLE).write_bytes(data[:-100])


def truncate_shard(path: Path) -> None:
    shard_files(path)
    data = (path / "part-1.safetensors").read_bytes()
    (path / "part-1.safetensors").write_bytes(data[: len(data) // 2])


PROBLEMS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: shutil.rmtree(path), r"model folder .* does not exist"),
    (lambda path: (path / "config.json").unlink(), r"config.json does not exist"),
    (lambda path: (path / "config.json").write_text("{"), r"config.json is not readable JSON"),
    (lambda path: (path / "config.json").write_text("[]"), r"holds no JSON object"),
    (lambda path: (path / SINGLE).unlink(), r"holds neither model.safetensors nor"),
    (lambda path: (path / SINGLE).write_bytes(b""), r"not a complete safetensors file: 0 bytes"),
    (lambda path: (path / SINGLE).write_bytes(b"\x05\0\0\0\0\0\0\0hello" + b"x" * 99), r"corrupt safetensors header"),
    (truncate, r"model.safetensors has \d+ bytes of weights, its header says \d+"),
    (truncate_shard, r"part-1.safetensors is not a readable safetensors file"),
    (remove_tensor, r"tensor model.layers.2.self_attn.k_norm.weight is in no safetensors file"),
    (remove_shard, r"part-1.safetensors is named in model.safetensors.index.json but does not exist"),
    (lambda path: edit_config(path, vocab_size=300), r"embed_tokens.weight has shape \(307, 72\), .* says \(300, 72\)"),
    (
        lambda path: edit_config(path, num_hidden_layers=4, layer_types=["full_attention"] * 4),
        r"tensor model.layers.3.self_attn",
    ),
    (lambda path: edit_config(path, architectures=["GPT2LMHeadModel"]), r"GPT2LMHeadModel is not supported.*Qwen3For"),
    (lambda path: edit_config(path, architectures=None), r"architecture \(none\) is not supported"),
    (lambda path: edit_config(path, hidden_act="gelu"), r"hidden_act=gelu is not supported"),
    (lambda path: edit_config(path, quantization_config={}), r"quantised weights are not supported"),
    (lambda path: edit_config(path, num_key_value_heads=4), r"num_attention_heads=9 is not a multiple"),
    (lambda path: edit_config(path, rope_parameters={"rope_type": "yarn"}), r"rope_type=yarn is not supported"),
    (lambda path: edit_config(path, partial_rotary_factor=0.5), r"partial_rotary_factor=0.5 is not supported"),
    (lambda path: edit_config(path, max_position_embeddings=32), r"max_model_len=64 exceeds the model's 32 positions"),
]


@pytest.mark.parametrize(("spoil", "message"), PROBLEMS, ids=[message for _, message in PROBLEMS])
def test_a_broken_checkpoint_is_refused_in_one_line(model: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(model)

    with pytest.raises(ModelLoadError, match=message) as caught:
        load(model)

    assert "\n" not in str(caught.value)


def test_a_config_without_a_needed_key_names_it(model: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    del values["hidden_size"]
    (model / "config.json").write_text(json.dumps(values))

    with pytest.raises(ModelLoadError, match=r"config.json: hidden_size is missing"):
        read_header(model)


def test_too_many_ranks_are_refused_with_the_sizes_that_work(model: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tensor_parallel=4 cannot share .* use one of 1, 2, 3, 6, 9$"):
        load(model, place=RankPlace(tp_size=4))
    with pytest.raises(ModelLoadError, match=r"pipeline_parallel=4 exceeds the model's 3 layers"):
        load(model, place=RankPlace(pp_size=4))


def test_old_style_rope_keys_mean_the_same(model: Path) -> None:
    new = dense_config(read_header(model))
    values = json.loads((model / "config.json").read_text())
    theta = values.pop("rope_parameters")["rope_theta"]
    (model / "config.json").write_text(json.dumps(values | {"rope_theta": theta, "rope_scaling": None}))

    assert dense_config(read_header(model)) == new


def test_dynamic_rope_is_plain_up_to_the_trained_length(model: Path) -> None:
    plain = rope_table(dense_config(read_header(model)).rope, head_dim=16, max_len=8)
    edit_config(model, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})

    assert torch.equal(rope_table(dense_config(read_header(model)).rope, head_dim=16, max_len=8), plain)


def test_the_fingerprint_knows_the_model_not_its_place(original: Path, model: Path) -> None:
    same = fingerprint(model)
    tensors = load_file(model / SINGLE)
    first = min(tensors)
    save_file(tensors | {first: tensors[first] + 1}, model / SINGLE)
    other_weights = fingerprint(model)
    shutil.copy(original / SINGLE, model / SINGLE)
    edit_config(model, rms_norm_eps=1e-3)

    assert same == fingerprint(original)
    assert len({same, other_weights, fingerprint(model)}) == 3


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6, 9])
def test_every_head_is_held_once_and_beside_its_kv_head(num_ranks: int) -> None:
    splits = [split_heads(num_heads=9, num_kv_heads=3, tp_rank=rank, tp_size=num_ranks) for rank in range(num_ranks)]

    assert [head for split in splits for head in range(split.query.start, split.query.stop)] == list(range(9))
    for split in splits:
        assert {head // 3 for head in range(split.query.start, split.query.stop)} == set(
            range(split.kv.start, split.kv.stop)
        )


def test_even_parts_differ_by_one_and_padded_parts_by_the_last() -> None:
    assert [len(split_evenly(10, rank, 4)) for rank in range(4)] == [3, 3, 2, 2]
    assert [len(split_padded(10, rank, 4)) for rank in range(4)] == [3, 3, 3, 1]
    assert [split_layers(5, stage, 2).stop for stage in range(2)] == [3, 5]
