"""What verifying drafts costs a CPU: python tests/bench/bench_verify.py [--threads 2] [--context 192] [--drafts 3].

SmolLM2-135M (`blockferry fetch-model smollm2-135m-instruct`) in bfloat16 as a worker computes it: one request's step
with 0, 1, 2, ... drafts, which are rows of one token each of the same sequence, with the language-model head and
argmax. All are timed in turn, so that noise hits all; prints the fastest and the median of each in milliseconds, and
its median over that without drafts. Time is wall clock; with --cpu-time (one thread only) the thread's own, which other
processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from bench_cpu import BLOCK_SIZE, MAX_MODEL_LEN, Decoder, time_in_turn

from blockferry.engine.attention.base import AttentionMetadata
from blockferry.engine.config import cache_dir


def make_step(num_drafts: int, context: int) -> AttentionMetadata:
    """One sequence's last tokens, each a row."""
    num_rows, columns = 1 + num_drafts, -(-context // BLOCK_SIZE)
    table = torch.arange(1, columns + 1, dtype=torch.int32).expand(num_rows, columns).contiguous()
    seq_lens = torch.arange(context - num_drafts, context + 1, dtype=torch.int32)
    positions = seq_lens.long() - 1
    return AttentionMetadata(
        num_rows=num_rows,
        num_decode_rows=num_rows,
        num_tokens=num_rows,
        max_query_len=1,
        max_seq_len=context,
        query_start_R1=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens_R=seq_lens,
        block_table_RM=table,
        slot_mapping_T=table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_lens=[1] * num_rows,
        seq_lens=seq_lens.tolist(),
        shares_writes=num_drafts > 0,
    )


@torch.inference_mode()
def main() -> None:
    """Print one line for each number of drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=cache_dir() / "models" / "smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=192, help="tokens of the sequence, up to 2048")
    parser.add_argument("--drafts", type=int, default=3, help="most drafts of a step")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = Decoder(arguments.model, num_blocks=MAX_MODEL_LEN // BLOCK_SIZE + 1)
    steps = []
    for num_drafts in range(arguments.drafts + 1):
        metadata = make_step(num_drafts, arguments.context)
        token_ids = torch.randint(decoder.model.header.vocab_size, (1 + num_drafts,))
        steps.append(partial(decoder.run_step, token_ids, metadata.seq_lens_R.long() - 1, metadata))
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    times = time_in_turn(steps, clock, arguments.repeats)
    for num_drafts, runs in enumerate(times):
        ratio = statistics.median(runs) / statistics.median(times[0])
        print(f"{num_drafts} drafts: {min(runs):6.2f} / {statistics.median(runs):6.2f} ms | {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
