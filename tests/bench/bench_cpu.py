"""What a CPU step costs beyond its linear layers: python tests/bench/bench_cpu.py [--threads 2] [--context 192].

SmolLM2-135M (`blockferry fetch-model smollm2-135m-instruct`) in bfloat16 as a worker computes it, scheduler and
sampling parameters left out. torch's linear layers, ours and the whole step are timed in turn, so that noise hits all;
prints the fastest and the median of each in milliseconds, tokens per second of the median step, and step over linear
layers. Time is wall clock; with --cpu-time (one thread only) the thread's own, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.attention.latent import TorchLatentAttention
from blockferry.engine.config import Device, cache_dir
from blockferry.engine.models.registry import ModelParts, load_model
from blockferry.engine.models.sharding import RankPlace
from blockferry.engine.models.step import nobody_waits
from blockferry.engine.models.torch_state_ops import TorchStateOps
from blockferry.engine.models.weights import Placement
from blockferry.engine.worker.backends import attention_backend, layer_compute, layer_ops
from blockferry.engine.worker.paged_caches import GroupMetadata, LayerPages, PagedCaches, StagePages
from blockferry.engine.worker.parallel import LoneCommunicator

BLOCK_SIZE, MAX_MODEL_LEN = 16, 2048


class Decoder:
    """The model over a pool of its own."""

    def __init__(self, path: Path, num_blocks: int) -> None:
        placement = Placement(dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=MAX_MODEL_LEN)
        parts = ModelParts(ops=layer_ops(Device.CPU), state_ops=TorchStateOps(), communicator=LoneCommunicator())
        self.model = load_model(path, RankPlace(), placement=placement, parts=parts)
        source = self.model.tape_source
        assert source is not None, "a Llama can be taped"
        shape = (num_blocks, source.num_kv_heads, len(source.layers), BLOCK_SIZE, 2 * source.head_dim)
        # NumPy's memory, as a worker's pool: it asks for huge pages, torch's does not
        pool = torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
        pool.normal_(0.0, 0.3)  # pages that were never written would all be one page of zeros
        pages = {number: LayerPages(group=0, tensors=(layer,)) for number, layer in enumerate(pool.unbind(2))}
        stage = StagePages(attention=pages, states={})
        caches = PagedCaches(stage, attention_backend(Device.CPU), TorchLatentAttention())
        self.layers = layer_compute(Device.CPU, self.model, caches, nobody_waits)
        assert self.model.head is not None, "one stage has a head"
        self.linears = [*self.model.layer_linears, self.model.head]
        self.weights = [torch.randn(linear.out_features, linear.in_features).bfloat16() for linear in self.linears]

    def run_dense(self, inputs: list[torch.Tensor]) -> None:
        """torch's own linear layers alone."""
        for weight, x in zip(self.weights, inputs):
            functional.linear(x, weight)

    def run_linears(self, inputs: list[torch.Tensor]) -> None:
        """Our linear layers alone."""
        for linear, x in zip(self.linears, inputs):
            linear(x)

    def run_step(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> np.ndarray:
        """A whole step with its greedy tokens."""
        groups = [GroupMetadata(attention=metadata)]
        hidden = self.layers.forward(self.model.embed(token_ids), positions, groups)
        logits = self.model.logits(hidden[(metadata.query_start_R1[1:] - 1).long()])
        assert logits is not None, "one rank has the logits"
        return logits.float().numpy().argmax(-1)


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
    """Print one line for each shape of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=cache_dir() / "models" / "smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=192, help="tokens of each decode row")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    context = arguments.context
    num_blocks = max(32 * -(-context // BLOCK_SIZE), MAX_MODEL_LEN // BLOCK_SIZE) + 1
    decoder = Decoder(arguments.model, num_blocks)
    shapes = [(1, 1, context), (8, 1, context), (32, 1, context), (1, 512, 512), (4, 128, 128), (1, 512, MAX_MODEL_LEN)]
    print("rows x tokens, context: functional.linear | linear layers | step (min / median ms) | tokens/s | ratios")
    for num_rows, query_len, seq_len in shapes:
        metadata = make_step(num_rows, query_len, seq_len)
        num_tokens = num_rows * query_len
        token_ids = torch.randint(decoder.model.header.vocab_size, (num_tokens,))
        positions = torch.arange(seq_len - query_len, seq_len).repeat(num_rows)
        inputs = [torch.randn(num_tokens, linear.in_features).bfloat16() for linear in decoder.linears]
        inputs[-1] = inputs[-1][:num_rows]
        functions = [
            partial(decoder.run_dense, inputs),
            partial(decoder.run_linears, inputs),
            partial(decoder.run_step, token_ids, positions, metadata),
        ]
        times = time_in_turn(functions, clock, arguments.repeats)
        columns = " | ".join(f"{min(runs):7.2f} /{statistics.median(runs):7.2f}" for runs in times)
        rate = num_tokens / statistics.median(times[2]) * 1e3
        ratios = [pick(times[2]) / pick(times[1]) for pick in (min, statistics.median)]
        shape = f"{num_rows:2d} x {query_len:3d}, {seq_len:4d}"
        print(f"{shape}: {columns} | {rate:6.0f} | {ratios[0]:.2f} / {ratios[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
