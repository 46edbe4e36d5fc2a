"""The latent benchmark's cases run, and its rooflines are those that the docstrings promise."""

import importlib.util
from pathlib import Path

import pytest
import torch
from support.paged import DEVICE

pytestmark = pytest.mark.triton

SCRIPT = Path(__file__).parents[1] / "bench/bench_latent.py"


@pytest.fixture(name="bench")
def load_bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("bench_latent", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_case_runs_at_a_small_size(bench, monkeypatch):
    for name, value in {"C": 48, "V": 32, "N": 16, "DTYPE": torch.float32}.items():
        monkeypatch.setattr(bench, name, value)
    for case in (bench.prefill_case(2, 5, 9), bench.decode_case(2, 2, 30)):
        case.prepare(torch.device(DEVICE))()


@pytest.mark.parametrize(
    ("size", "docstring_us"),
    [("H=128 q=8192 c=0", 9450), ("H=128 R=64 S=4096", 74), ("H=16 R=64 S=4096", 63)],
)
def test_rooflines_are_those_of_the_docstrings(bench, size, docstring_us):
    case = next(case for case in bench.all_cases() if case.size == size)
    assert case.roofline_us(bench.bench_kernels.PEAKS["H200"]) == pytest.approx(docstring_us, rel=0.01)
