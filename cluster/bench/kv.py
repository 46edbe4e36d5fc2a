"""Times the KV ledger alone: decode steps, prefill, churn under eviction, start and size of a large pool.

Everything is synthetic and in this process; no model, no Ray. Comparable to a block manager's own benchmarks. Groups
come in three mixes: full attention alone; full and five sliding windows; full, sliding and recurrent state.

    decode_step     us of one step: allocate_decode + everything that workers must hear + cache_filled, for all rows;
                    rows are beyond their windows, so that every block that fills lets one go
    prefill         ms of one prompt: hash, look up, allocate and cache; `shared` is the cached share of it
    churn           us per request: look up, allocate, free, in a pool that must evict for every one
    pool_start      s to make a ledger
    pool_bytes      bytes of a ledger all of whose blocks are cached
    scheduler_step  see scheduler_step.py
    route           see route_choice.py
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping

import numpy as np

from blockferry.cluster.bench import route_choice, scheduler_step
from blockferry.cluster.bench.report import Report, Result
from blockferry.engine.kv.assembly import LedgerOptions
from blockferry.engine.kv.manager import AllocateOptions, KVCacheManager
from blockferry.engine.kv.reach import KVContent, WindowReach
from blockferry.engine.kv.spec import AttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, MambaSpec
from blockferry.engine.request import Int32Array
from blockferry.engine.rows import RowTable

BLOCK_SIZE = 16
WINDOW = 128  # tokens of a sliding window: short, so that the measured rows are beyond theirs
VOCAB_SIZE = 49152


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvBenchConfig:
    """What to measure; the defaults are the sizes that published figures use."""

    decode_rows: tuple[int, ...] = (256, 1024, 8192)
    scheduler_rows: tuple[int, ...] = (256, 1024)
    mixes: tuple[str, ...] = ("full", "full+5sliding", "full+sliding+mamba")
    prefill_tokens: tuple[int, ...] = (4096, 32768)
    prefill_shares: tuple[float, ...] = (0.0, 0.5, 0.9)  # cached share of the prompt
    route_tokens: tuple[int, ...] = (1000, 32000)  # of a prompt that is routed
    num_churn_requests: int = 2000
    num_pool_blocks: int = 1 << 20
    num_runs: int = 5
    seed: int = 0


def run_kv_bench(config: KvBenchConfig | None = None, on_start: Callable[[str], None] = lambda _: None) -> Report:
    """Measure everything; on_start is told each measurement's name as it begins. About two minutes.

    Every figure gets one run per round, so that seconds in which the machine is slow colour a run of each, not all
    runs of one.
    """
    config = config or KvBenchConfig()
    cases = _cases(dataclasses.replace(config, num_runs=1))
    rounds: list[list[Result]] = []
    for number in range(1, config.num_runs + 1):
        rounds.append([])
        for name, measure in cases:
            on_start(f"round {number} of {config.num_runs}: {name}")
            rounds[-1] += measure()
    results = [
        dataclasses.replace(same[0], runs=[run for result in same for run in result.runs])
        for same in zip(*rounds, strict=True)
    ]
    on_start("pool_bytes")
    results.append(_measure_pool_bytes(config))
    return Report(command="bench kv", results=results)


def _cases(config: KvBenchConfig) -> list[tuple[str, Callable[[], list[Result]]]]:
    """What is measured in every round, each with its name."""
    cases: list[tuple[str, Callable[[], list[Result]]]] = []
    for mix in config.mixes:
        for num_rows in config.decode_rows:
            measure_decode = functools.partial(_measure_decode, mix, num_rows, config)
            cases.append((f"decode_step, {mix}, {num_rows} rows", measure_decode))
    if config.scheduler_rows:
        cases.append(("scheduler_step", lambda: scheduler_step.measure(config.scheduler_rows, num_runs=1)))
    cases.append(("route", lambda: route_choice.measure(config.route_tokens, num_runs=1)))
    for mix in config.mixes:
        for num_tokens in config.prefill_tokens:
            for shared in config.prefill_shares:
                measure_prefill = functools.partial(_measure_prefill, mix, num_tokens, shared, config)
                cases.append((f"prefill, {mix}, {num_tokens} tokens, {shared:.0%} shared", measure_prefill))
        cases.append((f"churn, {mix}", functools.partial(_measure_churn, mix, config)))
    cases.append(("pool_start", functools.partial(_measure_pool_start, config)))
    return cases


_CONTENT = KVContent(num_kv_heads=8, head_dim=128, dtype_bytes=2)
_FULL = AttentionSpec(block_size=BLOCK_SIZE, content=_CONTENT)
_SLIDING = AttentionSpec(block_size=BLOCK_SIZE, content=_CONTENT, reach=WindowReach(window=WINDOW))
_STATES = MambaSpec(block_size=BLOCK_SIZE, shapes=((16, 128),), dtype_bytes=(4,))
_MIXES: Mapping[str, tuple[KVCacheSpec, ...]] = {
    "full": (_FULL,),
    "full+5sliding": (_FULL, *(_SLIDING,) * 5),
    "full+sliding+mamba": (_FULL, _SLIDING, _STATES),
}


class _Ledger:
    """A ledger and the rows it indexes, driven as a scheduler would."""

    def __init__(self, mix: str, *, num_blocks: int, max_rows: int, max_model_len: int) -> None:
        """num_blocks is per group of the mix."""
        self.rows = RowTable(max_rows=max_rows, max_model_len=max_model_len)
        groups = tuple(KVCacheGroup(layer_ids=(number,), spec=spec) for number, spec in enumerate(_MIXES[mix]))
        config = KVCacheConfig(num_blocks=num_blocks * len(groups), groups=groups, hash_block_size=BLOCK_SIZE)
        self.kv = KVCacheManager(config, self.rows, options=LedgerOptions(watermark=0.0))

    def admit(self, row: int, token_ids: Int32Array) -> None:
        """Look a prompt up, allocate and cache it whole, in a step of its own."""
        self.kv.start_step()
        hashes = self.kv.hash_prompt(token_ids)
        hit = self.kv.lookup(hashes, len(token_ids))
        self.rows.assign(row, token_ids, num_prompt_tokens=len(token_ids))
        self.kv.start_row(row, hashes)
        fits = self.kv.allocate(row, len(token_ids) - hit.num_tokens, AllocateOptions(hit=hit))
        assert fits, (row, len(token_ids), self.kv.num_free_blocks)
        self.rows.num_computed_tokens[row] = len(token_ids)

    def tell_workers(self) -> None:
        """Take everything that a step's plan would carry."""
        self.kv.take_deltas()
        self.kv.take_copies()
        self.kv.take_zero()

    def end(self, row: int) -> None:
        """Free a row, blocks staying findable."""
        self.kv.free(row)
        self.rows.clear(row)


def _measure_decode(mix: str, num_rows: int, config: KvBenchConfig) -> list[Result]:
    """Rows are spread evenly over the block, so that each step fills and takes num_rows / BLOCK_SIZE blocks.

    All steps are alike, so a run is the median step: other processes' turns do not count.
    """
    generator = np.random.default_rng(config.seed)
    num_steps = 4 * BLOCK_SIZE  # per run
    max_model_len = WINDOW + 4 * BLOCK_SIZE + num_steps * (config.num_runs + 1)
    num_blocks = num_rows * (max_model_len // BLOCK_SIZE + 1) + 1
    ledger = _Ledger(mix, num_blocks=num_blocks, max_rows=num_rows, max_model_len=max_model_len)
    for row in range(num_rows):
        ledger.admit(row, _tokens(generator, WINDOW + BLOCK_SIZE + row % BLOCK_SIZE))
    rows = np.arange(num_rows, dtype=np.int32)
    runs = []
    for _ in range(config.num_runs + 1):
        steps_s = []
        for _ in range(num_steps):
            sampled = _tokens(generator, num_rows)
            started_s = time.perf_counter()
            ledger.kv.start_step()
            num_served = ledger.kv.allocate_decode(rows)
            ledger.tell_workers()
            planned_s = time.perf_counter() - started_s
            assert num_served == num_rows, (num_served, num_rows)
            ledger.rows.num_computed_tokens[rows] += 1
            ledger.rows.append(rows, sampled)
            started_s = time.perf_counter()
            ledger.kv.cache_filled(rows)
            steps_s.append(planned_s + time.perf_counter() - started_s)
        runs.append(1e6 * statistics.median(steps_s))
    params = {"rows": num_rows, **_of_mix(mix)}
    return [Result(name="decode_step", params=params, unit="us", runs=runs[1:])]  # the first one warms up


def _measure_prefill(mix: str, num_tokens: int, shared: float, config: KvBenchConfig) -> list[Result]:
    generator = np.random.default_rng(config.seed)
    num_blocks = (config.num_runs + 2) * (num_tokens // BLOCK_SIZE + 1)
    ledger = _Ledger(mix, num_blocks=num_blocks, max_rows=1, max_model_len=num_tokens)
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
    params = {"tokens": num_tokens, "shared": shared, **_of_mix(mix)}
    return [Result(name="prefill", params=params, unit="ms", runs=runs[1:])]


def _measure_churn(mix: str, config: KvBenchConfig) -> list[Result]:
    """Requests of 16 to 2,048 tokens, half of them with one of 8 prefixes, 16 at a time, in 4,096 blocks per group."""
    generator = np.random.default_rng(config.seed)
    num_rows, num_blocks, max_tokens = 16, 4096, 2048
    ledger = _Ledger(mix, num_blocks=num_blocks, max_rows=num_rows, max_model_len=max_tokens)
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
            ledger.tell_workers()
        runs.append(1e6 * (time.perf_counter() - started_s) / len(prompts))
    params = {"blocks": num_blocks, "requests": config.num_churn_requests, **_of_mix(mix)}
    return [Result(name="churn", params=params, unit="us", runs=runs[1:])]


def _measure_pool_start(config: KvBenchConfig) -> list[Result]:
    runs = []
    for _ in range(config.num_runs):
        gc.collect()
        started_s = time.perf_counter()
        _Ledger("full", num_blocks=config.num_pool_blocks, max_rows=1024, max_model_len=32768)
        runs.append(time.perf_counter() - started_s)
    return [Result(name="pool_start", params={"blocks": config.num_pool_blocks, "groups": 1}, unit="s", runs=runs)]


def _measure_pool_bytes(config: KvBenchConfig) -> Result:
    """Memory that Python and NumPy allocate for a ledger whose every block is cached and free."""
    generator = np.random.default_rng(config.seed)
    num_tokens = 32768
    gc.collect()
    tracemalloc.start()
    try:
        ledger = _Ledger("full", num_blocks=config.num_pool_blocks, max_rows=1, max_model_len=num_tokens)
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


def _of_mix(mix: str) -> dict[str, int | str]:
    return {"groups": len(_MIXES[mix]), "mix": mix, "block_size": BLOCK_SIZE}
