"""Compiled kernels that different processes left in one folder are told apart by whoever loads them all."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAD_DIMS = (16, 64)
GET = """
import pathlib, sys
from blockferry.kernels.cpu_emit import Element
from blockferry.kernels.cpu_launch import KernelStore
from blockferry.kernels.cpu_paged_decode import compile_paged_decode
store = KernelStore(pathlib.Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_kernels_that_were_each_the_first_of_a_process_have_addresses_of_their_own(tmp_path: Path) -> None:
    for head_dim in HEAD_DIMS:  # each compiled first, so that numba numbers them alike
        build = f"compile_paged_decode(Element.FLOAT32, {head_dim}, 3)"
        python(f"{GET}store.get('decode-{head_dim}', lambda: {build})", tmp_path)

    names = [f"decode-{head_dim}" for head_dim in HEAD_DIMS]
    addresses = python(f"{GET}print(*(store.get(name, None).address for name in {names}))", tmp_path).split()

    assert len(set(addresses)) == len(HEAD_DIMS)


def python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
