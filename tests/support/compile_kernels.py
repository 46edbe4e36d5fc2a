"""Compile every Triton kernel for a GPU that is not there, exactly as its wrapper would launch it.

    python compile_kernels.py cuda 90      prints {"kernels": [...], "compiled": [{...}, ...]} as one JSON document

The wrappers run on CPU tensors with Triton's driver replaced by one that only names the target; each launch then
compiles and stops. Kernels that no wrapper here launches are missing from "compiled".
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from fp8_launches import launch_fp8_reads, launch_fp8_writes
from state_launches import launch_states
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from blockferry.engine.attention.base import AttentionRule
from blockferry.kernels import launch

TARGETS = {
    ("cuda", "80"): (GPUTarget("cuda", 80, 32), launch.Target.AMPERE),
    ("cuda", "90"): (GPUTarget("cuda", 90, 32), launch.Target.HOPPER),
    ("hip", "gfx942"): (GPUTarget("hip", "gfx942", 64), launch.Target.CDNA),
}


class TargetOnlyDriver:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, target):
        self._target = target

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def _paged(num_heads, num_kv_heads, head_dim, dtype, *, rows=2):
    """Arguments that both attention kernels share."""
    page = torch.empty(9, num_kv_heads, 16, 2 * head_dim, dtype=dtype)
    table = torch.zeros(rows, 64, dtype=torch.int32)
    q = torch.empty(64, num_heads, head_dim, dtype=dtype)
    return q, {"kv_cache": page, "block_table_RM": table, "rule": AttentionRule(scale=0.1)}


def _launch_attention(modules, q, paged):
    """Prefill, and decode with one split and with several."""
    lens = torch.ones(2, dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    modules["paged_prefill"].paged_prefill(q, query_start_R1=starts, seq_lens_R=lens, num_tokens=64, out_THD=q, **paged)
    for max_seq_len in (100, 1000):
        modules["paged_decode"].paged_decode(
            q[:2], seq_lens_R=lens, total_seq_len=200, max_seq_len=max_seq_len, out_RHD=q[:2], **paged
        )


def _launch_latent(modules, num_heads, latent_dim, value_dim, dtype):
    """Both latent kernels; decode with one split and with several."""
    q, page = torch.empty(64, num_heads, latent_dim, dtype=dtype), torch.empty(9, 16, latent_dim, dtype=dtype)
    out, lens = torch.empty(64, num_heads, value_dim, dtype=dtype), torch.ones(2, dtype=torch.int32)
    rows = {"kv_cache": page, "block_table_RM": torch.zeros(2, 64, dtype=torch.int32), "seq_lens_R": lens}
    rule = {"scale": 0.1, "window": None}
    starts = torch.zeros(3, dtype=torch.int32)
    modules["latent_prefill"].latent_prefill(q, query_start_R1=starts, num_tokens=64, out_THV=out, **rows, **rule)
    for max_seq_len in (100, 1000):
        modules["latent_decode"].latent_decode(
            q[:2], total_seq_len=200, max_seq_len=max_seq_len, out_RHV=out[:2], **rows, **rule
        )


def ruled_layers():
    """(query heads, kv heads, head dim, rule) of layers that do not read the whole sequence as it is."""
    return [
        (64, 8, 64, AttentionRule(scale=0.125, window=128, sinks_H=torch.zeros(64))),  # gpt-oss 120B
        (8, 4, 256, AttentionRule(scale=0.0625, window=4096, soft_cap=50.0)),  # Gemma 2 2B
        (32, 8, 128, AttentionRule(scale=0.1, window=4096)),  # Mistral 7B v0.1
        (40, 8, 128, AttentionRule(scale=0.1, chunk=8192)),  # Llama 4 Scout
    ]


def _launch_experts(modules):
    """Qwen3-30B-A3B (gate and up projections) at decode and prefill, gpt-oss 20B with biases, float32."""
    shapes = [  # (pairs, experts, outputs, inputs, dtype)
        (64, 128, 1536, 2048, torch.bfloat16),
        (4096, 128, 1536, 2048, torch.bfloat16),
        (65536, 128, 2048, 768, torch.bfloat16),
        (32768, 32, 5760, 2880, torch.bfloat16),
        (512, 8, 192, 64, torch.float32),
    ]
    for num_pairs, num_experts, num_outputs, num_inputs, dtype in shapes:
        rows = torch.zeros(num_pairs, dtype=torch.int64)
        starts = torch.zeros(num_experts + 1, dtype=torch.int32)
        weight = torch.empty(1, num_outputs, num_inputs, dtype=dtype).expand(num_experts, -1, -1)
        bias = torch.empty(num_experts, num_outputs, dtype=dtype)
        matmul = modules["moe_grouped_matmul"].grouped_matmul
        matmul(torch.empty(8, num_inputs, dtype=dtype), weight, starts_X1=starts, row_M=rows)
        matmul(torch.empty(num_pairs, num_inputs, dtype=dtype), weight, starts_X1=starts, bias_XO=bias)
        table = rows.view(-1, 8)
        y = torch.empty(num_pairs, num_outputs, dtype=dtype)
        modules["moe_combine"].combine(y, table, torch.empty(table.shape), starts[:1])
        for normalisation in modules["moe_routing"].Normalisation:
            modules["moe_routing"].softmax_top_k(torch.empty(64, num_experts, dtype=dtype), 4, normalisation)


def launch_everything(modules):
    """Call every wrapper with shapes of real models; nothing runs."""
    launch_states(modules)
    i32 = torch.int32
    shapes = [  # (query heads, kv heads, head dim, dtype): 8B Llama, SmolLM2, wide multi-query, float32
        (32, 8, 128, torch.bfloat16),
        (9, 3, 64, torch.float16),
        (8, 1, 256, torch.bfloat16),
        (32, 8, 128, torch.float32),
    ]
    for num_heads, num_kv_heads, head_dim, dtype in shapes:
        q, paged = _paged(num_heads, num_kv_heads, head_dim, dtype)
        _launch_attention(modules, q, paged)
        k = torch.empty(64, num_kv_heads, head_dim, dtype=dtype)
        slots = torch.zeros(64, dtype=torch.int64)
        modules["kv_write"].kv_write(k, k, kv_cache=paged["kv_cache"], slot_mapping_T=slots)
        table = torch.empty(128, head_dim)
        modules["rotary"].rotate(q, k, cos_sin=table, positions_T=slots)
        weight = torch.empty(head_dim, dtype=dtype)
        modules["rms_norm"].rms_norm_heads(q, weight, 1e-6)
    for num_heads, num_kv_heads, head_dim, rule in ruled_layers():
        q, paged = _paged(num_heads, num_kv_heads, head_dim, torch.bfloat16)
        _launch_attention(modules, q, paged | {"rule": rule})
    q, paged = _paged(32, 8, 128, torch.bfloat16, rows=1)  # an argument of 1 is a constant to Triton
    one = torch.ones(1, dtype=i32)
    modules["paged_prefill"].paged_prefill(
        q, query_start_R1=torch.zeros(2, dtype=i32), seq_lens_R=one, num_tokens=64, out_THD=q, **paged
    )
    _launch_latent(modules, 128, 576, 512, torch.bfloat16)  # DeepSeek-V3
    _launch_latent(modules, 16, 576, 512, torch.bfloat16)  # on 8 GPUs
    _launch_latent(modules, 16, 576, 512, torch.float32)
    x = torch.empty(64, 4096, dtype=torch.bfloat16)
    modules["rms_norm"].rms_norm(x, x[0], 1e-6)
    modules["rms_norm"].add_rms_norm(x, x, x[0], 1e-6)
    modules["silu_mul"].silu_mul(x)
    _launch_experts(modules)
    for num_bytes in (65_536, 2008, 1996, 1998, 1999):  # accesses of 16, 8, 4, 2 and 1 bytes
        pages, ids = torch.empty(9, num_bytes, dtype=torch.uint8), torch.zeros(9, dtype=i32)
        modules["block_pack"].block_gather(pages, ids, pages)
        modules["block_pack"].block_scatter(pages, ids.long(), pages)
        modules["block_pack"].block_copy(pages, torch.zeros(3, 2, dtype=i32))
        modules["block_pack"].block_zero(pages, ids)
    for rows in (1, 100):
        modules["slot_mapping"].slot_mapping(
            torch.zeros(rows, 64, dtype=i32),
            torch.zeros(rows + 1, dtype=i32),
            torch.zeros(rows, dtype=i32),
            block_size=16,
            out_T=torch.zeros(64, dtype=torch.int64),
        )


def resources(compiled, backend):
    """What a program takes and does: shared bytes, registers of a thread, bytes it spills, instructions of note."""
    shared = compiled.metadata.shared
    is_float32 = "fp32" in str(compiled.src.signature.get("q_ptr"))
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text).group(1))
        spilled = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text).group(1))
        return {
            "shared_bytes": shared,
            "num_registers": registers,
            "spilled_bytes": spilled,
            "is_float32": is_float32,
            "num_matrix_instructions": text.count("v_mfma"),
            "num_16_byte_accesses": len(re.findall(r"(?:buffer|global)_(?:load|store)_dwordx4", text)),
        }
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", text).group(1)) for key in ("REG", "STACK"))
    ptx = compiled.asm["ptx"]
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)
    return {
        "shared_bytes": shared,
        "num_registers": registers,
        "spilled_bytes": stack,
        "is_float32": is_float32,
        "num_matrix_instructions": ptx.count("mma.sync") + ptx.count("wgmma.mma_async"),
        "num_16_byte_accesses": len(re.findall(r"(?:ld|st)\.global[.\w]*\.(?:v2\.b64|v4\.b32)", ptx)),
        "num_pending_copies": max(map(int, waits), default=0),  # groups of copies in flight during a wait
    }


def main(backend, arch):
    target, family = TARGETS[backend, arch]
    launch.target_of = lambda device: family
    driver.set_active(TargetOnlyDriver(target))
    folder = importlib.import_module("blockferry.kernels")
    names = [name for _, name, _ in pkgutil.iter_modules(folder.__path__) if not name.startswith("cpu_")]
    modules = {name: importlib.import_module(f"blockferry.kernels.{name}") for name in names}
    kernels = {
        value.__name__
        for module in modules.values()
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
    }
    compiled_kernels = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled_kernels.append({"kernel": self.__name__} | resources(compiled, backend))

    JITFunction.run = compile_only
    launch_everything(modules)
    launch_fp8_writes(modules)
    if family is not launch.Target.AMPERE:  # which converts no e4m3
        launch_fp8_reads(modules)
    json.dump({"kernels": sorted(kernels), "compiled": compiled_kernels}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
