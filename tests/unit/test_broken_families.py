"""What cannot run is refused in one line that names why, in every family, before any rank waits for another."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_config
from support.tiny_families import FAMILIES, checkpoint

from blockferry.cluster.check import check_deployment
from blockferry.cluster.deployment import load_deployment
from blockferry.engine.config import DType
from blockferry.engine.errors import ConfigError, ModelLoadError
from blockferry.engine.models import registry
from blockferry.engine.worker.spec import WorkerSpec
from blockferry.engine.worker.worker import Worker, check_checkpoint

WEIGHTS = "model.safetensors"
OPTIONAL = {"final_logits_bias"}  # a checkpoint may leave it out
WITHOUT_ROTATION = {"jamba", "bart"}
NOWHERE = "tcp://192.0.2.1:9"  # an address for examples: whoever tries to meet there waits for long
DIVISORS = {  # of what recurrent layers share; experts need not divide
    "qwen3_next": "key heads of linear attention",
    "qwen3_5": "key heads of linear attention",
    "jamba": "inner channels",
    "bamba": "inner channels",
    "lfm2": "convolution channels",
}
DIVISOR_OF_HEADS = {name: "heads" for name in FAMILIES if name not in DIVISORS and name != "bart"}


@pytest.fixture(params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the family's checkpoint to spoil."""
    return Path(shutil.copytree(checkpoint(name, tmp_path_factory), tmp_path / name))


def spec(folder: Path, **place: Any) -> WorkerSpec:
    return WorkerSpec(
        model_path=folder,
        dtype=DType.FLOAT32,
        max_model_len=64,
        max_rows=2,
        max_num_batched_tokens=64,
        collective_timeout_s=600.0,
        **place,
    )


def deployment(folder: Path, **instance: Any) -> Path:
    file = folder / "deployment.yaml"
    instances = [{"role": "mixed", "cache": {"memory": "64MiB"}, **instance}]
    file.write_text(json.dumps({"model": {"path": str(folder), "max_model_len": 64}, "instances": instances}))
    return file


def refusal(call: Callable[[], object], kind: type[Exception] = ModelLoadError) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def tensor_kinds(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    """One name of each kind of tensor: of all layers' q_proj.weight, say, the first."""
    kinds: dict[str, str] = {}
    for tensor in tensors:
        kinds.setdefault(re.sub(r"\d+", "N", tensor), tensor)
    yield from kinds.values()


def spoil_each(model: Path, spoil: Callable[[dict[str, torch.Tensor], str], None]) -> Iterator[str]:
    """Every kind of tensor in turn, while only that one is spoilt."""
    tensors = load_file(model / WEIGHTS)
    for tensor in tensor_kinds(tensors):
        spoilt = dict(tensors)
        spoil(spoilt, tensor)
        save_file(spoilt, model / WEIGHTS)
        yield tensor


def remove(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def grow(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.zeros([size + 1 for size in tensors[name].shape])


def test_an_unsupported_architecture_is_refused_by_its_name(name: str, model: Path) -> None:
    edit_config(model, architectures=["GPT2LMHeadModel"])

    message = refusal(lambda: load_deployment(deployment(model)), ConfigError)
    (finding,) = check_deployment(deployment(model), address=None)

    assert message.startswith("model.path: ")
    assert "architecture GPT2LMHeadModel is not supported" in message
    assert finding.is_error
    assert finding.message == message


@pytest.mark.parametrize("tp_size", [2, 3, 4, 8])
def test_a_tensor_parallel_size_loads_on_every_rank_or_is_refused_at_its_key(
    name: str, tp_size: int, model: Path
) -> None:
    complaint = ""
    try:
        load_deployment(deployment(model, tensor_parallel=tp_size))
    except ConfigError as error:
        complaint = str(error)

    assert not complaint or re.fullmatch(r"instances\[0\]\.tensor_parallel: .*; use .*", complaint)
    for tp_rank in range(0 if complaint else tp_size):
        check_checkpoint(spec(model, tp_rank=tp_rank, tp_size=tp_size))


@pytest.mark.parametrize(("name", "shared"), [*DIVISORS.items(), *DIVISOR_OF_HEADS.items()])
def test_a_tensor_parallel_size_that_does_not_divide_says_what(name: str, shared: str, model: Path) -> None:
    message = refusal(lambda: load_deployment(deployment(model, tensor_parallel=3)), ConfigError)

    assert message.startswith("instances[0].tensor_parallel: ")
    assert shared in message


def test_experts_need_not_divide(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = Path(shutil.copytree(checkpoint("deepseek_v3", tmp_path_factory), tmp_path / "model"))
    tensors = load_file(model / WEIGHTS)
    kept = {name: value for name, value in tensors.items() if not re.search(r"experts\.[67]\.", name)}
    kept |= {name: value[:6] for name, value in kept.items() if re.search(r"gate\.(weight|e_score)", name)}
    save_file({name: value.contiguous() for name, value in kept.items()}, model / WEIGHTS)
    edit_config(model, n_routed_experts=6, n_group=3, num_experts_per_tok=2)

    load_deployment(deployment(model, tensor_parallel=4))

    for tp_rank in range(4):
        check_checkpoint(spec(model, tp_rank=tp_rank, tp_size=4))


def test_a_missing_tensor_is_named_with_its_checkpoint(name: str, model: Path) -> None:
    for tensor in spoil_each(model, remove):
        if tensor not in OPTIONAL:
            message = refusal(lambda: check_checkpoint(spec(model)))
            assert message == f"{model}: tensor {tensor} is in no safetensors file; the checkpoint is incomplete"


def test_a_tensor_of_another_shape_is_named_with_its_file(name: str, model: Path) -> None:
    for tensor in spoil_each(model, grow):
        message = refusal(lambda: check_checkpoint(spec(model)))
        assert message.startswith(f"{model / WEIGHTS}: tensor {tensor} has shape (")


@pytest.mark.parametrize("spoil", [remove, grow])
def test_loading_refuses_what_the_check_does(
    spoil: Callable[[dict[str, torch.Tensor], str], None], name: str, model: Path
) -> None:
    tensors = load_file(model / WEIGHTS)
    spoil(tensors, max(set(tensors) - OPTIONAL))
    save_file(tensors, model / WEIGHTS)

    assert refusal(lambda: Worker(spec(model)).load()) == refusal(lambda: check_checkpoint(spec(model)))


def test_a_rank_checks_its_part_before_it_waits_for_others(name: str, model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    last = max((tensor for tensor in tensors if "layers." in tensor), key=_layer_of)
    remove(tensors, last)
    save_file(tensors, model / WEIGHTS)

    message = refusal(lambda: check_checkpoint(spec(model, pp_rank=1, pp_size=2, init_method=NOWHERE)))

    assert f"tensor {last} is in no" in message


def _layer_of(tensor: str) -> tuple[bool, int]:
    found = re.search(r"layers\.(\d+)\.", tensor)
    assert found is not None
    return ".encoder." not in tensor, int(found.group(1))


CORRUPT: list[tuple[str, dict[str, Any]]] = [
    ("vocab_size", {"vocab_size": None}),
    ("vocab_size", {"vocab_size": -4}),
    ("SIZE", {"SIZE": None}),
    ("SIZE", {"SIZE": "many"}),
    ("SIZE", {"SIZE": [64]}),
    ("LAYERS", {"LAYERS": -4}),
    ("LAYERS", {"LAYERS": 0}),
    ("LAYERS", {"LAYERS": 2.5}),
    ("max_position_embeddings", {"max_position_embeddings": "long"}),
    ("HEADS", {"HEADS": {"a": 1}}),
    ("HEADS", {"HEADS": "four"}),
]


@pytest.mark.parametrize(("key", "changes"), CORRUPT, ids=[str(changes) for _, changes in CORRUPT])
def test_a_corrupt_key_is_named(key: str, changes: dict[str, Any], name: str, model: Path) -> None:
    words = _words(name)
    edit_config(model, **{words.get(one, one): value for one, value in changes.items()})

    at_launch = refusal(lambda: load_deployment(deployment(model)), ConfigError)
    on_a_rank = refusal(lambda: check_checkpoint(spec(model)))

    assert words.get(key, key) in at_launch
    assert words.get(key, key) in on_a_rank


def _words(name: str) -> dict[str, str]:
    if name == "bart":
        return {"SIZE": "d_model", "LAYERS": "decoder_layers", "HEADS": "decoder_attention_heads"}
    return {"SIZE": "hidden_size", "LAYERS": "num_hidden_layers", "HEADS": "num_attention_heads"}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.has_encoder])
def test_a_layer_type_that_is_not_known_is_named(name: str, model: Path) -> None:
    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    edit_config(model, layer_types=["telepathy"] * num_layers, layers_block_type=None)

    for message in (
        refusal(lambda: load_deployment(deployment(model)), ConfigError),
        refusal(lambda: check_checkpoint(spec(model))),
    ):
        assert "layer type 'telepathy' is unknown" in message


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "spiral"}, "rope_type=spiral is not supported"),
        ({"rope_type": "linear", "factor": "two"}, "factor is 'two'"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta is -1.0"),
        ("spiral", "rope_parameters is 'spiral'"),
    ],
)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_ROTATION])
def test_a_rotary_embedding_that_cannot_be_computed_is_named(rope: Any, key: str, name: str, model: Path) -> None:
    stated = json.loads((model / "config.json").read_text())["rope_parameters"]
    by_kind = isinstance(rope, dict) and "full_attention" in stated
    edit_config(model, rope_parameters=stated | {"full_attention": rope} if by_kind else rope)

    assert key in refusal(lambda: check_checkpoint(spec(model)))


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, ValueError, RuntimeError])
def test_a_mistake_of_ours_is_not_blamed_on_the_checkpoint(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def build(_build: object) -> None:
        raise error("ours")

    monkeypatch.setattr(registry, "FAMILIES", {"LlamaForCausalLM": build})

    with pytest.raises(error, match="ours"):
        check_checkpoint(spec(checkpoint("llama", tmp_path_factory)))


def test_a_size_beyond_all_memory_is_a_shape_that_differs(name: str, model: Path) -> None:
    edit_config(model, vocab_size=1 << 39)

    assert "has shape (192, 64), config.json says (549755813888, 64)" in refusal(lambda: check_checkpoint(spec(model)))
