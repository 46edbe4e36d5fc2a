"""Every Triton kernel compiles for every GPU family we name, without a GPU, as its wrapper launches it."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockferry.kernels.launch import Target

pytestmark = [pytest.mark.triton, pytest.mark.slow]

SCRIPT = Path(__file__).parents[1] / "support/compile_kernels.py"
TARGETS = [("cuda", "80", Target.AMPERE), ("cuda", "90", Target.HOPPER), ("hip", "gfx942", Target.CDNA)]
ATTENTION = {"paged_decode_kernel", "paged_prefill_kernel", "latent_decode_kernel", "latent_prefill_kernel"}


@functools.cache
def compile_for(backend, arch):
    """A process of its own: in this one Triton may be interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), backend, arch]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


@pytest.mark.parametrize(("backend", "arch", "target"), TARGETS)
def test_every_kernel_compiles(backend, arch, target):
    answer = compile_for(backend, arch)
    compiled = {entry["kernel"] for entry in answer["compiled"]}
    missing = set(answer["kernels"]) - compiled
    assert not missing, f"tests/support/compile_kernels.py launches no {missing}; add a wrapper call"
    assert compiled >= ATTENTION


@pytest.mark.parametrize(("backend", "arch", "target"), TARGETS)
def test_every_kernel_fits_registers_and_shared_memory(backend, arch, target):
    for entry in compile_for(backend, arch)["compiled"]:
        assert entry["shared_bytes"] <= target.shared_bytes, entry
        assert entry["spilled_bytes"] == 0, entry


@pytest.mark.parametrize(("backend", "arch", "target"), TARGETS)
def test_attention_in_half_precision_uses_the_matrix_units(backend, arch, target):
    entries = [entry for entry in compile_for(backend, arch)["compiled"] if entry["kernel"] in ATTENTION]
    assert all(entry["num_matrix_instructions"] > 0 for entry in entries if not entry["is_float32"])


@pytest.mark.parametrize(("backend", "arch", "target"), TARGETS)
def test_aligned_blocks_move_16_bytes_at_once(backend, arch, target):
    entries = [entry for entry in compile_for(backend, arch)["compiled"] if entry["kernel"].startswith("block_")]
    gather, scatter, copy, zero = entries[:4]  # of pages that 16 bytes divide; the others' they do not
    assert all(entry["num_16_byte_accesses"] > 0 for entry in (gather, scatter, copy, zero))


@pytest.mark.parametrize("arch", ["80", "90"])
def test_attention_loads_a_key_tile_while_it_uses_another(arch):
    entries = [entry for entry in compile_for("cuda", arch)["compiled"] if entry["kernel"] in ATTENTION]
    assert all(entry["num_pending_copies"] > 0 for entry in entries if not entry["is_float32"])
