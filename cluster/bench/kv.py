"""Times the KV ledger alone: decode steps, prefill, churn under eviction, start and size of a large pool.

Everything is synthetic and in this process; no model, no Ray. Comparable to a block manager's own benchmarks.

    decode_step     us of one step: allocate_decode + take_deltas + cache_filled for all rows
    prefill         ms of one prompt: hash, look up, allocate and cache; `shared` is the cached share of it
    churn           us per request: look up, allocate, free, in a pool that must evict for every one
    pool_start      s to make a ledger
    pool_bytes      bytes of a ledger all of whose blocks are cached
    scheduler_step  see scheduler_step.py
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from blockferry.cluster.bench import scheduler_step
from blockferry.cluster.bench.report import Report, Result
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import KVContent
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

BLOCK_SIZE = 16
VOCAB_SIZE = 49152


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvBenchConfig:
    """What to measure; the defaults are the sizes that published figures use."""

    decode_rows: tuple[int, ...] = (256, 1024, 8192)
    scheduler_rows: tuple[int, ...] = (256, 1024)
    num_prefill_tokens: int = 32768
    prefill_shares: tuple[float, ...] = (0.0, 0.5, 1.0)  # cached share of the prompt
    num_churn_requests: int = 2000
    num_pool_blocks: int = 1 << 20
    num_runs: int = 5
    seed: int = 0


def run_kv_bench(config: KvBenchConfig | None = None, on_start: Callable[[str], None] = lambda _: None) -> Report:
    """Measure everything; on_start is told each result's name as its measurement begins. About 30 s."""
    config = config or KvBenchConfig()
    results: list[Result] = []
    for num_rows in config.decode_rows:
        on_start(f"decode_step, {num_rows} rows")
        results.append(_measure_decode(num_rows, config))
    if config.scheduler_rows:
        on_start("scheduler_step")
        results += scheduler_step.measure(config.scheduler_rows, num_runs=config.num_runs)
    for shared in config.prefill_shares:
        on_start(f"prefill, {shared:.0%} shared")
        results.append(_measure_prefill(shared, config))
    on_start("churn")
    results.append(_measure_churn(config))
    on_start("pool_start")
    results.append(_measure_pool_start(config))
    on_start("pool_bytes")
    results.append(_measure_pool_bytes(config))
    return Report(command="bench kv", results=results)


class _Ledger:
    """A ledger and the rows it indexes, driven as a scheduler would."""

    def __init__(self, *, num_blocks: int, max_rows: int, max_model_len: int) -> None:
        self.rows = RowTable(max_rows=max_rows, max_model_len=max_model_len)
        spec = AttentionSpec(block_size=BLOCK_SIZE, content=KVContent(num_kv_heads=8, head_dim=128, dtype_bytes=2))
        group = KVCacheGroup(layer_ids=(0,), spec=spec)
        config = KVCacheConfig(num_blocks=num_blocks, groups=(group,), hash_block_size=BLOCK_SIZE)
        self.kv = KVCacheManager(config, self.rows, options=LedgerOptions(watermark=0.0))

    def admit(self, row: int, token_ids: Int32Array) -> None:
        """Look a prompt up, allocate and cache it whole."""
        hashes = self.kv.hash_prompt(token_ids)
        hit = self.kv.lookup(hashes, len(token_ids))
        self.rows.assign(row, token_ids, num_prompt_tokens=len(token_ids))
        self.kv.start_row(row, hashes)
        fits = self.kv.allocate(row, len(token_ids) - hit.num_tokens, AllocateOptions(hit=hit))
        assert fits, (row, len(token_ids), self.kv.num_free_blocks)
        self.rows.num_computed_tokens[row] = len(token_ids)

    def end(self, row: int) -> None:
        """Free a row, blocks staying findable."""
        self.kv.free(row)
        self.rows.clear(row)


def _measure_decode(num_rows: int, config: KvBenchConfig) -> Result:
    """Rows are spread evenly over the block, so that each step fills and takes num_rows / BLOCK_SIZE blocks.

    All steps are alike, so a run is the median step: other processes' turns do not count.
    """
    generator = np.random.default_rng(config.seed)
    num_steps = 4 * BLOCK_SIZE  # per run
    max_model_len = 8 * BLOCK_SIZE + num_steps * (config.num_runs + 1)
    num_blocks = num_rows * (max_model_len // BLOCK_SIZE + 1) + 1
    ledger = _Ledger(num_blocks=num_blocks, max_rows=num_rows, max_model_len=max_model_len)
    for row in range(num_rows):
        ledger.admit(row, _tokens(generator, 4 * BLOCK_SIZE + row % BLOCK_SIZE))
    rows = np.arange(num_rows, dtype=np.int32)
    runs = []
    for _ in range(config.num_runs + 1):
        steps_s = []
        for _ in range(num_steps):
            sampled = _tokens(generator, num_rows)
            started_s = time.perf_counter()
            num_served = ledger.kv.allocate_decode(rows)
            ledger.kv.take_deltas()
            planned_s = time.perf_counter() - started_s
            assert num_served == num_rows, (num_served, num_rows)
            ledger.rows.num_computed_tokens[rows] += 1
            ledger.rows.append(rows, sampled)
            started_s = time.perf_counter()
            ledger.kv.cache_filled(rows)
            steps_s.append(planned_s + time.perf_counter() - started_s)
        runs.append(1e6 * statistics.median(steps_s))
    params = {"rows": num_rows, "groups": 1, "block_size": BLOCK_SIZE}
    return Result(name="decode_step", params=params, unit="us", runs=runs[1:])  # the first one warms up


def _measure_prefill(shared: float, config: KvBenchConfig) -> Result:
    generator = np.random.default_rng(config.seed)
    num_tokens = config.num_prefill_tokens
    num_blocks = (config.num_runs + 2) * (num_tokens // BLOCK_SIZE + 1)
    ledger = _Ledger(num_blocks=num_blocks, max_rows=1, max_model_len=num_tokens)
    prefix = _tokens(generator, int(shared * num_tokens))
    if len(prefix):
        ledger.admit(0, prefix)
        ledger.end(0)
    runs = []
    for _ in range(config.num_runs + 1):
        prompt = np.concatenate([prefix, _tokens(generator, num_tokens - len(prefix))])
        started_s = time.perf_counter()
        ledger.admit(0, prompt)
        runs.append(1e3 * (time.perf_counter() - started_s))
        ledger.end(0)
    params = {"tokens": num_tokens, "shared": shared, "groups": 1, "block_size": BLOCK_SIZE}
    return Result(name="prefill", params=params, unit="ms", runs=runs[1:])


def _measure_churn(config: KvBenchConfig) -> Result:
    """Requests of 16 to 2,048 tokens, half of them with one of 8 prefixes, 16 at a time, in 4,096 blocks."""
    generator = np.random.default_rng(config.seed)
    num_rows, num_blocks, max_tokens = 16, 4096, 2048
    ledger = _Ledger(num_blocks=num_blocks, max_rows=num_rows, max_model_len=max_tokens)
    prefixes = [_tokens(generator, max_tokens // 2) for _ in range(8)]
    runs = []
    for run in range(config.num_runs + 1):
        prompts = []
        for index in range(config.num_churn_requests):
            prompt = _tokens(generator, int(generator.integers(16, max_tokens)))
            if index % 2:
                num_shared = min(len(prompt), max_tokens // 2)
                prompt[:num_shared] = prefixes[index // 2 % 8][:num_shared]
            prompts.append(prompt)
        started_s = time.perf_counter()
        for index, prompt in enumerate(prompts):
            if run or index >= num_rows:
                ledger.end(index % num_rows)
            ledger.admit(index % num_rows, prompt)
            ledger.kv.take_deltas()
        runs.append(1e6 * (time.perf_counter() - started_s) / len(prompts))
    params = {"blocks": num_blocks, "requests": config.num_churn_requests, "groups": 1, "block_size": BLOCK_SIZE}
    return Result(name="churn", params=params, unit="us", runs=runs[1:])


def _measure_pool_start(config: KvBenchConfig) -> Result:
    runs = []
    for _ in range(config.num_runs):
        gc.collect()
        started_s = time.perf_counter()
        _Ledger(num_blocks=config.num_pool_blocks, max_rows=1024, max_model_len=32768)
        runs.append(time.perf_counter() - started_s)
    return Result(name="pool_start", params={"blocks": config.num_pool_blocks, "groups": 1}, unit="s", runs=runs)


def _measure_pool_bytes(config: KvBenchConfig) -> Result:
    """Memory that Python and NumPy allocate for a ledger whose every block is cached and free."""
    generator = np.random.default_rng(config.seed)
    num_tokens = 32768
    gc.collect()
    tracemalloc.start()
    try:
        ledger = _Ledger(num_blocks=config.num_pool_blocks, max_rows=1, max_model_len=num_tokens)
        while ledger.kv.stats().num_keys < ledger.kv.num_usable_blocks - num_tokens // BLOCK_SIZE:
            ledger.admit(0, _tokens(generator, num_tokens))
            ledger.end(0)
        ledger.kv.take_deltas()
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    params = {"blocks": config.num_pool_blocks, "groups": 1, "block_size": BLOCK_SIZE}
    return Result(name="pool_bytes", params=params, unit="bytes", runs=[float(num_bytes)])


def _tokens(generator: np.random.Generator, num_tokens: int) -> Int32Array:
    return generator.integers(0, VOCAB_SIZE, num_tokens, np.int32)
