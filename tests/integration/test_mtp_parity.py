"""With modules that draft, every family writes what transformers writes, whoever computes it and wherever it came from.

Their modules are right about a part of what they draft, so that drafts are accepted and rejected in every run.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_engine import EngineOptions, LocalEngine, nan_memory
from support.local_pair import DECODE, PREFILL, LocalPair
from support.local_tiers import TieredEngine
from support.marks import full
from support.parity_cases import GROWING, WORKLOAD, preempting_pool, smallest_pool
from support.thread_ranks import ThreadRanks
from support.tiny_families import one_thread
from support.tiny_mtp import Likeness, MtpCheckpoint, build_mtp

from blockferry.connectors.base import Overlap, TransferMode
from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.kv.plan import Planner
from blockferry.engine.scheduler.instance import Instance
from blockferry.engine.scheduler.speculation import SpeculationCounters
from blockferry.engine.worker.cache_scales import scales_in

pytestmark = pytest.mark.slow
OPTIONS = EngineOptions(max_model_len=128)


each_family = pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", *full("llama", "qwen3_5")])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def drafting(
    family: str, folder: Path, *, num_tokens: int = 3, num_modules: int = 1, **changes: object
) -> tuple[MtpCheckpoint, EngineOptions]:
    checkpoint = build_mtp(family, folder, num_modules=num_modules, likeness=Likeness.SOME)
    options = dataclasses.replace(OPTIONS, speculation=checkpoint.speculation(num_tokens), **changes)  # type: ignore[arg-type]  # names and types are the tests'
    return checkpoint, options


def start(checkpoint: MtpCheckpoint, options: EngineOptions) -> tuple[LocalEngine, ThreadRanks]:
    ranks = ThreadRanks(checkpoint.path, options)
    plan = options.plan(checkpoint.path)
    ranks.each(lambda worker: worker.init_cache(plan, nan_memory))
    return LocalEngine(checkpoint.path, options, ranks), ranks


def counters(instance: Instance) -> SpeculationCounters:
    counted = instance.speculation.counters()
    assert counted is not None
    return counted


def assert_mixed(checkpoint: MtpCheckpoint, options: EngineOptions) -> LocalEngine:
    """Twice the same workload, the second time from a warm cache."""
    engine, ranks = start(checkpoint, options)
    try:
        for _ in range(2):
            assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(checkpoint.path)
    finally:
        ranks.close()
    counted = counters(engine.instance)
    assert 0 < counted.num_accepted < counted.num_drafted
    return engine


@pytest.mark.full
@each_family
@pytest.mark.parametrize("num_modules", [1, 2])
def test_mixed_instance_writes_the_same_cold_and_warm(family: str, num_modules: int, folder: Path) -> None:
    engine = assert_mixed(*drafting(family, folder, num_modules=num_modules))
    assert engine.kv.stats().num_hit_tokens > 0
    assert any(group.is_draft for group in engine.plan.ledger.groups)


def looking_up(options: EngineOptions, *, is_adaptive: bool) -> EngineOptions:
    """N-grams first, modules where nothing recurs."""
    assert options.speculation is not None
    speculation = dataclasses.replace(options.speculation, looks_up=True, min_ngram=2, is_adaptive=is_adaptive)
    return dataclasses.replace(options, speculation=speculation)


@pytest.mark.parametrize("family", ["llama", *full("deepseek_v3", "qwen3_next", "qwen3_5")])
@pytest.mark.parametrize("num_modules", [1, *full(2)])
def test_lookup_and_likely_drafts_change_nothing_on_any_number_of_ranks(
    family: str, num_modules: int, folder: Path
) -> None:
    checkpoint, options = drafting(family, folder, num_modules=num_modules, num_tokens=4)
    options = looking_up(options, is_adaptive=True)
    alone = assert_mixed(checkpoint, options)
    shared = assert_mixed(checkpoint, dataclasses.replace(options, tp_size=2))
    assert counters(shared.instance) == counters(alone.instance)


@each_family
@pytest.mark.parametrize("shape", [{"tp_size": 2}, *full({"pp_size": 2}, {"tp_size": 2, "pp_size": 2})])
def test_ranks_write_the_same_and_draft_what_one_rank_drafts(family: str, shape: dict[str, int], folder: Path) -> None:
    checkpoint, options = drafting(family, folder)
    alone = assert_mixed(checkpoint, options)
    shared = assert_mixed(checkpoint, dataclasses.replace(options, **shape))
    assert counters(shared.instance) == counters(alone.instance)


PUSH, PULL = TransferMode
TRANSFERS = [(PUSH, Overlap.NONE)]
MORE_TRANSFERS = [(PUSH, Overlap.CHUNKS), (PUSH, Overlap.LAYERS), (PULL, Overlap.NONE), (PULL, Overlap.CHUNKS)]


@each_family
@pytest.mark.parametrize("transfer", [*TRANSFERS, *full(*MORE_TRANSFERS)], ids="-".join)
@pytest.mark.parametrize("looks_up", [False, *full(True)])
def test_handed_over_sequences_draft_what_they_would_have_drafted(
    family: str, transfer: tuple[TransferMode, Overlap], looks_up: bool, folder: Path
) -> None:
    mode, overlap = transfer
    checkpoint, options = drafting(family, folder, enable_caching=False)
    if looks_up:
        options = looking_up(options, is_adaptive=False)
    engine, ranks = start(checkpoint, options)
    pair = LocalPair(checkpoint.path, options, mode=mode, overlap=overlap)
    try:
        for prompt, expected in zip(WORKLOAD.prompts, WORKLOAD.expected(checkpoint.path), strict=True):
            assert engine.generate([prompt], WORKLOAD.num_output) == [expected]
            assert pair.generate([prompt], WORKLOAD.num_output) == [expected]
    finally:
        pair.close()
        ranks.close()
    assert pair.num_ferried_bytes > 0
    assert not pair.failures
    on_decode = counters(pair.instances[DECODE])
    assert on_decode.num_accepted > 0
    assert (on_decode.drafted_per_position, on_decode.accepted_per_position) == (
        counters(engine.instance).drafted_per_position,
        counters(engine.instance).accepted_per_position,
    )
    assert counters(pair.instances[PREFILL]).num_drafted == 0


@pytest.mark.full
@each_family
def test_preempted_sequences_write_the_same(family: str, folder: Path) -> None:
    checkpoint, options = drafting(family, folder)
    engine, ranks = start(checkpoint, preempting_pool(options, checkpoint.path))
    try:
        outputs = engine.generate(GROWING.prompts, GROWING.num_output)
    finally:
        ranks.close()
    assert outputs == GROWING.expected(checkpoint.path)
    assert engine.instance.num_preemptions
    assert counters(engine.instance).num_accepted > 0


@pytest.mark.full
@each_family
@pytest.mark.parametrize("shapes", [({}, {"tp_size": 2}), ({"pp_size": 2}, {}), ({"tp_size": 2}, {"pp_size": 2})])
def test_sides_of_unequal_shape_draft_for_each_other(
    family: str, shapes: tuple[dict[str, int], dict[str, int]], folder: Path
) -> None:
    checkpoint, options = drafting(family, folder)
    prefill, decode = (dataclasses.replace(options, **shape) for shape in shapes)  # type: ignore[arg-type]  # sizes
    pair = LocalPair(checkpoint.path, prefill, decode)
    try:
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(checkpoint.path)
    finally:
        pair.close()
    assert not pair.failures
    assert counters(pair.instances[DECODE]).num_accepted > 0


@pytest.mark.full
@each_family
def test_warm_caches_on_both_sides_change_nothing(family: str, folder: Path) -> None:
    checkpoint, options = drafting(family, folder)
    pair = LocalPair(checkpoint.path, options)
    try:
        for _ in range(2):
            assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(checkpoint.path)
    finally:
        pair.close()
    assert pair.ledgers[PREFILL].stats().num_hit_tokens > 0
    assert counters(pair.instances[DECODE]).num_accepted > 0


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_modules_of_an_fp8_cache_have_scales_of_their_own(family: str, folder: Path) -> None:
    checkpoint, options = drafting(family, folder, cache_dtype=CacheDType.FP8)
    plain = dataclasses.replace(options, speculation=None)
    outputs, scales = [], []
    for one in (options, plain):
        engine, ranks = start(checkpoint, one)
        try:
            outputs.append(engine.generate(WORKLOAD.prompts, WORKLOAD.num_output))
            scales.append(scales_in(ranks.workers[0].layouts()))
        finally:
            ranks.close()
    assert outputs[0] == outputs[1]
    with_modules, without = ([tuple(one.k_K.tolist()) for one in of.values()] for of in scales)
    assert with_modules[:-1] == without
    assert with_modules[-1] != (1.0,)


@pytest.mark.full
@each_family
@pytest.mark.parametrize("planner", [Planner.UNIFORM, Planner.SLAB])
def test_blocks_from_memory_bring_their_modules_keys_along(
    family: str, planner: Planner, folder: Path, tmp_path: Path
) -> None:
    checkpoint, options = drafting(family, folder, planner=planner)
    engine = TieredEngine(checkpoint.path, smallest_pool(options, checkpoint.path), folder=tmp_path)
    try:
        for _ in range(3):
            assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(checkpoint.path)
            engine.settle()
    finally:
        engine.close()
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    assert engine.tiers.status()["num_loaded_tokens"] > 0
    assert counters(engine.instance).num_accepted > 0
