"""Prompts served again from memory and disk outside of a pool too small for them give transformers' tokens."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.known_drafts import KnownDrafts
from support.local_engine import EngineOptions
from support.local_tiers import TieredEngine, TierSizes
from support.parity_cases import NAMES, WORKLOAD, Workload, smallest_pool
from support.parity_table import RecordCell
from support.speculation_cases import MARKS, ngram
from support.tiny_families import FAMILIES, build

from blockferry.engine.kv.model_layers import CacheDType
from blockferry.engine.kv.plan import Planner
from blockferry.engine.kv.tier_policies import PolicyName
from blockferry.engine.scheduler.offload_stores import StoreWhen
from blockferry.engine.scheduler.offloading import OffloadOptions

pytestmark = pytest.mark.slow
FEW = ("llama", "gemma3_text", "deepseek_v3", "qwen3_next")


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[object]:
    engines: list[TieredEngine] = []

    def make(path: Path, options: EngineOptions, **changes: object) -> TieredEngine:
        folder = tmp_path / str(len(engines))
        folder.mkdir()
        engines.append(TieredEngine(path, options, folder=folder, **changes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def serve_twice_and_more(engine: TieredEngine, path: Path) -> None:
    for _ in range(3):
        assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == WORKLOAD.expected(path)
        engine.settle()
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


@pytest.mark.parametrize("planner", [Planner.UNIFORM, Planner.SLAB])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_same_with_blocks_from_memory(
    name: str, planner: Planner, families_folder: Path, open_engine, record_cell: RecordCell
) -> None:
    path = build(FAMILIES[name], families_folder)
    options = smallest_pool(EngineOptions(max_model_len=128, planner=planner), path)
    engine = open_engine(path, options)
    serve_twice_and_more(engine, path)
    # the smallest pool of some plans holds all of it
    is_ample = engine.kv.stats().num_evicted_blocks < engine.kv.num_usable_blocks
    assert is_ample or engine.tiers.status()["num_loaded_tokens"] > 0
    if not is_ample:
        record_cell(name, "offload")


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("name", FEW)
def test_tokens_are_the_same_with_blocks_from_disk(
    name: str, policy: PolicyName, families_folder: Path, open_engine
) -> None:
    path = build(FAMILIES[name], families_folder)
    options = smallest_pool(EngineOptions(max_model_len=128), path)
    whole = open_engine(path, options)
    serve_twice_and_more(whole, path)
    num_units = whole.tiers._tiers[0].num_units - whole.tiers._tiers[0].stats().num_free_units
    engine = open_engine(path, options, sizes=TierSizes(memory=max(8, num_units // 3), disk=400, policy=policy))
    serve_twice_and_more(engine, path)
    status = engine.tiers.status()
    assert status["disk_loaded_blocks"] > 0, status


@pytest.mark.parametrize("when", StoreWhen)
@pytest.mark.parametrize("name", FEW)
def test_tokens_are_the_same_whenever_blocks_are_stored(
    name: str, when: StoreWhen, families_folder: Path, open_engine
) -> None:
    path = build(FAMILIES[name], families_folder)
    options = smallest_pool(EngineOptions(max_model_len=128, block_size=8), path)
    engine = open_engine(path, options, offload=OffloadOptions(when=when, min_load_tokens=8))
    serve_twice_and_more(engine, path)
    assert engine.tiers.status()["num_loaded_tokens"] > 0


@pytest.mark.parametrize("when", [StoreWhen.ON_EVICTION, pytest.param(StoreWhen.ON_FINISH, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["jamba", pytest.param("qwen3_next", marks=pytest.mark.full)])
def test_states_at_boundaries_that_drafts_crossed_come_back_as_they_were(
    name: str, when: StoreWhen, families_folder: Path, open_engine
) -> None:
    path = build(FAMILIES[name], families_folder)
    options = smallest_pool(EngineOptions(max_model_len=128, block_size=8, speculation=ngram()), path)
    offload = OffloadOptions(when=when, min_load_tokens=8)
    proposer = KnownDrafts(WORKLOAD.sequences(path), MARKS).of
    engine = open_engine(path, options, offload=offload, make_proposer=proposer)
    serve_twice_and_more(engine, path)
    num_loaded = engine.tiers.status()["num_loaded_tokens"]
    answered = [tuple(sequence[:-2]) for sequence in WORKLOAD.sequences(path)]
    for prompt in answered:  # one by one, so that each finds what it wrote before in memory only
        more = Workload((prompt,), 8)
        assert engine.generate(more.prompts, more.num_output) == more.expected(path)
        engine.settle()
    assert engine.tiers.status()["num_loaded_tokens"] - num_loaded > sum(map(len, WORKLOAD.prompts))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_blocks_in_fp8_come_back_as_they_were(name: str, families_folder: Path, open_engine) -> None:
    path = build(FAMILIES[name], families_folder)
    options = EngineOptions(max_model_len=128, cache_dtype=CacheDType.FP8)
    ample = open_engine(path, options)
    expected = ample.generate(WORKLOAD.prompts, WORKLOAD.num_output)
    tight = open_engine(path, dataclasses.replace(smallest_pool(options, path)))
    for _ in range(3):
        assert tight.generate(WORKLOAD.prompts, WORKLOAD.num_output) == expected
        tight.settle()
    assert tight.tiers.status()["num_loaded_tokens"] > 0
