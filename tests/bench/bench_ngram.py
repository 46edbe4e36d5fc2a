"""Time n-gram lookup: the drafts of a step of so many rows, each of so many tokens.

    python tests/bench/bench_ngram.py [--rows 1024] [--tokens 2000] [--drafts 3] [--threads 1]

Prints the median of a call for text without recurrences, where every row is searched to its beginning, for a Markov
text with a large vocabulary, and for rows that go in circles, where the search ends at once; microseconds.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from blockferry.engine.config import cache_dir
from blockferry.kernels.cpu_launch import Launcher, kernel_store
from blockferry.kernels.cpu_ngram import NgramLookup

NUM_ROUNDS = 30


def texts(num_rows, num_tokens):
    generator = np.random.default_rng(1)
    words = generator.zipf(1.3, (num_rows, num_tokens)) % 50000
    return {
        "no recurrence": np.tile(np.arange(num_tokens), (num_rows, 1)),
        "Zipf's words": words,
        "circles": np.tile(np.arange(num_tokens) % 16, (num_rows, 1)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    look_up = NgramLookup(Launcher(kernel_store(cache_dir() / "kernels")))
    rows = np.arange(options.rows, dtype=np.int32)
    num_tokens = np.full(options.rows, options.tokens, np.int32)
    for name, tokens in texts(options.rows, options.tokens).items():
        tokens, times = tokens.astype(np.int32), []
        for _ in range(NUM_ROUNDS):
            started = time.perf_counter()
            drafts = look_up(tokens, rows, num_tokens, min_ngram=2, max_ngram=4, num_drafts=options.drafts)
            times.append(time.perf_counter() - started)
        share = (drafts[:, 0] >= 0).mean()
        print(f"{name:15} {statistics.median(times) * 1e6:8.0f} us   {share:4.0%} of rows have drafts")


if __name__ == "__main__":
    main()
