"""`bench offload`: its copies on small pools, and the deployments that it makes."""

import json
from pathlib import Path

import pytest
from support.deployments import LLAMA, PD

from blockferry.cluster.bench.offload_copies import CopyBenchConfig, run_copy_bench
from blockferry.cluster.bench.offload_return import OFF, ON, ReturnBenchConfig, return_deployments
from blockferry.cluster.deployment import Deployment, load_deployment
from blockferry.engine.errors import ConfigError

MIXED = "name: test\nmodel: {path: model}\ninstances: [{role: mixed, replicas: 2, tensor_parallel: 1}]\n"


def load(folder: Path, text: str) -> Deployment:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "deployment.yaml").write_text(text)
    return load_deployment(folder / "deployment.yaml")


def test_copies_are_measured_beside_memcpy_of_the_same_runs() -> None:
    rows = run_copy_bench(CopyBenchConfig(block_bytes=(4096,), total_bytes=1 << 16, num_runs=2))
    assert [row.name for row in rows] == ["store", "memcpy", "ratio", "load", "memcpy", "ratio"] * 2
    assert {row.params["pattern"] for row in rows} == {"contiguous", "scattered"}
    assert all(len(row.runs) == 2 and min(row.runs) > 0 for row in rows)
    assert not list(Path("/dev/shm").glob("blockferry-bench-*"))


def test_blocks_of_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="1000 bytes are not a multiple of 16"):
        CopyBenchConfig(block_bytes=(1000,))


def test_the_two_deployments_differ_in_offload_alone(tmp_path: Path) -> None:
    bench = ReturnBenchConfig(num_conversations=4, prompt_tokens=128)
    found = return_deployments(load(tmp_path, MIXED), bench)
    off, on = (found[name].config.instances[0] for name in (OFF, ON))
    assert off.offload is None
    assert on.offload is not None
    assert off.cache == on.cache
    assert on.cache.num_blocks == 2 + -(-(128 + 2 * 32 + 4) // 16)  # a quarter of four is one


@pytest.mark.parametrize(("text", "words"), [(PD, "give a mixed deployment"), (MIXED, "exceed max_model_len")])
def test_deployments_that_cannot_be_measured_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        return_deployments(load(tmp_path, text), ReturnBenchConfig(prompt_tokens=4000))
