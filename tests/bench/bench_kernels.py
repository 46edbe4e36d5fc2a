"""Time every Triton kernel on this machine's GPU against its roofline.

    python tests/bench/bench_kernels.py [--json FILE] [--only NAME]

The roofline is max(bytes / bandwidth, FLOPs / peak) with the data sheet's figures of the GPU; ratio 1 means the kernel
is as fast as the hardware allows. Sizes are those that the kernels' docstrings name. bfloat16 throughout.

Legend: T tokens, R rows, S keys of a row, H query heads, K kv heads, D head dim, E hidden size, F intermediate size,
N block size, L layers, P pairs. The defaults are a layer of an 8B Llama.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable

import torch
from triton.testing import do_bench

from blockferry.cluster.bench.report import Report, Result
from blockferry.engine.attention.base import AttentionRule
from blockferry.kernels.attention_terms import first_in_reach
from blockferry.kernels.block_pack import block_copy, block_gather, block_scatter, block_zero
from blockferry.kernels.kv_write import kv_write
from blockferry.kernels.paged_decode import paged_decode
from blockferry.kernels.paged_prefill import paged_prefill
from blockferry.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_heads
from blockferry.kernels.rotary import rotate
from blockferry.kernels.silu_mul import silu_mul
from blockferry.kernels.slot_mapping import slot_mapping

H, K, D, E, F, N = 32, 8, 128, 4096, 14_336, 16
ITEM_BYTES = 2
PLAIN, WINDOW = AttentionRule(scale=D**-0.5), AttentionRule(scale=D**-0.5, window=1024)
BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What the data sheet promises."""

    bytes_per_s: float
    bf16_flops_per_s: float


PEAKS = {  # part of torch's device name -> peak; the first that fits
    "H200": Peak(bytes_per_s=4.8e12, bf16_flops_per_s=990e12),
    "H100 PCIe": Peak(bytes_per_s=2.0e12, bf16_flops_per_s=756e12),
    "H100": Peak(bytes_per_s=3.35e12, bf16_flops_per_s=990e12),
    "A100-SXM4-80GB": Peak(bytes_per_s=2.04e12, bf16_flops_per_s=312e12),
    "A100": Peak(bytes_per_s=1.56e12, bf16_flops_per_s=312e12),
    "MI300X": Peak(bytes_per_s=5.3e12, bf16_flops_per_s=1307e12),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size. prepare() allocates on the device and returns what to time."""

    name: str
    size: str
    num_bytes: float
    num_flops: float
    prepare: Callable[[torch.device], Callable[[], object]]

    def roofline_us(self, peak):
        """The time below which no implementation can go."""
        return 1e6 * max(self.num_bytes / peak.bytes_per_s, self.num_flops / peak.bf16_flops_per_s)


def _randn(device, *shape):
    return torch.randn(shape, dtype=BF16, device=device)


def _ints(device, values, dtype=torch.int32):
    return torch.as_tensor(values, dtype=dtype, device=device)


def _pages(device, rows, seq_len):
    """(one layer's pages, block table), every row in blocks of its own, shuffled."""
    blocks = -(-seq_len // N)
    pages = _randn(device, rows * blocks + 1, K, N, 2 * D)
    return pages, (torch.randperm(rows * blocks, device=device) + 1).to(torch.int32).view(rows, blocks)


def decode_case(rows, seq_len, rule=PLAIN):
    """One decode step."""

    def prepare(device):
        pages, table = _pages(device, rows, seq_len)
        q, lens = _randn(device, rows, H, D), _ints(device, [seq_len] * rows)
        out = torch.empty_like(q)
        return lambda: paged_decode(
            q,
            kv_cache=pages,
            block_table_RM=table,
            seq_lens_R=lens,
            total_seq_len=rows * seq_len,
            max_seq_len=seq_len,
            rule=rule,
            out_RHD=out,
        )

    keys = rows * _num_pairs(1, seq_len - 1, rule)
    num_bytes = (2 * K * D * keys + 2 * rows * H * D) * ITEM_BYTES
    return Case(
        name="paged_decode",
        size=f"R={rows} S={seq_len}{_reach(rule)}",
        num_bytes=num_bytes,
        num_flops=4 * H * D * keys,
        prepare=prepare,
    )


def prefill_case(num_queries, context, rule=PLAIN):
    """One row's chunk after its context."""

    def prepare(device):
        pages, table = _pages(device, 1, context + num_queries)
        q = _randn(device, num_queries, H, D)
        out, starts, lens = torch.empty_like(q), _ints(device, [0, num_queries]), _ints(device, [context + num_queries])
        return lambda: paged_prefill(
            q,
            kv_cache=pages,
            block_table_RM=table,
            query_start_R1=starts,
            seq_lens_R=lens,
            num_tokens=num_queries,
            rule=rule,
            out_THD=out,
        )

    keys = context + num_queries - first_in_reach(rule, context)
    num_bytes = (2 * num_queries * H * D + 2 * K * D * keys) * ITEM_BYTES
    return Case(
        name="paged_prefill",
        size=f"q={num_queries} c={context}{_reach(rule)}",
        num_bytes=num_bytes,
        num_flops=4 * H * D * _num_pairs(num_queries, context, rule),
        prepare=prepare,
    )


def _num_pairs(num_queries, context, rule):
    """Keys that the queries see, counted once for each query."""
    return sum(query + 1 - first_in_reach(rule, query) for query in range(context, context + num_queries))


def _reach(rule):
    """What of a rule belongs to a case's size."""
    window = "" if rule.window is None else f" w={rule.window}"
    return window if rule.chunk is None else f"{window} chunk={rule.chunk}"


def kv_write_case(tokens):
    """Keys and values out of the fused projection."""

    def prepare(device):
        pages = _randn(device, tokens // N + 2, K, N, 2 * D)
        _, k, v = _randn(device, tokens, H + 2 * K, D).split((H, K, K), dim=1)
        slots = torch.arange(tokens, device=device) + N
        return lambda: kv_write(k, v, kv_cache=pages, slot_mapping_T=slots)

    num_bytes = 4 * tokens * K * D * ITEM_BYTES + 8 * tokens
    return Case(name="kv_write", size=f"T={tokens}", num_bytes=num_bytes, num_flops=0, prepare=prepare)


def slot_mapping_case(tokens):
    """One prefill row."""

    def prepare(device):
        table = torch.arange(tokens // N + 1, dtype=torch.int32, device=device)[None]
        starts, computed = _ints(device, [0, tokens]), _ints(device, [0])
        out = torch.empty(tokens, dtype=torch.int64, device=device)
        return lambda: slot_mapping(table, starts, computed, block_size=N, out_T=out)

    return Case(name="slot_mapping", size=f"T={tokens}", num_bytes=12 * tokens, num_flops=0, prepare=prepare)


def layer_cases(tokens):
    """Norms, activation and rotary embedding of one step."""

    def norm(device):
        x, weight = _randn(device, tokens, E), _randn(device, E)
        return lambda: rms_norm(x, weight, 1e-5)

    def add_norm(device):
        x, residual, weight = _randn(device, tokens, E), _randn(device, tokens, E), _randn(device, E)
        return lambda: add_rms_norm(x, residual, weight, 1e-5)

    def head_norm(device):
        x, weight = _randn(device, tokens, H, D), _randn(device, D)
        return lambda: rms_norm_heads(x, weight, 1e-6)

    def activation(device):
        x = _randn(device, tokens, 2 * F)
        return lambda: silu_mul(x)

    def rotary(device):
        q, k, _ = _randn(device, tokens, H + 2 * K, D).split((H, K, K), dim=1)
        table, positions = torch.rand(tokens, D, device=device), torch.arange(tokens, device=device)
        return lambda: rotate(q, k, cos_sin=table, positions_T=positions)

    work = [  # name, bytes, FLOPs, prepare
        ("rms_norm", 2 * tokens * E * ITEM_BYTES, 4 * tokens * E, norm),
        ("add_rms_norm", 4 * tokens * E * ITEM_BYTES, 5 * tokens * E, add_norm),
        ("rms_norm_heads", 2 * tokens * H * D * ITEM_BYTES, 4 * tokens * H * D, head_norm),
        ("silu_mul", 3 * tokens * F * ITEM_BYTES, 5 * tokens * F, activation),
        ("rotate", 2 * tokens * (H + K) * D * ITEM_BYTES + 4 * tokens * D, 3 * tokens * (H + K) * D, rotary),
    ]
    return [
        Case(name=name, size=f"T={tokens}", num_bytes=num_bytes, num_flops=num_flops, prepare=prepare)
        for name, num_bytes, num_flops, prepare in work
    ]


def block_cases(num_pairs, num_layers):
    """Whole blocks of a model's pool, all layers of a block in a row."""
    block_bytes = num_layers * K * N * 2 * D * ITEM_BYTES

    def rows(device, num_rows):
        return torch.randint(0, 256, (num_rows, block_bytes), dtype=torch.uint8, device=device)

    def pool(device):
        """(pages, block ids, twice as many as are moved, in random order)."""
        num_blocks = 2 * num_pairs
        return rows(device, num_blocks + 1), (torch.randperm(num_blocks, device=device) + 1).to(torch.int32)

    def gather(device):
        (pages, block_ids), packed = pool(device), rows(device, num_pairs)
        return lambda: block_gather(pages, block_ids[:num_pairs], packed)

    def scatter(device):
        (pages, block_ids), packed = pool(device), rows(device, num_pairs)
        return lambda: block_scatter(packed, block_ids[:num_pairs], pages)

    def copy(device):
        pages, block_ids = pool(device)
        return lambda: block_copy(pages, block_ids.view(num_pairs, 2))

    def zero(device):
        pages, block_ids = pool(device)
        return lambda: block_zero(pages, block_ids[:num_pairs])

    work = [  # name, times a byte is read or written, prepare
        ("block_gather", 2, gather),
        ("block_scatter", 2, scatter),
        ("block_copy", 2, copy),
        ("block_zero", 1, zero),
    ]
    return [
        Case(
            name=name,
            size=f"P={num_pairs} L={num_layers}",
            num_bytes=num_accesses * num_pairs * block_bytes,
            num_flops=0,
            prepare=prepare,
        )
        for name, num_accesses, prepare in work
    ]


def all_cases():
    """Prefill-sized steps first, then decode-sized ones."""
    return [
        slot_mapping_case(8192),
        kv_write_case(8192),
        *layer_cases(8192),
        prefill_case(8192, 0),
        prefill_case(512, 32_768),
        prefill_case(8192, 32_768, WINDOW),
        kv_write_case(256),
        *layer_cases(256),
        decode_case(64, 4096),
        decode_case(256, 1024),
        decode_case(1, 131_072),
        decode_case(64, 4096, WINDOW),
        decode_case(1, 131_072, WINDOW),
        *block_cases(64, 32),
    ]


def measure(case, peak, device):
    """Time a case; the L2 cache is flushed before every run."""
    runs_us = [1e3 * run_ms for run_ms in do_bench(case.prepare(device), return_mode="all")]
    roofline_us = case.roofline_us(peak)
    is_compute_bound = case.num_flops / peak.bf16_flops_per_s > case.num_bytes / peak.bytes_per_s
    params = {
        "size": case.size,
        "bound": "compute" if is_compute_bound else "memory",
        "roofline_us": round(roofline_us, 2),
        "ratio": round(roofline_us / statistics.median(runs_us), 3),
    }
    return Result(name=case.name, params=params, unit="us", runs=runs_us)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", metavar="FILE", help="also write the results there; - is stdout, instead of the table"
    )
    parser.add_argument("--only", metavar="NAME", help="one kernel, e.g. paged_decode")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels: torch sees no GPU here; run this on a machine with one and a GPU build of torch")
    device = torch.device("cuda")
    device_name = torch.cuda.get_device_name(device)
    peak = next((peak for part, peak in PEAKS.items() if part in device_name), None)
    if peak is None:
        sys.exit(
            f"bench_kernels: no data sheet figures for {device_name!r}; add them to PEAKS, which has {list(PEAKS)}"
        )
    cases = [case for case in all_cases() if arguments.only in (None, case.name)]
    if not cases:
        sys.exit(f"bench_kernels: no kernel {arguments.only!r}; choose from {sorted({c.name for c in all_cases()})}")
    report = Report(command=f"bench_kernels on {device_name}", results=[measure(case, peak, device) for case in cases])
    if arguments.json != "-":
        report.print_table()
    if arguments.json:
        report.write_json(arguments.json)


if __name__ == "__main__":
    main()
