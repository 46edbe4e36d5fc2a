"""Compiled kernels that different processes left in one folder are told apart by a process that loads them all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_cpu_attention.py")


@pytest.mark.slow
def test_kernels_that_several_processes_compiled_work_together(tmp_path: Path) -> None:
    """numba numbers functions from 1 in every process: alike in the first kernels that each compiles."""
    for chosen in ("block_borders", "every_head_shape", "block_borders or every_head_shape"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(TESTS), "-k", chosen],
            env=os.environ | {"BLOCKFERRY_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout[-2000:]
