"""One rank that cannot load: the others are not kept waiting, and the user is told at once by which rank and why."""

import re
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.cluster import live_deployment
from support.family_ranks import complaint_of_loading
from support.rank_processes import run_ranks
from support.tiny_families import checkpoint
from support.tiny_tokenizers import byte_level

from blockferry.cluster.actor_calls import LaunchError
from blockferry.engine.config import DType
from blockferry.engine.worker.spec import WorkerSpec

MISSING = "model.layers.3.mlp.down_proj.weight"  # of the last stage


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory)


@pytest.fixture
def broken(whole: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(whole, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    del tensors[MISSING]
    save_file(tensors, folder / "model.safetensors")
    byte_level()._backend.save(str(folder / "tokenizer.json"))
    return folder


def spec(*, timeout_s: float) -> WorkerSpec:
    return WorkerSpec(
        model_path=Path(),
        dtype=DType.FLOAT32,
        max_model_len=64,
        max_rows=2,
        max_num_batched_tokens=64,
        tp_size=2,
        collective_timeout_s=timeout_s,
    )


def test_a_rank_that_cannot_read_its_weights_keeps_no_other_waiting(whole: Path, broken: Path, tmp_path: Path) -> None:
    started_s = time.monotonic()

    complaints = run_ranks(spec(timeout_s=300.0), tmp_path / "meeting", complaint_of_loading, [whole, broken])

    assert complaints == ["", f"{broken}: tensor {MISSING} is in no safetensors file; the checkpoint is incomplete"]
    assert time.monotonic() - started_s < 120


def test_a_rank_that_nobody_meets_gives_up_in_one_line(whole: Path, tmp_path: Path) -> None:
    complaints = run_ranks(spec(timeout_s=3.0), tmp_path / "meeting", complaint_of_loading, [whole, None])

    assert re.fullmatch(r"rank 0 failed to meet the other 1 ranks at file://.*: .*", complaints[0])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_deployment_tells_which_rank_lacks_which_tensor(broken: Path, tmp_path: Path) -> None:
    text = (
        f"model: {{path: {broken}, max_model_len: 64}}\ncache: {{memory: 1MiB}}\n"
        f"instances: [{{role: mixed, pipeline_parallel: 2, resources: {{num_cpus: 0.5}}}}]\n"
    )

    with pytest.raises(LaunchError) as caught, live_deployment(text, tmp_path):
        pass

    assert re.fullmatch(
        rf"worker mixed-0 rank 1, checking the checkpoint: {broken}: tensor {MISSING} is in no .*", str(caught.value)
    )
