"""The kernel benchmark's cases run, and its rooflines are those that the docstrings promise."""

import importlib.util
from pathlib import Path

import pytest
import torch
from support.paged import DEVICE

from blockferry.engine.attention.base import AttentionRule

pytestmark = pytest.mark.triton

SCRIPT = Path(__file__).parents[1] / "bench/bench_kernels.py"


@pytest.fixture(name="bench")
def load_bench():
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_case_runs_at_a_small_size(bench, monkeypatch):
    for name, value in {"H": 2, "K": 1, "D": 32, "E": 64, "F": 64}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "BF16", torch.float32)
    cases = [
        bench.slot_mapping_case(20),
        bench.kv_write_case(4),
        *bench.layer_cases(2),
        bench.prefill_case(5, 9),
        bench.decode_case(2, 30),
        bench.decode_case(2, 30, AttentionRule(scale=0.1, window=9)),
        *bench.block_cases(2, 2),
    ]
    assert {case.name for case in cases} == {case.name for case in bench.all_cases()}
    for case in cases:
        case.prepare(torch.device(DEVICE))()


@pytest.mark.parametrize(
    ("name", "size", "docstring_us"),
    [
        ("paged_decode", "R=64 S=4096", 224),
        ("paged_prefill", "q=8192 c=0", 555),
        ("paged_decode", "R=64 S=4096 w=1024", 56),
        ("paged_prefill", "q=8192 c=32768 w=1024", 139),
        ("kv_write", "T=8192", 14),
        ("add_rms_norm", "T=8192", 56),
        ("rms_norm_heads", "T=8192", 28),
        ("silu_mul", "T=8192", 147),
        ("rotate", "T=8192", 36),
        ("block_gather", "P=64 L=32", 56),
        ("block_scatter", "P=64 L=32", 56),
        ("block_copy", "P=64 L=32", 56),
        ("block_zero", "P=64 L=32", 28),
    ],
)
def test_rooflines_are_those_of_the_docstrings(bench, name, size, docstring_us):
    case = next(case for case in bench.all_cases() if (case.name, case.size) == (name, size))
    assert round(case.roofline_us(bench.PEAKS["H200"])) == docstring_us


@pytest.mark.skipif(DEVICE == "cuda", reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so(bench, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_kernels"])
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        bench.main()
