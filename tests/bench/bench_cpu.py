"""What a CPU step costs beyond its linear layers: python tests/bench/bench_cpu.py [--threads 2] [--context 192].

Random weights in the shapes of SmolLM2-135M, bfloat16. Linear layers and whole steps are timed in turn, so that noise
hits both; prints the fastest and the median of each, in milliseconds, and the ratio of the medians and minima.
Time is wall clock; with --cpu-time (one thread only) the thread's own, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.attention.cpu import CpuAttention
from blockferry.engine.models.cpu_ops import CpuOps
from blockferry.engine.models.layers import make_linear

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, BLOCK_SIZE = 576, 30, 9, 3, 64, 1536, 49152, 16
SIZES = [HEADS, KV_HEADS, KV_HEADS]


class Decoder:
    """The layers of a Llama of SmolLM2-135M's shape; `parts` chooses what a step computes."""

    def __init__(self, num_blocks: int) -> None:
        def weight(out_features: int, in_features: int) -> torch.Tensor:
            return (torch.randn(out_features, in_features) * in_features**-0.5).bfloat16()

        shapes = [(sum(SIZES) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
        self.weights = [[weight(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.embedding = weight(VOCAB, HIDDEN)
        self.linears = [[make_linear(w) for w in layer] for layer in self.weights]
        self.head = make_linear(self.embedding)
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
        self.cos_sin = torch.rand(8192, HEAD_DIM)
        # NumPy's memory, as a worker's pool: it asks for huge pages, torch's does not
        memory = np.zeros(num_blocks * KV_HEADS * LAYERS * BLOCK_SIZE * 2 * HEAD_DIM, np.int16)
        pool = torch.from_numpy(memory).view(torch.bfloat16)
        pool = pool.view(num_blocks, KV_HEADS, LAYERS, BLOCK_SIZE, 2 * HEAD_DIM)
        pool.normal_()  # pages that were never written would all be one page of zeros
        self.caches = [pool[:, :, layer] for layer in range(LAYERS)]
        self.ops, self.attention = CpuOps(), CpuAttention()

    def run_dense(self, x: torch.Tensor, y: torch.Tensor, num_logits: int) -> None:
        """torch's own linear layers alone."""
        for qkv, out, gate_up, down in self.weights:
            for w, value in ((qkv, x), (out, x), (gate_up, x), (down, y)):
                functional.linear(value, w)
        functional.linear(x[:num_logits], self.embedding)

    def run_linears(self, x: torch.Tensor, y: torch.Tensor, num_logits: int) -> None:
        """Our linear layers alone."""
        for qkv, out, gate_up, down in self.linears:
            qkv(x), out(x), gate_up(x), down(y)
        self.head(x[:num_logits])

    def run_step(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """A whole step, greedy token included."""
        ops = self.ops
        x, residual = functional.embedding(token_ids, self.embedding), None
        for (qkv, out, gate_up, down), cache in zip(self.linears, self.caches):
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            q, k, v = qkv(x).view(len(x), -1, HEAD_DIM).split_with_sizes(SIZES, 1)
            ops.rotate(q, k, self.cos_sin, positions)
            x = out(self.attention.forward(q, k, v, kv_cache=cache, metadata=metadata, scale=0.125).flatten(1))
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            x = down(ops.silu_and_mul(gate_up(x)))
        last = (metadata.query_start_R1[1:] - 1).long()
        x, residual = ops.add_rms_norm(x[last], residual[last], self.norm, 1e-5)
        return torch.from_numpy(self.head(x).float().numpy().argmax(-1))


def make_step(num_rows: int, query_len: int, seq_len: int) -> AttentionMetadata:
    """Rows of one shape with blocks scattered over the pool."""
    columns = -(-seq_len // BLOCK_SIZE)
    table = (torch.randperm(num_rows * columns, dtype=torch.int32) + 1).view(num_rows, columns)
    positions = torch.arange(seq_len - query_len, seq_len)
    slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(
        num_rows=num_rows,
        num_decode_rows=num_rows if query_len == 1 else 0,
        num_tokens=num_rows * query_len,
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_start_R1=torch.arange(num_rows + 1, dtype=torch.int32) * query_len,
        seq_lens_R=torch.full((num_rows,), seq_len, dtype=torch.int32),
        block_table_RM=table,
        slot_mapping_T=slots.flatten(),
        query_lens=[query_len] * num_rows,
        seq_lens=[seq_len] * num_rows,
    )


def time_in_turn(functions: list[Callable[[], object]], clock: Callable[[], float], repeats: int) -> list[list[float]]:
    """Milliseconds of each function, called one after the other `repeats` times."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, runs in zip(functions, times):
            started = clock()
            function()
            runs.append((clock() - started) * 1e3)
    return [runs[1:] for runs in times]


@torch.inference_mode()
def main() -> None:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=192, help="tokens of each decode row")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    context = arguments.context
    decoder = Decoder(num_blocks=max(32 * -(-context // BLOCK_SIZE), 2048 // BLOCK_SIZE) + 1)
    shapes = [(1, 1, context), (8, 1, context), (32, 1, context), (1, 512, 512), (4, 128, 128), (1, 512, 2048)]
    print("rows x tokens, context: functional.linear | linear layers | step (min/median ms) | step / linear layers")
    for num_rows, query_len, seq_len in shapes:
        metadata = make_step(num_rows, query_len, seq_len)
        num_tokens = num_rows * query_len
        token_ids = torch.randint(VOCAB, (num_tokens,))
        positions = torch.arange(seq_len - query_len, seq_len).repeat(num_rows)
        x, y = (torch.randn(num_tokens, width).bfloat16() for width in (HIDDEN, INTERMEDIATE))
        functions = [
            partial(decoder.run_dense, x, y, num_rows),
            partial(decoder.run_linears, x, y, num_rows),
            partial(decoder.run_step, token_ids, positions, metadata),
        ]
        times = time_in_turn(functions, clock, arguments.repeats)
        columns = [f"{min(runs):7.2f} /{statistics.median(runs):7.2f}" for runs in times]
        ratios = [pick(times[2]) / pick(times[1]) for pick in (min, statistics.median)]
        shape = f"{num_rows:2d} x {query_len:3d}, {seq_len:4d}"
        print(f"{shape}: {' | '.join(columns)} | {ratios[0]:.2f} / {ratios[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
