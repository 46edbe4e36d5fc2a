"""Time the recurrences over paged states: the Triton kernels on a GPU against their roofline, or plain torch on CPUs.

    python tests/bench/bench_states.py [--json FILE] [--only NAME] [--cpu THREADS]

Shapes on a GPU are those that the kernels' docstrings name, inputs bfloat16, states float32; on CPUs they are smaller,
float32, and the unit is tokens a second of one layer. Rooflines are max(bytes / bandwidth, FLOPs / peak); FLOPs that
do not run on matrix units count as bytes only.

Legend: T tokens, R rows, C channels, W taps, H heads, P channels of a head, N state size, K key dim, V value dim.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from blockferry.cluster.bench.report import Report, Result
from blockferry.engine.models.state_ops import DeltaInputs, SelectiveInputs, SsdInputs, StateMetadata
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.triton_state_ops import TritonStateOps

CHUNK = 64  # tokens of a chunk on Hopper
CPU_RUNS = 9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One recurrent layer: build(num_tokens, rows, device, dtype) returns run(ops, metadata)."""

    name: str
    size: str
    state_elements: int
    input_elements: int  # read and written, of each token
    flops_per_token: int  # of matrix products
    build: Callable[..., Callable[..., object]]


def step(num_tokens, num_rows, device):
    """Decode rows, or one prefill row; every row reads and writes its own block."""
    is_decode = num_tokens == num_rows
    lens = [num_tokens // num_rows] * num_rows
    blocks = torch.arange(num_rows, device=device)
    return StateMetadata(
        num_rows=num_rows,
        num_decode_rows=num_rows if is_decode else 0,
        num_tokens=num_tokens,
        query_start_R1=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * lens[0],
        source_R=blocks,
        target_R=blocks,
        is_fresh_R=torch.zeros(num_rows, dtype=torch.bool, device=device),
        query_lens=lens,
        is_fresh=[False] * num_rows,
    )


def conv_layer(channels, taps):
    def build(num_tokens, num_rows, device, dtype):
        x = torch.randn(num_tokens, channels, device=device, dtype=dtype)
        weight = torch.randn(channels, taps, device=device, dtype=dtype)
        state = torch.zeros(num_rows, channels, taps - 1, device=device)
        return lambda ops, metadata: ops.causal_conv(x, weight, None, state_BCw=state, metadata=metadata)

    return Layer(
        name="causal_conv",
        size=f"C={channels} W={taps}",
        state_elements=channels * (taps - 1),
        input_elements=2 * channels,
        flops_per_token=0,
        build=build,
    )


def selective_layer(channels, state_size):
    def build(num_tokens, num_rows, device, dtype):
        inputs = SelectiveInputs(
            x_TC=torch.randn(num_tokens, channels, device=device, dtype=dtype),
            dt_TC=torch.rand(num_tokens, channels, device=device),
            a_CN=-torch.arange(1.0, state_size + 1, device=device).repeat(channels, 1),
            b_TN=torch.randn(num_tokens, state_size, device=device, dtype=dtype),
            c_TN=torch.randn(num_tokens, state_size, device=device, dtype=dtype),
            d_C=torch.randn(channels, device=device),
        )
        state = torch.zeros(num_rows, channels, state_size, device=device)
        return lambda ops, metadata: ops.selective_scan(inputs, state_BCN=state, metadata=metadata)

    return Layer(
        name="selective_scan",
        size=f"C={channels} N={state_size}",
        state_elements=channels * state_size,
        input_elements=4 * channels + 2 * state_size,  # dt is float32: two elements
        flops_per_token=0,
        build=build,
    )


def ssd_layer(heads, head_dim, state_size):
    def build(num_tokens, num_rows, device, dtype):
        inputs = SsdInputs(
            x_THP=torch.randn(num_tokens, heads, head_dim, device=device, dtype=dtype),
            dt_TH=torch.rand(num_tokens, heads, device=device),
            a_H=-torch.rand(heads, device=device) * 8,
            b_TGN=torch.randn(num_tokens, 1, state_size, device=device, dtype=dtype),
            c_TGN=torch.randn(num_tokens, 1, state_size, device=device, dtype=dtype),
            d_H=torch.randn(heads, device=device),
        )
        state = torch.zeros(num_rows, heads, head_dim, state_size, device=device)
        return lambda ops, metadata: ops.ssd_scan(inputs, state_BHPN=state, metadata=metadata)

    return Layer(
        name="ssd_scan",
        size=f"H={heads} P={head_dim} N={state_size}",
        state_elements=heads * head_dim * state_size,
        input_elements=2 * heads * head_dim + 2 * state_size,
        flops_per_token=heads * (2 * CHUNK * head_dim + 4 * head_dim * state_size),
        build=build,
    )


def delta_layer(heads, head_dim):
    def build(num_tokens, num_rows, device, dtype):
        q, k, v = torch.randn(3, num_tokens, heads, head_dim, device=device)
        inputs = DeltaInputs(
            q_THK=(functional.normalize(q, dim=-1) * head_dim**-0.5).to(dtype),
            k_THK=functional.normalize(k, dim=-1).to(dtype),
            v_THV=v.to(dtype),
            log_decay_TH=-torch.rand(num_tokens, heads, device=device),
            beta_TH=torch.rand(num_tokens, heads, device=device),
        )
        state = torch.zeros(num_rows, heads, head_dim, head_dim, device=device)
        return lambda ops, metadata: ops.gated_delta(inputs, state_BHKV=state, metadata=metadata)

    return Layer(
        name="gated_delta",
        size=f"H={heads} K=V={head_dim}",
        state_elements=heads * head_dim * head_dim,
        input_elements=4 * heads * head_dim,
        flops_per_token=heads * (6 * head_dim * head_dim + 4 * CHUNK * head_dim),
        build=build,
    )


GPU_LAYERS = [conv_layer(8192, 4), selective_layer(8192, 16), ssd_layer(128, 64, 128), delta_layer(32, 128)]
CPU_LAYERS = [conv_layer(2048, 4), selective_layer(1024, 16), ssd_layer(24, 64, 128), delta_layer(16, 128)]
GPU_STEPS = [(8192, 1), (256, 256)]  # tokens, rows
CPU_STEPS = [(512, 1), (32, 32)]


def time_on_cpu(layer, num_tokens, num_rows):
    """Tokens a second of every run."""
    device = torch.device("cpu")
    run = layer.build(num_tokens, num_rows, device, torch.float32)
    ops, metadata = TorchStateOps(), step(num_tokens, num_rows, device)
    run(ops, metadata)
    rates = []
    for _ in range(CPU_RUNS):
        begin_s = time.perf_counter()
        run(ops, metadata)
        rates.append(num_tokens / (time.perf_counter() - begin_s))
    params = {"size": layer.size, "tokens": num_tokens, "rows": num_rows}
    return Result(name=layer.name, params=params, unit="tok/s", runs=rates)


def time_on_gpu(layer, num_tokens, num_rows, peak):
    """Microseconds of every run, with the L2 cache flushed before it."""
    from bench_kernels import Case, measure

    device = torch.device("cuda")

    def prepare(device):
        run = layer.build(num_tokens, num_rows, device, torch.bfloat16)
        ops, metadata = TritonStateOps(), step(num_tokens, num_rows, device)
        return lambda: run(ops, metadata)

    case = Case(
        name=layer.name,
        size=f"T={num_tokens} R={num_rows} {layer.size}",
        num_bytes=2 * num_tokens * layer.input_elements + 8 * num_rows * layer.state_elements,
        num_flops=0 if num_tokens == num_rows else num_tokens * layer.flops_per_token,
        prepare=prepare,
    )
    return measure(case, peak, device)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--only", metavar="NAME", help="one recurrence, e.g. gated_delta")
    parser.add_argument("--cpu", metavar="THREADS", type=int, help="time plain torch on that many threads")
    arguments = parser.parse_args()
    if arguments.cpu:
        torch.set_num_threads(arguments.cpu)
        layers = [layer for layer in CPU_LAYERS if arguments.only in (None, layer.name)]
        results = [time_on_cpu(layer, *sizes) for sizes in CPU_STEPS for layer in layers]
    elif torch.cuda.is_available():
        from bench_kernels import PEAKS

        device_name = torch.cuda.get_device_name()
        peak = next((peak for part, peak in PEAKS.items() if part in device_name), None)
        if peak is None:
            sys.exit(f"bench_states: no data sheet figures for {device_name!r}; add them to PEAKS of bench_kernels.py")
        layers = [layer for layer in GPU_LAYERS if arguments.only in (None, layer.name)]
        results = [time_on_gpu(layer, *sizes, peak) for sizes in GPU_STEPS for layer in layers]
    else:
        sys.exit("bench_states: torch sees no GPU here; run it on a machine with one, or with --cpu THREADS")
    report = Report(command="bench_states", results=results)
    report.print_table()
    if arguments.json:
        report.write_json(arguments.json)


if __name__ == "__main__":
    main()
