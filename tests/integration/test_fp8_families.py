"""A cache in fp8 has one result in every family, however it is computed: chunks, hits, preemption and hand-off.

What a chunk changes in the last bits of a float32 key may round one stored value the other way. Scans of recurrent
layers change more bits than products do, so these families are held by their logits.
"""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from support.family_ranks import RankCase, execute_cases
from support.local_engine import EngineOptions, LocalEngine, OracleExecutor, start_worker
from support.local_pair import LocalPair
from support.parity_cases import NAMES, WORKLOAD, preempting_pool
from support.rank_processes import run_ranks
from support.tiny_families import FAMILIES, build

from blockferry.connectors.base import TransferMode
from blockferry.engine.kv.model_layers import CacheDType

pytestmark = pytest.mark.slow

ATTENTIVE = [name for name in NAMES if not FAMILIES[name].has_state]
RECURRENT = [name for name in NAMES if FAMILIES[name].has_state]
FP8 = EngineOptions(cache_dtype=CacheDType.FP8, max_model_len=128, max_num_batched_tokens=64)


@functools.cache
def tokens_of(path: Path) -> list[list[int]]:
    """Cold, of prompts that arrive together."""
    return LocalEngine(path, FP8, start_worker(path, FP8)).generate(WORKLOAD.prompts, WORKLOAD.num_output)


@pytest.mark.parametrize("family", ATTENTIVE)
def test_fp8_tokens_do_not_depend_on_hits_chunks_or_the_batch(family: str, families_folder: Path) -> None:
    path = build(FAMILIES[family], families_folder)
    options = dataclasses.replace(FP8, max_num_batched_tokens=17)
    engine = LocalEngine(path, options, start_worker(path, options))
    alone = [engine.generate([prompt], WORKLOAD.num_output)[0] for prompt in WORKLOAD.prompts]
    warm = engine.generate(WORKLOAD.prompts, WORKLOAD.num_output)
    assert alone == warm == tokens_of(path)
    assert engine.kv.stats().num_hit_tokens > 0


@pytest.mark.parametrize("family", ATTENTIVE)
def test_fp8_tokens_survive_preemption(family: str, families_folder: Path) -> None:
    path = build(FAMILIES[family], families_folder)
    options = preempting_pool(FP8, path)
    engine = LocalEngine(path, options, start_worker(path, options))
    assert engine.generate(WORKLOAD.prompts, WORKLOAD.num_output) == tokens_of(path)


@pytest.mark.parametrize("family", RECURRENT)
def test_fp8_logits_of_recurrent_families_do_not_depend_on_chunks(family: str, families_folder: Path) -> None:
    path = build(FAMILIES[family], families_folder)
    whole_SV, chunked_SV = (
        _first_logits(path, dataclasses.replace(FP8, max_num_batched_tokens=chunk)) for chunk in (64, 17)
    )
    assert (whole_SV - chunked_SV).norm() / whole_SV.norm() < 0.01


@pytest.mark.parametrize("family", NAMES)
def test_fp8_blocks_are_ferried_as_they_are(family: str, families_folder: Path) -> None:
    path = build(FAMILIES[family], families_folder)
    pair = LocalPair(path, FP8, mode=TransferMode.PULL)
    try:
        ferried = pair.generate(WORKLOAD.prompts, WORKLOAD.num_output)
        num_equal = sum(one == other for one, other in zip(ferried, tokens_of(path), strict=True))
        assert num_equal >= (len(ferried) if family in ATTENTIVE else len(ferried) - 1)
        assert pair.num_ferried_bytes > 0
    finally:
        pair.close()


@pytest.mark.parametrize("shape", [{"tp_size": 2}, {"pp_size": 2, "block_size": 32}])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_fp8_blocks_are_ferried_to_other_shapes(family: str, shape: dict[str, int], families_folder: Path) -> None:
    path = build(FAMILIES[family], families_folder)
    pair = LocalPair(path, dataclasses.replace(FP8, **shape), FP8)
    try:
        assert pair.generate(WORKLOAD.prompts, WORKLOAD.num_output) == tokens_of(path)
    finally:
        pair.close()


@pytest.mark.parametrize("family", NAMES)
def test_fp8_logits_stay_close_to_those_of_a_whole_cache(family: str, families_folder: Path) -> None:
    path = build(FAMILIES[family], families_folder)
    whole = dataclasses.replace(FP8, cache_dtype=CacheDType.AUTO)
    fp8_SV, whole_SV = (_first_logits(path, options) for options in (FP8, whole))
    errors_S = (fp8_SV - whole_SV).norm(dim=1) / whole_SV.norm(dim=1)
    # of random weights; where it changes the choice of an expert, a prompt's logits are others altogether
    assert 0 < errors_S.median() < 0.35, errors_S


@pytest.mark.parametrize("shape", [{"tp_size": 2}, {"pp_size": 2}])
def test_fp8_tokens_are_the_same_on_several_ranks(shape: dict[str, int], families_folder: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(FP8, **shape)
    cases, answers = [], []
    for family in ("llama", "gemma2", "deepseek_v3"):
        path = build(FAMILIES[family], families_folder)
        sequences = [[*prompt, *output] for prompt, output in zip(WORKLOAD.prompts, tokens_of(path), strict=True)]
        engine = LocalEngine(path, options, OracleExecutor(sequences))
        engine.generate(WORKLOAD.prompts, WORKLOAD.num_output)
        cases.append(RankCase(path=path, options=options, plans=[plan for plan, _ in engine.steps]))
        answers.append([result.token_ids.tolist() for _, result in engine.steps])
    ranks = run_ranks(options.worker_spec(cases[0].path), tmp_path / "meet", execute_cases, cases)
    assert next(rank for rank in reversed(ranks) if rank[0]) == answers


def _first_logits(path: Path, options: EngineOptions) -> torch.Tensor:
    """Of the last token of every prompt, computed in chunks."""
    worker = start_worker(path, options)
    rows = []
    head = worker.model.logits

    def record(hidden_SE: torch.Tensor) -> torch.Tensor | None:
        rows.append(head(hidden_SE))
        return rows[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.model, "logits", record)
        engine = LocalEngine(path, options, worker)
        for prompt in WORKLOAD.prompts:
            engine.generate([prompt], 1)
    return torch.cat(rows)
